"""Requests over hours, made up by known processes: when they come, and how long their answers are.

Poisson processes whose rate changes, by thinning (Lewis and Shedler, "Simulation of nonhomogeneous Poisson processes by
thinning", 1979). Lengths are log-normal, as those of recorded conversations roughly are.
"""

import bisect
import itertools
import math
import random
from collections.abc import Callable
from typing import NamedTuple

DAY_S = 86_400.0
SPREAD = 0.8  # of the logarithm of lengths
MOST_TOKENS = 4096
NIGHT = 0.1  # of the rate at the busiest hour, what is left at the quietest one


class Arrival(NamedTuple):
    """A request."""

    at_s: float
    tokens: int  # of its answer


def arrivals(rate: Callable[[float], float], most: float, seconds: float, tokens: float, seed: int = 0) -> list[Arrival]:
    """A Poisson process of ``rate(time)`` requests a second, never more than ``most``, with ``tokens`` an answer on average."""
    lots = random.Random(seed)
    found, now = list[Arrival](), lots.expovariate(most)
    while now < seconds:
        if lots.random() * most < rate(now):
            found.append(Arrival(now, _length(lots, tokens)))
        now += lots.expovariate(most)
    return found


def rising(most: float, seconds: float, tokens: float, seed: int = 0) -> list[Arrival]:
    """From a tenth of ``most`` requests a second straight up to all of them."""
    return arrivals(lambda now: most * (0.1 + 0.9 * now / seconds), most, seconds, tokens, seed)


def nightly(most: float, seconds: float, tokens: float, seed: int = 0) -> list[Arrival]:
    """Days, the busiest hour at noon, when ``most`` requests come in a second, and nights with a tenth of that."""

    def rate(now: float) -> float:
        return most * (NIGHT + (1 - NIGHT) * (0.5 - 0.5 * math.cos(2 * math.pi * now / DAY_S)) ** 2)

    return arrivals(rate, most, seconds, tokens, seed)


def bursty(
    most: float,
    seconds: float,
    tokens: float,
    seed: int = 0,
    quiet: float = 0.25,
    quiet_s: float = 1800.0,
    burst_s: float = 600.0,
) -> list[Arrival]:
    """Two states that take turns, exponentially long: ``most`` requests a second for ``burst_s``, ``quiet`` of that for
    ``quiet_s`` on average. A Markov-modulated Poisson process (Fischer and Meier-Hellstern, "The Markov-modulated Poisson
    process (MMPP) cookbook", 1993)."""
    lots = random.Random(f"{seed} states")
    turns, now = list[float](), 0.0
    for mean_s in itertools.cycle((quiet_s, burst_s)):
        if now >= seconds:
            break
        now += lots.expovariate(1 / mean_s)
        turns.append(now)

    def rate(at: float) -> float:
        return most if bisect.bisect(turns, at) % 2 else quiet * most

    return arrivals(rate, most, seconds, tokens, seed)


def _length(lots: random.Random, mean: float) -> int:
    return max(1, min(MOST_TOKENS, round(lots.lognormvariate(math.log(mean) - SPREAD**2 / 2, SPREAD))))
