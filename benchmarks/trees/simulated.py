"""Three tiers on three devices over the full one alone, simulated: as lines and as trees, and what bounds them.

A full tier that is right behind its drafter with chance ``a`` gives at most ``1 / (1 - a)`` tokens before it has no guess. A
runner-up that is prepared is a guess, so trees have ``1 / (1 - a')``, ``a'`` being ``a`` and the share of all else in which one
of two runner-ups is right.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from operator import truediv
from statistics import fmean
from typing import TypeAlias

from rich.table import Table

from cascade.chain.profile import PassCost
from cascade.params import DEFAULT_WINDOW, MOST_BRANCHES
from cascade.simulation.forecast import Bench, TierCost
from cascade.simulation.trace import ABOVE, Acceptance, Trace

PASS_S = {"tiny": 1.5e-3, "medium": 5e-3, "full": 22e-3}
HOP_S = 0.3e-3
AGREEMENT = {"chat": (0.65, 0.82), "code": (0.78, 0.90)}  # of each tier with the next one
WINDOWS = tuple(dict.fromkeys((DEFAULT_WINDOW, 32, 16)))
COSTS = tuple(TierCost(name, PassCost(seconds), HOP_S) for name, seconds in PASS_S.items())
TIERS = range(len(COSTS))
BRANCHES = {"lines": 0, "trees": MOST_BRANCHES}

Speedups: TypeAlias = dict[str, dict[str, float]]  # by window, of lines and trees over the full tier alone


@dataclass(frozen=True, slots=True)
class Size:
    """How much is simulated."""

    tokens: int = 1500
    seeds: int = 3


def measure(size: Size) -> dict[str, Speedups]:
    """By kind of text, means of all seeds."""
    found: dict[str, Speedups] = {}
    for kind, shares in AGREEMENT.items():
        benches = [
            Bench(COSTS, Trace.drawn(Acceptance(shares), 4 * size.tokens, seed), size.tokens) for seed in range(size.seeds)
        ]
        found[kind] = {str(window): _speedups(benches, window) for window in WINDOWS}
    return found


def _speedups(benches: Sequence[Bench], window: int) -> dict[str, float]:
    alone = [bench.outcome(TIERS[-1:]).tokens_per_s for bench in benches]
    ways = {
        name: [bench.outcome(TIERS, window=window, branches=most).tokens_per_s for bench in benches]
        for name, most in BRANCHES.items()
    }
    return {name: round(fmean(map(truediv, speeds, alone)), 3) for name, speeds in ways.items()}


def bounds(kind: str) -> dict[str, float]:
    """Tokens of the full tier from one correction to the next, by way."""
    right = AGREEMENT[kind][-1]
    beside = right + (1 - right) * sum(ABOVE)
    return {"lines": round(1 / (1 - right), 2), "trees": round(1 / (1 - beside), 2)}


def headline(found: Mapping[str, Speedups]) -> dict[str, float]:
    """Trees with the default window."""
    return {kind: windows[str(DEFAULT_WINDOW)]["trees"] for kind, windows in found.items()}


def table(found: Mapping[str, Speedups]) -> Table:
    columns = ("text", "window", "lines", "trees", "trees over lines", "bound of lines", "bound of trees")
    result = Table(*columns, title="Simulated: three tiers over the full one alone")
    for kind, windows in found.items():
        limit = bounds(kind)
        for window, speedups in windows.items():
            lines, trees = speedups["lines"], speedups["trees"]
            figures = (lines, trees, trees / lines, limit["lines"], limit["trees"])
            result.add_row(kind, window, *(f"{figure:.2f}" for figure in figures))
    return result
