"""Trains a head for a frozen model: the loop, how it goes on where it was interrupted, and its files."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor
from tqdm import tqdm

from cascade.engine.checkpoint import SINGLE
from cascade.engine.heads.head import Head
from cascade.training.learning import Learner, Rates

CHECKPOINT = "training.pt"  # beside the head, to go on from

Batch = Callable[[int], Tensor]  # token ids ``[rows, n]`` of a step by its number, the same ones each time


@dataclass(frozen=True)
class Schedule(Rates):
    """How long a head is trained, and how fast."""

    steps: int
    unrolled: int = 4  # guesses after each position, of EAGLE-3
    decay: float = 0.8  # of the loss, from guess to guess
    save_every: int = 50  # steps


def save(weights: Mapping[str, Tensor], config: Mapping[str, Any], folder: Path) -> None:
    """The files of a head: numbers in bfloat16, and what is counted as it is."""
    folder.mkdir(parents=True, exist_ok=True)
    kept = {key: (part.bfloat16() if part.is_floating_point() else part).contiguous() for key, part in weights.items()}
    save_file(kept, folder / SINGLE, metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config, indent=2, default=str) + "\n", encoding="utf-8")


def fit(head: Head, loss: Callable[[Tensor], Tensor], batch: Batch, schedule: Schedule, folder: Path) -> float:
    """Train ``head``; returns the mean loss of its last steps, in nats a guess.

    ``loss`` is that of token ids ``[rows, n]``, on the head's device. Goes on from the last checkpoint in ``folder``; raises
    `ConfigError` if that is of another head.
    """
    learner, device = Learner(head, schedule, {head.vocab_size, len(head.known)}), next(head.parameters()).device
    path = folder / CHECKPOINT
    numbers = learner.resume(path) if path.exists() else {"step": 0, "mean": 0.0}
    first, mean = int(numbers["step"]), float(numbers["mean"])
    for step in (bar := tqdm(range(first, schedule.steps), desc="train", initial=first, total=schedule.steps, mininterval=5)):
        now = loss(batch(step).to(device))
        learner.learn(now, step, step / schedule.steps)
        mean = now.item() if not step else 0.95 * mean + 0.05 * now.item()
        bar.set_postfix(loss=f"{mean:.3f}", refresh=False)
        if (step + 1) % schedule.save_every == 0 or step + 1 == schedule.steps:
            learner.save(path, {"step": step + 1, "mean": mean})
    return mean
