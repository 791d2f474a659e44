"""Guess trees beside lines, in one run: agreement, prefetched corrections, and the family as it is served.

    make bench-trees

Parts: ``acceptance`` (how often a runner-up is what the verifier says, along what the full model writes, in float32, with the
noise that a served request has) and ``served`` (one request at a time through a server as `cascade serve` starts it, and how
many corrections were prepared). What trees give where every tier has a device is in `benchmarks.cluster`. All modes must give
the same text, else the run fails. The last line is one JSON document.
"""

import asyncio
from collections.abc import Mapping, Sequence
from itertools import combinations
from typing import Any

from rich.table import Table

from benchmarks.cluster.recorded import record
from benchmarks.document import console, finish, parsed, parser, stamp, timed
from benchmarks.turns import AGAIN, ALONE, Size, Stream, at, in_turns
from cascade import family
from cascade.bench.load import Cell, Mode, joined, same_text
from cascade.client import AsyncClient
from cascade.engine.threads import apart
from cascade.messages import RUNNER_UPS, Edge
from cascade.params import Speculation
from deployments.ops.launch import Server

PARTS = ("acceptance", "served")
ACCEPTANCE, SERVED = Size(prompts=2, tokens=96), Size(tokens=96)
QUICK = Size(tokens=8)
EDGES = {f"{family.NAMES[i]} → {family.NAMES[j]}": (i, j) for i, j in combinations(range(len(family.NAMES)), 2)}
LOWER = family.NAMES[:-1]
TOP = family.NAMES[-2:]  # the edge whose corrections cost most
BRANCHES = {"lines": 0, "trees": None}
AUTO = [Mode(f"{way}, auto", Speculation(branches=most)) for way, most in BRANCHES.items()]
EXPLICIT = [
    Mode(f"{way}, {' → '.join((*chain, TOP[1]))}", Speculation(tiers=chain, branches=most))
    for chain in (*((name,) for name in LOWER), LOWER)
    for way, most in BRANCHES.items()
]
MODES = (ALONE, AGAIN, *AUTO, *EXPLICIT)
ALL_TIERS = EXPLICIT[-1]  # with trees


def acceptance(size: Size) -> dict[str, dict[str, list[float]]]:
    """By temperature and edge the share of positions at which the verifier's own token is the drafter's; with one runner-up;
    with two."""
    found: dict[str, dict[str, list[float]]] = {}
    for temperature in size.temperatures:
        recording = record(size.prompts, size.tokens, temperature)
        found[at(temperature)] = {
            name: [round(recording.shared(*edge, most), 4) for most in range(1, 2 + RUNNER_UPS)] for name, edge in EDGES.items()
        }
    return found


async def served(stream: Stream, size: Size) -> dict[str, Any]:
    """Speeds, ratios, and whether texts are the same, by temperature; at 1.0 of all tiers with trees alone."""
    found = {}
    for temperature in size.temperatures:
        modes = MODES if temperature < 1 else (ALONE, AGAIN, ALL_TIERS)
        found[at(temperature)] = figures(await in_turns(stream, modes, size, temperature))
    return found


def figures(cells: Sequence[Cell]) -> dict[str, Any]:
    """Of one temperature."""
    modes = {cell.mode.name: cell for cell in joined(cells)}
    speeds = {name: round(cell.tokens_per_second, 1) for name, cell in modes.items()}
    found: dict[str, Any] = {
        "same_text": same_text(cells),
        "tokens_per_second": speeds,
        "tokens_per_full_pass": {name: round(cell.tokens_per_full_pass, 2) for name, cell in modes.items()},
        "branches": branches(modes[ALL_TIERS.name].edges.get(TOP, Edge(*TOP))),
    }
    if AUTO[0].name in modes:
        found |= {"best": best(speeds), "ratios": ratios(speeds)}
    return found


def branches(edge: Edge) -> dict[str, Any]:
    """What corrections of the medium tier found there: waiting are tokens after the corrected one."""
    return {
        "corrected": edge.corrected,
        "prepared": edge.prefetched,
        "prepared_share": round(edge.prefetched / edge.corrected, 3) if edge.corrected else None,
        "mean_waiting": round(edge.prefetched_tokens / edge.prefetched, 2) if edge.prefetched else None,
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


def head(found: Mapping[str, Any]) -> dict[str, Any]:
    """One figure for each claim; those of parts that did not run are left out."""
    line: dict[str, Any] = {"acceptance": {}, "prepared": {}, "served": {}}
    if shares := found.get("acceptance"):
        line["acceptance"] = {temperature: edges[" → ".join(TOP)][-1] for temperature, edges in shares.items()}
    for temperature, one in found.get("served", {}).items():
        line["prepared"][temperature] = one["branches"]["prepared_share"]
        line["served"] |= {f"{temperature}_{name}": ratio for name, ratio in one.get("ratios", {}).items() if name[:3] == "vs_"}
    return line


def tables(found: Mapping[str, Any]) -> list[Table]:
    """Shares of each edge; tokens per second of every mode, the best explicit chains marked."""
    shares = Table("edge", *found.get("acceptance", {}), title="The verifier's token is the drafter's, a runner-up, the second")
    for edge in EDGES:
        each = found.get("acceptance", {}).values()
        shares.add_row(edge, *("  ".join(f"{share:.3f}" for share in edges[edge]) for edges in each))
    columns = ("temperature", "mode", "tokens/s", "over alone", "tokens a full pass", "corrections prepared")
    speeds = Table(*columns, title="Served, one request at a time; * is the best of its kind")
    for temperature, one in found.get("served", {}).items():
        for mode, speed in one["tokens_per_second"].items():
            mark = " *" if mode in one.get("best", {}).values() else ""
            cells = (
                f"{speed:.1f}",
                f"{speed / one['tokens_per_second'][ALONE.name]:.2f}",
                f"{one['tokens_per_full_pass'][mode]:.2f}",
            )
            prepared = str(one["branches"]["prepared_share"] or "-") if mode == ALL_TIERS.name else ""
            speeds.add_row(temperature, mode + mark, *cells, prepared)
    return [made for made, part in ((shares, "acceptance"), (speeds, "served")) if part in found]


def serve(size: Size) -> dict[str, Any]:
    """Figures of a server."""

    async def measure(address: str) -> dict[str, Any]:
        async with AsyncClient(address) as client:
            return await served(client.stream, size)

    with Server.start(None, port=0) as server:
        found = asyncio.run(measure(server.address))
    if not any(len(one["branches"]["proposed_by_rank"]) > 1 for one in found.values()):
        console.print("[bold red]No runner-up was scored: trees were lines.[/]")
    return found


def main(arguments: Sequence[str] | None = None) -> None:
    chosen = parsed(parser("trees", "Guess trees beside lines.", PARTS), arguments)
    found: dict[str, Any] = {}
    if "acceptance" in (chosen.only or PARTS):  # apart: this thread must not compute, see `cascade.engine.threads.apart`
        size = QUICK if chosen.quick else ACCEPTANCE
        found["acceptance"] = timed("Acceptance", lambda: apart(lambda: acceptance(size)))
    if "served" in (chosen.only or PARTS):
        found["served"] = timed("Served", lambda: serve(QUICK if chosen.quick else SERVED))
    console.print(*tables(found))
    finish({"head": head(found)} | found | stamp(), head(found), chosen.results)


if __name__ == "__main__":
    main()
