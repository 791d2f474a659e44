"""How figures are named, how clients ask, and what a round of answers gave."""

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import TypeAlias, TypeVar

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


async def in_turn(ask: Callable[[int], Awaitable[T]], clients: int, each: int) -> list[T]:
    """Answers to requests 0, 1, ... of so many clients at once, client by client; each sends ``each``, one after another.

    So those who are through early do not wait for the last, as in a batch.
    """

    async def client(number: int) -> list[T]:
        return [await ask(request) for request in range(number, clients * each, clients)]

    return [answer for answers in await asyncio.gather(*map(client, range(clients))) for answer in answers]


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
