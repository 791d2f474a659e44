"""What measurements on a device share: how much is measured, texts, and clocks that wait for the device."""

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from cascade.params import SamplingParams

GREEDY = SamplingParams(temperature=0, seed=0)
COPIES = 5  # of which the best counts


@dataclass(frozen=True, slots=True)
class Scale:
    """How much is measured."""

    context: int = 512  # tokens before those that are timed
    tokens: int = 128  # of an answer
    repeats: int = 3
    passes: int = 20  # of each size
    copied: int = 2**30  # bytes, to measure bandwidth
    requests: int = 16
    blocks: int | None = None  # of Transformers' own cache; by default a share of the memory

    @property
    def room(self) -> int:
        """Positions that a tier holds."""
        return 2 * (self.context + self.tokens) * self.requests

    def batch(self) -> list[tuple[int, int]]:
        """Tokens of prompts and of answers, ragged."""
        return [(8 + 37 * i % (self.context // 4), 8 + 29 * i % (self.tokens // 2)) for i in range(self.requests)]


SMALL = Scale(context=32, tokens=16, repeats=1, passes=2, copied=2**20, requests=3, blocks=16)


def tokens(n: int, seed: int) -> list[int]:
    """Token ids that differ from seed to seed from the first on."""
    return [(seed * 7919 + place * 104729 + 17) % 400 + 50 for place in range(n)]


def params(n: int) -> SamplingParams:
    return SamplingParams(max_tokens=n, temperature=0, seed=0, ignore_eos=True)


def settle(device: torch.device) -> None:
    """Wait until the device has done all it was told."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def seconds(work: Callable[[], object], device: torch.device) -> float:
    settle(device)
    begin = time.perf_counter()
    work()
    settle(device)
    return time.perf_counter() - begin


def bandwidth(device: torch.device, size: int) -> float:
    """Bytes per second, read and written, of a copy of ``size`` bytes: far more than caches hold."""
    source = torch.zeros(size, dtype=torch.uint8, device=device)
    target = torch.zeros_like(source)
    return 2 * size / min(seconds(lambda: target.copy_(source), device) for _ in range(COPIES))


def ms(value: float) -> float:
    return round(value * 1e3, 4)
