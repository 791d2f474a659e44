"""Guess trees beside lines, in one run: agreement, preparation, the simulator, and the embedded family as it is served.

    make bench-trees

Parts: ``acceptance`` (how often a runner-up is what the verifier says), ``simulated`` (three devices), ``served`` (one request
at a time, and how many corrections were prepared) and ``never_slower`` (up to 64 requests at once). The served parts run in the
library of this process, and but for ``--no-serve`` through a server, whose figures then are those of the document's head. All
modes must give the same text, else the run fails. The last line is one JSON document.
"""

import argparse
import asyncio
import json
import logging
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from rich.console import Console

from benchmarks.baseline import quiet
from benchmarks.trees import acceptance, crowd, served, simulated
from benchmarks.trees.systems import Clients, System, door, library, pass_ms
from cascade.engine.devices import processor
from cascade.engine.threads import apart

RESULTS = Path(__file__).parents[1] / "results"
PARTS = ("acceptance", "simulated", "served", "never_slower")
TOKENS, QUICK_TOKENS = 96, 24  # of an answer
console = Console(stderr=True, highlight=False)
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Plan:
    """How much each part measures."""

    text: acceptance.Size
    devices: simulated.Size
    answers: served.Size
    load: crowd.Size


def plan(tokens: int | None, *, quick: bool) -> Plan:
    """``tokens`` of an answer; a quick run is to see that everything works."""
    if quick:
        return Plan(
            acceptance.Size(rows=2, length=128, prompt=32, written=32),
            simulated.Size(tokens=200, seeds=1),
            served.Size(prompts=2, tokens=tokens or QUICK_TOKENS),
            crowd.Size(tokens=tokens or QUICK_TOKENS, most=512, warm_up=0, rounds=1, round_s=0.5),
        )
    tokens = tokens or TOKENS
    return Plan(acceptance.Size(), simulated.Size(), served.Size(tokens=tokens), crowd.Size(tokens=tokens))


def timed(label: str, work: Callable[[], T]) -> T:
    begin = time.perf_counter()
    result = work()
    console.print(f"[bold]{label}[/]: {time.perf_counter() - begin:.0f} s")
    return result


async def through(clients: Clients, parts: Sequence[str], sizes: Plan, *, crowded: bool) -> dict[str, Any]:
    """Figures of one system."""
    found: dict[str, Any] = {}
    async with clients() as ask:
        if "served" in parts:
            found["served"] = served.figures(await served.measure(ask, sizes.answers))
        if "never_slower" in parts and crowded:
            found["never_slower"] = crowd.figures(await crowd.measure(ask, sizes.load))
    return found


def serve(parts: Sequence[str], sizes: Plan, *, server: bool) -> dict[str, Any]:
    """Figures of the library and the server; those of the last one count, and it alone meets the crowd."""
    times = pass_ms()
    dtype = min(times, key=lambda name: times[name])
    console.print(f"The full model's passes are faster in {dtype}, milliseconds:", times)
    systems: dict[str, System] = {"library": library, "server": door} if server else {"library": library}
    last = list(systems)[-1]
    found: dict[str, Any] = {"dtype": dtype, "pass_ms": times, "head": last, "systems": {}}
    for name, system in systems.items():
        if name != last and "served" not in parts:
            continue
        with system(dtype) as clients:
            work = through(clients, parts, sizes, crowded=name == last)
            found["systems"][name] = timed(f"Through the {name}", lambda work=work: asyncio.run(work))  # type: ignore[misc]
    return found


def measure(parts: Sequence[str], sizes: Plan, *, server: bool) -> dict[str, Any]:
    """The document: what ran, and its head, which is the last line."""
    found: dict[str, Any] = {}
    if "acceptance" in parts:  # apart: this thread must not compute, see `cascade.engine.threads.apart`
        found["acceptance"] = timed("Acceptance", lambda: apart(lambda: acceptance.measure(sizes.text)))
    if "simulated" in parts:
        found["simulated"] = timed("Simulating", lambda: simulated.measure(sizes.devices))
    if {"served", "never_slower"} & {*parts}:
        found["serving"] = serve(parts, sizes, server=server)
    found["hardware"] = f"{processor()}, {os.cpu_count()} cores"
    return {"head": head(found)} | found


def head(found: dict[str, Any]) -> dict[str, Any]:
    """One figure for each claim; those of parts that did not run are left out."""
    line: dict[str, Any] = {key: {} for key in ("acceptance", "prepared", "simulated", "served", "never_slower")}
    if "acceptance" in found:
        line["acceptance"] = acceptance.headline(found["acceptance"])
    if "simulated" in found:
        line["simulated"] = simulated.headline(found["simulated"])
    if serving := found.get("serving"):
        system = serving["systems"][serving["head"]]
        if "served" in system:
            line |= {"served": served.headline(system["served"]), "prepared": served.prepared(system["served"])}
        if "never_slower" in system:
            line["never_slower"] = crowd.headline(system["never_slower"])
    return line


def show(found: dict[str, Any]) -> None:
    """Tables to standard error."""
    if "acceptance" in found:
        console.print(acceptance.table(found["acceptance"]))
    if "simulated" in found:
        console.print(simulated.table(found["simulated"]))
    serving = found.get("serving", {"systems": {}})
    for name, system in serving["systems"].items():
        if "served" in system:
            console.print(served.speeds_table(name, system["served"]), served.branches_table(name, system["served"]))
            if not served.branched(system["served"]):
                console.print(f"[bold red]No runner-up was scored through the {name}: its trees were lines.[/]")
        if "never_slower" in system:
            console.print(crowd.table(name, system["never_slower"]))
    if serving["systems"]:
        console.print(
            f"The last line has the figures of the {serving['head']}, in {serving['dtype']}; * is the best of its kind."
        )


def lossless(found: Any) -> bool:
    """Whether no figure, however deep, is of texts that differ."""
    if not isinstance(found, dict):
        return True
    return found.get("same_text", True) and all(map(lossless, found.values()))


def options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.trees", description="Guess trees beside lines.")
    parser.add_argument("--parts", type=lambda text: text.split(","), default=list(PARTS), help=",".join(PARTS))
    parser.add_argument("--quick", action="store_true", help="few tokens and one round: whether it works, not how fast")
    parser.add_argument("--tokens", type=int, help=f"of an answer ({TOKENS})")
    parser.add_argument("--serve", action=argparse.BooleanOptionalAction, default=True, help="measure a server, too")
    parser.add_argument(
        "--results", type=Path, help="where the document is kept; of a whole run, benchmarks/results/trees.json"
    )
    chosen = parser.parse_args(arguments)
    if unknown := {*chosen.parts} - {*PARTS}:
        parser.error(f"--parts has {min(unknown)!r}: it takes {', '.join(PARTS)}")
    whole = {*chosen.parts} == {*PARTS} and chosen.serve and not chosen.quick
    chosen.results = chosen.results or (RESULTS / "trees.json" if whole else None)
    return chosen


def main(arguments: Sequence[str] | None = None) -> None:
    chosen = options(arguments)
    quiet()
    logging.getLogger("ray.serve").setLevel(logging.WARNING)
    found = measure(chosen.parts, plan(chosen.tokens, quick=chosen.quick), server=chosen.serve)
    show(found)
    if chosen.results is not None:
        chosen.results.parent.mkdir(exist_ok=True)
        chosen.results.write_text(json.dumps(found, indent=2) + "\n")
    print(json.dumps(found["head"]))
    if not lossless(found):
        raise SystemExit("Modes gave different texts")


if __name__ == "__main__":
    main()
