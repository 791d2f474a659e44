"""What each drafter of a tier was measured to be worth: tokens per second with it over tokens per second without."""

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from cascade.chain.plan import Course
from cascade.chain.planner import Measured

INSIDE = "inside"  # stands for the drafters inside the tier, which the planner judges together


class Worth(NamedTuple):
    """What a drafter is worth in a tier of about so many sessions, to requests that are sampled or greedy."""

    drafter: str
    sampled: bool
    num_sessions: int
    factor: float  # below 1: the tier is faster without


def worths(measured: Iterable[Measured]) -> list[Worth]:
    """That of every drafter that was measured, and measured against courses without it.

    Where requests may use different drafters, those count that may use most.
    """
    widest: dict[tuple[bool, int], Measured] = {}
    for one in measured:
        key = (one.sampled, one.num_sessions)
        if key not in widest or _width(one.allowed) > _width(widest[key].allowed):
            widest[key] = one
    return [
        Worth(drafter, sampled, num_sessions, factor)
        for (sampled, num_sessions), one in widest.items()
        for drafter in (*one.allowed.tiers, *([INSIDE] if one.allowed.drafters else []))
        if (factor := worth(one.rates, drafter)) is not None
    ]


def worth(rates: Mapping[Course, float], drafter: str) -> float | None:
    """The best of ``rates`` (tokens per second) with ``drafter`` over the best without; ``None`` if one of them is unknown."""
    best = {True: 0.0, False: 0.0}
    for course, rate in rates.items():
        takes_part = course.drafters if drafter == INSIDE else drafter in course.tiers
        best[takes_part] = max(best[takes_part], rate)
    return best[True] / best[False] if all(best.values()) else None


def _width(allowed: Course) -> tuple[int, bool, bool]:
    return len(allowed.tiers), allowed.branches, allowed.drafters
