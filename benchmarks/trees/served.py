"""The family served with lines and with trees, one request at a time: tokens per second, and what trees prepared."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from rich.table import Table

from benchmarks.turns import AGAIN, ALONE, Answers, Ask, Question, at, in_turns, same_text
from cascade import family
from cascade.bench.measure import Mode
from cascade.messages import Edge
from cascade.params import SamplingParams, Speculation

LOWER = family.NAMES[:-1]
TOP = family.NAMES[-2:]
CHAINS = (*((name,) for name in LOWER), LOWER)
BRANCHES = {"lines": 0, "trees": None}
AUTO = [Mode(f"{way}, auto", Speculation(branches=most)) for way, most in BRANCHES.items()]
EXPLICIT = [
    Mode(f"{way}, {' → '.join((*chain, TOP[1]))}", Speculation(tiers=chain, branches=most))
    for chain in CHAINS
    for way, most in BRANCHES.items()
]
MODES = (ALONE, AGAIN, *AUTO, *EXPLICIT)
ALL_TIERS = EXPLICIT[-1]  # with trees
TEMPERATURES = {0.0: MODES, 0.7: MODES, 1.0: (ALONE, AGAIN, ALL_TIERS)}  # what is asked at each

Cells: TypeAlias = dict[str, dict[str, Answers]]  # by temperature and mode


@dataclass(frozen=True, slots=True)
class Size:
    """How much is asked."""

    prompts: int = 1  # of each category
    tokens: int = 96  # of an answer


async def measure(ask: Ask, asked: tuple[Question, ...], tokens: int, tell: Callable[[str], object]) -> Cells:
    """All modes at all temperatures."""
    return {
        at(temperature): await in_turns(ask, modes, asked, SamplingParams(max_tokens=tokens, temperature=temperature), tell)
        for temperature, modes in TEMPERATURES.items()
    }


def figures(cells: Cells) -> dict[str, Any]:
    """Speeds, ratios, and whether texts are the same, by temperature."""
    return {name: _figures(modes) for name, modes in cells.items()}


def branched(found: Mapping[str, Any]) -> bool:
    """Whether a runner-up was ever scored: else trees were lines, and their figures are those of lines."""
    return any(len(one["branches"]["proposed_by_rank"]) > 1 for one in found.values())


def _figures(modes: Mapping[str, Answers]) -> dict[str, Any]:
    speeds = {name: round(answers.speed(), 1) for name, answers in modes.items()}
    found: dict[str, Any] = {
        "same_text": same_text(modes.values()),
        "tokens_per_second": speeds,
        "tokens_per_full_pass": {name: round(answers.tokens_per_pass(), 2) for name, answers in modes.items()},
        "branches": branches(modes[ALL_TIERS.name].edges.get(TOP, Edge(*TOP))),
    }
    if AUTO[0].name in modes:
        found |= {"best": best(speeds), "ratios": ratios(speeds)}
    return found


def branches(edge: Edge) -> dict[str, Any]:
    """What corrections of the medium tier found there."""
    return {
        "corrected": edge.corrected,
        "prepared": edge.prefetched,
        "prepared_share": round(edge.prefetched / edge.corrected, 3) if edge.corrected else None,
        "mean_waiting": round(edge.prefetched_tokens / edge.prefetched, 2)
        if edge.prefetched
        else None,  # tokens after the corrected one
        "accepted_by_rank": edge.accepted_by_rank,
        "proposed_by_rank": edge.proposed_by_rank,
    }


def best(speeds: Mapping[str, float]) -> dict[str, str]:
    """The fastest explicit chain with lines, and with trees."""
    return {
        way: max((mode.name for mode in EXPLICIT if mode.name.startswith(way)), key=lambda name: speeds[name])
        for way in BRANCHES
    }


def ratios(speeds: Mapping[str, float]) -> dict[str, float]:
    """Of the best explicit chains, and of those that the planner chooses; and of alone to itself, which should be 1."""
    chosen = best(speeds)
    pairs = {
        "vs_lines": (chosen["trees"], chosen["lines"]),
        "vs_alone": (chosen["trees"], ALONE.name),
        "auto_vs_lines": (AUTO[1].name, AUTO[0].name),
        "auto_vs_alone": (AUTO[1].name, ALONE.name),
        "again_vs_alone": (AGAIN.name, ALONE.name),
    }
    return {name: round(speeds[one] / speeds[other], 3) for name, (one, other) in pairs.items()}


def headline(found: Mapping[str, Any]) -> dict[str, float]:
    return {
        "t0.7_vs_lines": found["t0.7"]["ratios"]["vs_lines"],
        "t0.7_vs_alone": found["t0.7"]["ratios"]["vs_alone"],
        "t0_vs_lines": found["t0"]["ratios"]["vs_lines"],
        "t0_vs_alone": found["t0"]["ratios"]["vs_alone"],
    }


def prepared(found: Mapping[str, Any]) -> dict[str, float | None]:
    """Shares of the corrections that found their branch; none where nothing was corrected."""
    return {name: found[name]["branches"]["prepared_share"] for name in ("t0", "t1.0")}


def speeds_table(found: Mapping[str, Any]) -> Table:
    """Tokens per second of every mode; the best explicit chains are marked."""
    columns = ("temperature", "mode", "tokens/s", "over alone", "tokens a full pass")
    result = Table(*columns, title="Served, one request at a time; * is the best of its kind")
    for temperature, one in found.items():
        marked = set(one.get("best", {}).values())
        speeds, passes = one["tokens_per_second"], one["tokens_per_full_pass"]
        for mode, speed in speeds.items():
            ratio = f"{speed / speeds[ALONE.name]:.2f}"
            result.add_row(temperature, mode + (" *" if mode in marked else ""), f"{speed:.1f}", ratio, f"{passes[mode]:.2f}")
    return result


def branches_table(found: Mapping[str, Any]) -> Table:
    columns = ("temperature", "corrected", "prepared", "share", "mean tokens waiting")
    result = Table(*columns, title=f"Corrections of {TOP[0]} by {TOP[1]}")
    for temperature, one in found.items():
        seen = (one["branches"][key] for key in ("corrected", "prepared", "prepared_share", "mean_waiting"))
        result.add_row(temperature, *("-" if figure is None else str(figure) for figure in seen))
    return result
