"""How figures are named, how clients ask, and what a round of answers gave."""

import asyncio
import itertools
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import TypeAlias, TypeVar

from cascade.answer import Completion
from cascade.bench.measure import EdgeTotals

T = TypeVar("T")
Text: TypeAlias = tuple[int, ...]  # token ids


def at(temperature: float) -> str:
    """The name of a temperature in documents: ``t0``, ``t0.8``, ``t1.0``."""
    return f"t{temperature:.1f}" if temperature else "t0"


def rotated(all: Sequence[T], number: int) -> Sequence[T]:
    """Another one first in every round, so that none is favoured by always coming early or late."""
    first = number % len(all)
    return (*all[first:], *all[:first])


async def level_load(
    ask: Callable[[int], Awaitable[Completion]], clients: int, seconds: float
) -> tuple[float, dict[int, Completion]]:
    """Tokens per second while so many clients ask again as soon as they are answered, and all answers by their numbers.

    An answer that goes on behind the end counts by the share of its time before it: the load is level as long as it counts.
    """
    numbers, answers, tokens = itertools.count(), dict[int, Completion](), 0.0
    end = time.perf_counter() + seconds

    async def client() -> None:
        nonlocal tokens
        while (asked := time.perf_counter()) < end:
            number = next(numbers)
            answer = answers[number] = await ask(number)
            answered = time.perf_counter()
            tokens += len(answer.token_ids) * (min(answered, end) - asked) / (answered - asked)

    await asyncio.gather(*(client() for _ in range(clients)))
    return tokens / seconds, answers


@dataclass(slots=True)
class Answers:
    """What one mode gave."""

    speeds: list[float] = field(default_factory=list)  # tokens per second, one a round
    texts: list[Text] = field(default_factory=list)
    edges: EdgeTotals = field(default_factory=EdgeTotals)

    @property
    def spread(self) -> dict[str, float]:
        """Tokens per second of the slowest round, the median one and the fastest."""
        return spread(self.speeds)


def spread(speeds: Sequence[float]) -> dict[str, float]:
    """The slowest, the median one and the fastest."""
    return {name: round(of(speeds), 1) for name, of in (("low", min), ("median", median), ("high", max))}


def same_text(modes: Iterable[Answers]) -> bool:
    """Whether all modes gave the same texts in the same order."""
    return len({tuple(answers.texts) for answers in modes}) <= 1
