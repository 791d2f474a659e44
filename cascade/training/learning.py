"""What trains: optimizers, their rates, and checkpoints to go on from; knows no kind of model."""

import os
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from cascade.engine.devices import product_dtype
from cascade.errors import ConfigError


def mixed_precision(device: torch.device) -> torch.autocast:
    """A context in which products are in `product_dtype`."""
    dtype = product_dtype(device)
    return torch.autocast(device.type, dtype, enabled=dtype is torch.bfloat16)


@dataclass(frozen=True, kw_only=True)
class Rates:
    """How fast a run learns."""

    muon_lr: float = 0.01  # of hidden matrices: neither side of theirs are tokens
    adam_lr: float = 1e-3  # of the rest
    weight_decay: float = 0.01  # of hidden matrices
    warmup_steps: int = 20
    decay_share: float = 0.4  # of the run, over which the rates fall to 0

    def factor(self, step: int, progress: float) -> float:
        """Of both rates; ``progress`` is the share of the run that has passed."""
        return min(1.0, (step + 1) / self.warmup_steps, max(0.0, 1 - progress) / self.decay_share)


class Learner:
    """``module`` with its optimizers; ``tokens`` are sizes of vocabularies, by which hidden matrices are told from others."""

    def __init__(self, module: nn.Module, rates: Rates, tokens: Collection[int]) -> None:
        self._module, self._rates = module, rates
        parameters = list(module.parameters())
        hidden = [p for p in parameters if p.ndim == 2 and min(p.shape) > 1 and not {*tokens} & {*p.shape}]
        rest = [p for p in parameters if all(p is not one for one in hidden)]
        self._optimizers: list[torch.optim.Optimizer] = [
            torch.optim.Muon(hidden, lr=rates.muon_lr, weight_decay=rates.weight_decay, adjust_lr_fn="original"),
            torch.optim.AdamW(rest, lr=rates.adam_lr, betas=(0.9, 0.95), weight_decay=0.0),
        ]

    def learn(self, loss: Tensor, step: int, progress: float) -> None:
        """Take a step, of which that is the loss; see `Rates.factor`."""
        loss.backward()
        nn.utils.clip_grad_norm_(self._module.parameters(), 1.0)
        for optimizer, rate in zip(self._optimizers, (self._rates.muon_lr, self._rates.adam_lr), strict=True):
            for group in optimizer.param_groups:
                group["lr"] = rate * self._rates.factor(step, progress)
            optimizer.step()
            optimizer.zero_grad()

    def save(self, path: Path, numbers: dict[str, Any]) -> None:
        """Write all that is needed to go on, and ``numbers``; a kill meanwhile leaves the checkpoint before."""
        path.parent.mkdir(parents=True, exist_ok=True)
        optimizers = [optimizer.state_dict() for optimizer in self._optimizers]
        partial = path.with_suffix(".partial")
        torch.save({"numbers": numbers, "module": self._module.state_dict(), "optimizers": optimizers}, partial)
        os.replace(partial, path)

    def resume(self, path: Path) -> dict[str, Any]:
        """Go on from a checkpoint; returns its numbers. Raises `ConfigError` if it is of another module."""
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
