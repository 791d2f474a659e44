"""The embedded family served with lines and with trees, one request at a time: tokens per second, and what trees prepared.

Modes take turns on every prompt, and another one comes first each time. Of every mode the median answer counts.
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any, TypeAlias

from rich.table import Table

from benchmarks.peers.prompts import PROMPTS
from benchmarks.trees.cells import Answers, at, rotated, same_text
from benchmarks.trees.systems import Ask
from cascade import family
from cascade.bench.measure import Mode
from cascade.messages import Edge
from cascade.params import Handling, SamplingParams, Speculation

LOWER = family.NAMES[:-1]
TOP = family.NAMES[-2:]
CHAINS = (*((name,) for name in LOWER), LOWER)
BRANCHES = {"lines": 0, "trees": None}
ALONE = Mode("alone", Speculation("off"))
AUTO = [Mode(f"{way}, auto", Speculation(branches=most)) for way, most in BRANCHES.items()]
EXPLICIT = [
    Mode(f"{way}, {' → '.join((*chain, TOP[1]))}", Speculation(tiers=chain, branches=most))
    for chain in CHAINS
    for way, most in BRANCHES.items()
]
MODES = (ALONE, *AUTO, *EXPLICIT)
ALL_TIERS = EXPLICIT[-1]  # with trees
TEMPERATURES = {0.0: MODES, 0.8: MODES, 1.0: (ALONE, ALL_TIERS)}  # what is asked at each

Cells: TypeAlias = dict[str, dict[str, Answers]]  # by temperature and mode


@dataclass(frozen=True, slots=True)
class Size:
    """How much is asked."""

    tokens: int  # of an answer
    prompts: int = 8
    rounds: int = 1


async def measure(ask: Ask, size: Size) -> Cells:
    """All modes at all temperatures."""
    return {at(temperature): await _in_turns(ask, modes, temperature, size) for temperature, modes in TEMPERATURES.items()}


async def _in_turns(ask: Ask, modes: Sequence[Mode], temperature: float, size: Size) -> dict[str, Answers]:
    """Every mode on every prompt, after one prompt that does not count."""
    found = {mode.name: Answers() for mode in modes}
    salts = count()  # so that no prompt is known to any mode
    for number in range(-1, size.rounds * size.prompts):
        seed = max(0, number) % size.prompts
        params = SamplingParams(max_tokens=size.tokens, temperature=temperature, seed=seed, ignore_eos=True)
        for mode in rotated(modes, number):
            begin = time.perf_counter()
            salt = Handling(cache_salt=f"{temperature:g} {next(salts)}")
            completion = await ask(PROMPTS[seed % len(PROMPTS)], params, mode.speculation, salt)
            if number >= 0:
                answers = found[mode.name]
                answers.speeds.append(len(completion.token_ids) / (time.perf_counter() - begin))
                answers.texts.append(completion.token_ids)
                answers.edges.add(completion.stats.edges)
    return found


def figures(cells: Cells) -> dict[str, Any]:
    """Speeds, ratios of medians, and whether texts are the same, by temperature."""
    return {name: _figures(modes) for name, modes in cells.items()}


def branched(found: Mapping[str, Any]) -> bool:
    """Whether a runner-up was ever scored: else trees were lines, and their figures are those of lines."""
    return any(len(one["branches"]["proposed_by_rank"]) > 1 for one in found.values())


def _figures(modes: Mapping[str, Answers]) -> dict[str, Any]:
    spreads = {name: answers.spread for name, answers in modes.items()}
    found: dict[str, Any] = {"same_text": same_text(modes.values()), "tokens_per_second": spreads}
    if ALL_TIERS.name in modes:
        found["branches"] = branches(modes[ALL_TIERS.name].edges.get(TOP, Edge(*TOP)))
    if AUTO[0].name in modes:
        found |= {"best": best(spreads), "ratios": ratios(spreads)}
    return found


def branches(edge: Edge) -> dict[str, Any]:
    """What corrections of the medium tier found there."""
    return {
        "corrected": edge.corrected,
        "prepared": edge.prepared,
        "prepared_share": round(edge.prepared / edge.corrected, 3) if edge.corrected else None,
        "mean_waiting": round(edge.waiting / edge.prepared, 2) if edge.prepared else None,  # tokens behind the corrected one
        "accepted_by_rank": edge.accepted_by_rank,
        "proposed_by_rank": edge.proposed_by_rank,
    }


def best(spreads: Mapping[str, Mapping[str, float]]) -> dict[str, str]:
    """The fastest explicit chain with lines, and with trees."""
    return {
        way: max((mode.name for mode in EXPLICIT if mode.name.startswith(way)), key=lambda name: spreads[name]["median"])
        for way in BRANCHES
    }


def ratios(spreads: Mapping[str, Mapping[str, float]]) -> dict[str, float]:
    """Of medians: the best explicit chains, and those that the planner chooses."""
    chosen = best(spreads)
    pairs = {
        "vs_lines": (chosen["trees"], chosen["lines"]),
        "vs_alone": (chosen["trees"], ALONE.name),
        "auto_vs_lines": (AUTO[1].name, AUTO[0].name),
        "auto_vs_alone": (AUTO[1].name, ALONE.name),
    }
    return {name: round(spreads[one]["median"] / spreads[other]["median"], 3) for name, (one, other) in pairs.items()}


def headline(found: Mapping[str, Any]) -> dict[str, float]:
    return {
        "t0.8_vs_lines": found["t0.8"]["ratios"]["vs_lines"],
        "t0.8_vs_alone": found["t0.8"]["ratios"]["vs_alone"],
        "t0_vs_lines": found["t0"]["ratios"]["vs_lines"],
    }


def prepared(found: Mapping[str, Any]) -> dict[str, float | None]:
    """Shares of the corrections that found their branch; none where nothing was corrected."""
    return {name: found[name]["branches"]["prepared_share"] for name in ("t0", "t1.0")}


def speeds_table(system: str, found: Mapping[str, Any]) -> Table:
    """Tokens per second of every mode; the best explicit chains are marked."""
    result = Table("temperature", "mode", "tokens/s", "over alone", title=f"Served through the {system}, one request at a time")
    for temperature, one in found.items():
        marked = set(one.get("best", {}).values())
        alone = one["tokens_per_second"][ALONE.name]["median"]
        for mode, speed in one["tokens_per_second"].items():
            range_ = f"{speed['median']:.0f} ({speed['low']:.0f} to {speed['high']:.0f})"
            ratio = f"{speed['median'] / alone:.2f}"
            result.add_row(temperature, mode + (" *" if mode in marked else ""), range_, ratio)
    return result


def branches_table(system: str, found: Mapping[str, Any]) -> Table:
    columns = ("temperature", "corrected", "prepared", "share", "mean tokens waiting")
    result = Table(*columns, title=f"Corrections of {TOP[0]} by {TOP[1]}, through the {system}")
    for temperature, one in found.items():
        seen = (one["branches"][key] for key in ("corrected", "prepared", "prepared_share", "mean_waiting"))
        result.add_row(temperature, *("-" if figure is None else str(figure) for figure in seen))
    return result
