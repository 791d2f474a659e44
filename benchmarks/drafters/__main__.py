"""Every drafter of the embedded family beside every other, alone and with tiers below: accepted length and speed.

    make bench-drafters

Modes take turns on every kind of prompt, at three temperatures, one request at a time and 16 at once, in the library of this
process. No request knows another's text; a corpus is made of modules of Python that the prompts are not from. All modes must
give the same text, else the run fails. The last line is one JSON document.
"""

import argparse
import asyncio
import inspect
import json
import os
import textwrap
from collections.abc import AsyncIterator, Sequence
from contextlib import ExitStack
from math import prod
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from benchmarks.baseline import quiet
from benchmarks.drafters import cost
from benchmarks.trees.cells import at
from cascade import family
from cascade.answer import Chunk
from cascade.bench.load import Cell, Workload, joined, load, same_text
from cascade.bench.measure import Mode
from cascade.bench.prompts import BUILT_IN
from cascade.bench.report import document, speed_up
from cascade.drafters import KINDS, DrafterSpec
from cascade.engine.devices import processor
from cascade.local import Cascade
from cascade.params import Handling, SamplingParams, Speculation

RESULTS = Path(__file__).parents[1] / "results" / "drafters.json"
WORK = Path(__file__).parents[1] / ".work"
TEMPERATURES = (0.0, 0.7, 1.0)
TOKENS = 96
LOADS = (1, 16)
LOWER = family.NAMES[:-1]
ALONE, AUTO = Mode("alone", Speculation("off")), Mode("auto", Speculation())
CHAINS = [(kind,) for kind in (*KINDS, family.HEAD)] + [(name,) for name in LOWER] + [LOWER]
CHAINS += [("suffix", *chain) for chain in CHAINS if {*chain} <= {family.HEAD, *LOWER}]
MODES = (ALONE, AUTO, *(Mode(" + ".join(chain), Speculation(tiers=chain)) for chain in CHAINS))
console = Console(stderr=True, highlight=False)


def corpus() -> DrafterSpec:
    """Modules of the standard library, as a file."""
    WORK.mkdir(exist_ok=True)
    path = WORK / "corpus.txt"
    path.write_text("\n".join(map(inspect.getsource, (argparse, textwrap, inspect, json))), encoding="utf-8")
    return DrafterSpec("corpus", str(path))


def options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.drafters", description="Every drafter beside every other.")
    parser.add_argument("--quick", action="store_true", help="few tokens: whether it works, not how fast")
    parser.add_argument("--results", type=Path, help="where the document is kept, if not benchmarks/results")
    chosen = parser.parse_args(arguments)
    chosen.results = chosen.results or (None if chosen.quick else RESULTS)
    return chosen


def measure(quick: bool) -> dict[str, list[Cell]]:
    """All cells, by temperature."""
    inside = [DrafterSpec(kind) if kind != "corpus" else corpus() for kind in KINDS]
    inside.append(DrafterSpec(family.HEAD, family.head()))
    prompts, loads = (BUILT_IN[:2], LOADS[:1]) if quick else (BUILT_IN, LOADS)
    with ExitStack() as stack, Progress(console=console, transient=True) as progress:
        every = stack.enter_context(Cascade.demo(drafter=inside))
        default = stack.enter_context(Cascade.demo())  # what is on if nobody says anything

        def stream(prompt: str, params: SamplingParams, speculation: Speculation, handling: Handling) -> AsyncIterator[Chunk]:
            return (default if speculation == AUTO.speculation else every).astream(prompt, params, speculation, handling)

        found: dict[str, list[Cell]] = {}
        for temperature in (0.0,) if quick else TEMPERATURES:
            params = SamplingParams(max_tokens=16 if quick else TOKENS, temperature=temperature, seed=1, ignore_eos=True)
            work = Workload(MODES, prompts, loads, params)
            task = progress.add_task(f"Temperature {temperature:g}", total=work.num_requests)
            found[at(temperature)] = asyncio.run(load(stream, work, lambda task=task: progress.advance(task)))  # type: ignore[misc]
        return found


def figures(cells: Sequence[Cell]) -> dict[str, dict[str, float]]:
    """Of each mode with one request at a time, all kinds of prompts together."""
    every = [cell for cell in joined(cells) if cell.concurrency == 1]
    return {
        cell.mode.name: {
            "speedup": round(speed_up(cell, every), 3),
            "accepted_len": round(cell.tokens / max(1, cell.edges.full_passes), 2),
        }
        for cell in every
    }


def head(found: dict[str, list[Cell]]) -> dict[str, Any]:
    """Figures by drafter and temperature, and which of those that are named is the best: by the product of all."""
    by_temperature = {name: figures(cells) for name, cells in found.items()}
    drafters = {
        mode.name: {name: figures[mode.name] for name, figures in by_temperature.items()} for mode in MODES if mode != ALONE
    }
    named = [mode.name for mode in MODES if mode not in (ALONE, AUTO)]
    return {
        "drafters": drafters,
        "best": max(named, key=lambda name: prod(one["speedup"] for one in drafters[name].values())),
    }


def table(temperature: str, cells: Sequence[Cell]) -> Table:
    """Speed over the full model alone, by kind of prompt and number of requests at once; * is the best of the cell."""
    every = [*cells, *joined(cells)]
    places = [(c.concurrency, c.category) for c in every if c.mode == ALONE]
    result = Table("mode", *(f"{category}, {load}" for load, category in places), title=f"Over alone, {temperature}")
    by = {(cell.concurrency, cell.category, cell.mode.name): speed_up(cell, every) for cell in every}
    best = {place: max(by[*place, mode.name] for mode in MODES) for place in places}
    for mode in MODES[1:]:
        row = [(by[*place, mode.name], best[place]) for place in places]
        result.add_row(mode.name, *(f"{speed:.2f}{'*' if speed == most else ''}" for speed, most in row))
    return result


def main(arguments: Sequence[str] | None = None) -> None:
    chosen = options(arguments)
    quiet()
    found = measure(chosen.quick)
    for temperature, cells in found.items():
        console.print(table(temperature, cells))
    first, costs = head(found), cost.costs()
    console.print("Guesses without a model:", costs)
    if chosen.results is not None:
        hardware = f"{processor()}, {os.cpu_count()} cores"
        by_temperature = {name: document(cells) for name, cells in found.items()}
        whole = {"head": first, "cost": costs, "temperatures": by_temperature, "hardware": hardware}
        chosen.results.write_text(json.dumps(whole, indent=1) + "\n")
    print(json.dumps(first))
    if not all(map(same_text, found.values())):
        raise SystemExit("Modes gave different texts")


if __name__ == "__main__":
    main()
