"""Guess trees beside lines, in one run: agreement, preparation, and the family as it is served.

    make bench-trees

Parts: ``acceptance`` (how often a runner-up is what the verifier says) and ``served`` (one request at a time through a server
as `cascade serve` starts it, and how many corrections were prepared). What trees give where every tier has a device is in
`benchmarks.cluster`. All modes must give the same text, else the run fails. The last line is one JSON document.
"""

import argparse
import asyncio
import json
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from rich.console import Console

from benchmarks.asked import lossless, stamp
from benchmarks.baseline import quiet
from benchmarks.trees import acceptance, served
from benchmarks.turns import questions
from cascade.client import AsyncClient
from cascade.engine.threads import apart
from deployments.ops.launch.server import Server

RESULTS = Path(__file__).parents[1] / "results" / "trees.json"
PARTS = ("acceptance", "served")
QUICK_TOKENS = 8  # of an answer
console = Console(stderr=True, highlight=False)
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Plan:
    """How much each part measures."""

    text: acceptance.Size = field(default_factory=acceptance.Size)
    answers: served.Size = field(default_factory=served.Size)


QUICK = Plan(acceptance.Size(1, QUICK_TOKENS), served.Size(1, QUICK_TOKENS))


def timed(label: str, work: Callable[[], T]) -> T:
    begin = time.perf_counter()
    result = work()
    console.print(f"[bold]{label}[/]: {time.perf_counter() - begin:.0f} s")
    return result


def serve(size: served.Size) -> dict[str, Any]:
    """Figures of a server."""
    with Server.start(None, port=0) as server:

        async def measure() -> served.Cells:
            async with AsyncClient(server.address) as client:
                return await served.measure(client.generate, questions(size.prompts), size.tokens, console.print)

        return served.figures(asyncio.run(measure()))


def measure(parts: Sequence[str], sizes: Plan) -> dict[str, Any]:
    """The document: what ran, and its head, which is the last line."""
    found: dict[str, Any] = {}
    if "acceptance" in parts:  # apart: this thread must not compute, see `cascade.engine.threads.apart`
        found["acceptance"] = timed("Acceptance", lambda: apart(lambda: acceptance.measure(sizes.text)))
        console.print(acceptance.table(found["acceptance"]))
    if "served" in parts:
        found["served"] = timed("Served", lambda: serve(sizes.answers))
        console.print(served.speeds_table(found["served"]), served.branches_table(found["served"]))
        if not served.branched(found["served"]):
            console.print("[bold red]No runner-up was scored: trees were lines.[/]")
    return {"head": head(found)} | found | stamp()


def head(found: dict[str, Any]) -> dict[str, Any]:
    """One figure for each claim; those of parts that did not run are left out."""
    line: dict[str, Any] = {key: {} for key in ("acceptance", "prepared", "served")}
    if "acceptance" in found:
        line["acceptance"] = acceptance.headline(found["acceptance"])
    if "served" in found:
        line |= {"served": served.headline(found["served"]), "prepared": served.prepared(found["served"])}
    return line


def options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.trees", description="Guess trees beside lines.")
    parser.add_argument("--parts", type=lambda text: text.split(","), default=list(PARTS), help=",".join(PARTS))
    parser.add_argument("--quick", action="store_true", help="few tokens: whether it works, not how fast")
    parser.add_argument(
        "--results", type=Path, help="where the document is kept; of a whole run, benchmarks/results/trees.json"
    )
    chosen = parser.parse_args(arguments)
    if unknown := {*chosen.parts} - {*PARTS}:
        parser.error(f"--parts has {min(unknown)!r}: it takes {', '.join(PARTS)}")
    whole = {*chosen.parts} == {*PARTS} and not chosen.quick
    chosen.results = chosen.results or (RESULTS if whole else None)
    return chosen


def main(arguments: Sequence[str] | None = None) -> None:
    chosen = options(arguments)
    quiet()
    logging.getLogger("ray.serve").setLevel(logging.WARNING)
    found = measure(chosen.parts, QUICK if chosen.quick else Plan())
    if chosen.results is not None:
        chosen.results.parent.mkdir(exist_ok=True)
        chosen.results.write_text(json.dumps(found, indent=2) + "\n")
    print(json.dumps(found["head"]))
    if not lossless(found):
        raise SystemExit("Modes gave different texts")


if __name__ == "__main__":
    main()
