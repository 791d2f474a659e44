"""Trains heads for a frozen model: the loop, its rates, and how it goes on where it was interrupted; knows no kind of head."""

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from tqdm import tqdm

from cascade.engine.heads.head import Head
from cascade.errors import ConfigError

CHECKPOINT = "training.pt"  # beside the head, to go on from

Batch = Callable[[int], Tensor]  # token ids ``[rows, n]`` of a step by its number, the same ones each time


@dataclass(frozen=True)
class Schedule:
    """How long a head is trained, and how fast."""

    steps: int
    unrolled: int = 4  # guesses behind each position, of EAGLE-3
    decay: float = 0.8  # of the loss, from guess to guess
    muon_lr: float = 0.01  # of hidden matrices: neither side of theirs are tokens
    adam_lr: float = 1e-3  # of the rest
    warmup_steps: int = 20
    save_every: int = 50  # steps
    decay_share: float = 0.4  # of the steps, at whose end the learning rate is 0

    def lr_factor(self, step: int) -> float:
        left = (self.steps - step) / max(1.0, self.steps * self.decay_share)
        return min(1.0, (step + 1) / self.warmup_steps, left)


def fit(head: Head, loss: Callable[[Tensor], Tensor], batch: Batch, schedule: Schedule, folder: Path) -> float:
    """Train ``head``; returns the mean loss of its last steps, in nats a guess.

    ``loss`` is that of token ids ``[rows, n]``, on the head's device. Goes on from the last checkpoint in ``folder``; raises
    `ConfigError` if that is of another head.
    """
    optimizers, device = _optimizers(head, schedule), next(head.parameters()).device
    first, mean = _resume(folder / CHECKPOINT, head, optimizers)
    for step in (bar := tqdm(range(first, schedule.steps), desc="train", initial=first, total=schedule.steps, mininterval=5)):
        now = loss(batch(step).to(device))
        now.backward()
        nn.utils.clip_grad_norm_(head.parameters(), 1.0)
        for optimizer, rate in zip(optimizers, (schedule.muon_lr, schedule.adam_lr), strict=True):
            for group in optimizer.param_groups:
                group["lr"] = rate * schedule.lr_factor(step)
            optimizer.step()
            optimizer.zero_grad()
        mean = now.item() if not step else 0.95 * mean + 0.05 * now.item()
        bar.set_postfix(loss=f"{mean:.3f}", refresh=False)
        if (step + 1) % schedule.save_every == 0 or step + 1 == schedule.steps:
            _save(folder / CHECKPOINT, head, optimizers, step + 1, mean)
    return mean


def _optimizers(head: Head, schedule: Schedule) -> list[torch.optim.Optimizer]:
    tokens = {head.vocab_size, len(head.known)}
    hidden = [p for p in head.parameters() if p.ndim == 2 and min(p.shape) > 1 and not tokens & {*p.shape}]
    rest = [p for p in head.parameters() if all(p is not one for one in hidden)]
    return [
        torch.optim.Muon(hidden, lr=schedule.muon_lr, weight_decay=0.01, adjust_lr_fn="original"),
        torch.optim.AdamW(rest, lr=schedule.adam_lr, betas=(0.9, 0.95), weight_decay=0.0),
    ]


def _save(path: Path, head: Head, optimizers: Sequence[torch.optim.Optimizer], step: int, mean: float) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    state = {"step": step, "mean": mean, "head": head.state_dict(), "optimizers": [one.state_dict() for one in optimizers]}
    partial = path.with_suffix(".partial")
    torch.save(state, partial)
    os.replace(partial, path)  # a kill while saving leaves the previous checkpoint whole


def _resume(path: Path, head: Head, optimizers: Sequence[torch.optim.Optimizer]) -> tuple[int, float]:
    if not path.exists():
        return 0, 0.0
    state = torch.load(path, map_location="cpu", weights_only=True)
    wanted, given = ({name: part.shape for name, part in of.items()} for of in (head.state_dict(), state["head"]))
    if wanted != given:
        raise ConfigError(f"{path} is the training of another drafter: choose another folder, or remove that file")
    head.load_state_dict(state["head"])
    for optimizer, saved in zip(optimizers, state["optimizers"], strict=True):
        optimizer.load_state_dict(saved)
    return int(state["step"]), float(state["mean"])
