"""What the benchmark and its workers say to each other: JSON lines. Every environment has what this needs."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

POSITIONS = 1024  # of context: what the embedded family was made for
MOST_REQUESTS = 8  # at once
NUM_DRAFTED = 4  # tokens a round of a draft model, where an engine asks for a number


@dataclass(frozen=True, slots=True)
class Setup:
    """What a worker loads."""

    engine: str  # a module of `benchmarks.peers.engines`
    modes: tuple[str, ...]  # what it may be asked for
    models: tuple[str, ...]  # folders of the family, bottom to top; the last one is answered for
    work: str  # folder for what is made on the way


@dataclass(frozen=True, slots=True)
class Turn:
    """Requests at once (one after another where an engine can do no better), each answered by exactly ``tokens`` tokens."""

    mode: str
    prompts: Sequence[Sequence[int]]
    seeds: Sequence[int]
    temperature: float
    tokens: int


@dataclass(frozen=True, slots=True)
class Said:
    """What a turn took and gave."""

    seconds: float  # from the prompts to the last token of all
    token_ids: Sequence[Sequence[int]]
    processor_s: float = 0.0  # that all processes of the worker computed meanwhile; the worker does not know


class Engine(Protocol):
    """A loaded engine."""

    versions: Mapping[str, str]

    def generate(self, turn: Turn) -> Said: ...

    def close(self) -> None: ...


def num_threads() -> int:
    """Threads that every engine computes with: ``OMP_NUM_THREADS``, else the cores this process may use."""
    return int(os.environ.get("OMP_NUM_THREADS") or len(os.sched_getaffinity(0)))
