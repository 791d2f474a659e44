"""Optimizers of any module, their learning rates, and checkpoints to go on from."""

from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from cascade.engine.devices import product_dtype
from cascade.errors import ConfigError
from cascade.training import group
from cascade.training.versions import replacing


def mixed_precision(device: torch.device) -> torch.autocast:
    """A context in which matrix products are in `product_dtype`."""
    dtype = product_dtype(device)
    return torch.autocast(device.type, dtype, enabled=dtype is torch.bfloat16)


@dataclass(frozen=True, kw_only=True)
class Rates:
    """Learning rates of a run."""

    muon_lr: float = 0.01  # the rate of hidden matrices, no side of which are tokens; 0: AdamW trains them, too
    adam_lr: float = 1e-3  # the rate of all other parameters
    weight_decay: float = 0.01  # the decay of hidden matrices
    warmup_steps: int = 20
    decay_share: float = 0.4  # the last part of the run, in which the rates fall to 0

    def factor(self, step: int, progress: float) -> float:
        """The factor of both rates; ``progress`` is the share of the run that has passed."""
        return min(1.0, (step + 1) / self.warmup_steps, max(0.0, 1 - progress) / self.decay_share)


class Learner:
    """``module`` with its optimizers. A matrix with a side in ``tokens``, sizes of vocabularies, is no hidden one.

    Processes of a `group` begin alike and take the same steps, on the mean of their gradients.
    """

    def __init__(self, module: nn.Module, rates: Rates, tokens: Collection[int]) -> None:
        self._module, self._rates = module, rates
        self._parameters = parameters = [p for p in module.parameters() if p.requires_grad]
        group.equalize(parameters)
        hidden = [p for p in parameters if p.ndim == 2 and min(p.shape) > 1 and not {*tokens} & {*p.shape}]
        hidden = hidden if rates.muon_lr else []
        rest = [p for p in parameters if all(p is not other for other in hidden)]
        self._optimizers: list[torch.optim.Optimizer] = [
            torch.optim.AdamW(rest, lr=rates.adam_lr, betas=(0.9, 0.95), weight_decay=0.0)
        ]
        if hidden:
            muon = torch.optim.Muon(hidden, lr=rates.muon_lr, weight_decay=rates.weight_decay, adjust_lr_fn="original")
            self._optimizers.insert(0, muon)

    def learn(self, loss: Tensor, step: int, progress: float) -> None:
        """Take a step down the gradient of ``loss``; see `Rates.factor`."""
        loss.backward()
        group.average(self._parameters)
        nn.utils.clip_grad_norm_(self._parameters, 1.0)
        for optimizer, rate in zip(self._optimizers[::-1], (self._rates.adam_lr, self._rates.muon_lr), strict=False):
            for settings in optimizer.param_groups:
                settings["lr"] = rate * self._rates.factor(step, progress)
            optimizer.step()
            optimizer.zero_grad()

    def save(self, path: Path, numbers: dict[str, Any]) -> None:
        """Write a checkpoint with ``numbers``; a kill meanwhile leaves the one before."""
        optimizers = [optimizer.state_dict() for optimizer in self._optimizers]
        with replacing(path) as file:
            torch.save({"numbers": numbers, "module": self._module.state_dict(), "optimizers": optimizers}, file)

    def resume(self, path: Path) -> dict[str, Any]:
        """Load a checkpoint; returns its numbers. Raises `ConfigError` if it is of another module."""
        state = torch.load(path, map_location="cpu", weights_only=True)
        wanted, given = (
            {name: part.shape for name, part in of.items()} for of in (self._module.state_dict(), state.get("module", {}))
        )
        if wanted != given:
            raise ConfigError(f"{path} is the training of another drafter: choose another folder, or remove that file")
        self._module.load_state_dict(state["module"])
        for optimizer, saved in zip(self._optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        numbers: dict[str, Any] = state["numbers"]
        return numbers
