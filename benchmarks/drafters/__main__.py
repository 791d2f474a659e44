"""Every drafter of the embedded family beside every other, alone and with tiers below: accepted length and speed.

    make bench-drafters

Modes take turns on every kind of prompt, at three temperatures, one request at a time; then under a level load of 16. All of it
in the library of this process. No request knows another's text; a corpus is made of modules of Python that the prompts are not
from. All modes must give the same text, else the run fails. A full run draws `docs/drafters.svg`. The last line is one
JSON document.
"""

import argparse
import asyncio
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import Progress

from benchmarks.baseline import quiet
from benchmarks.drafters import cost
from benchmarks.drafters.crowd import Crowd
from benchmarks.drafters.crowd import measure as measure_crowd
from benchmarks.drafters.modes import MODES, served
from benchmarks.drafters.picture import draw
from benchmarks.drafters.report import Found, entries, head, table
from benchmarks.trees.cells import at
from cascade.bench.load import Cell, Workload, load, same_text
from cascade.bench.prompts import BUILT_IN, Prompt
from cascade.engine.devices import processor
from cascade.params import SamplingParams

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results" / "drafters.json"
PICTURE = ROOT / "docs" / "drafters.svg"
WIDTH = 100
console = Console(stderr=True, highlight=False, width=WIDTH)


@dataclass(frozen=True, slots=True)
class Plan:
    """How much is measured."""

    temperatures: tuple[float, ...] = (0.0, 0.7, 1.0)
    prompts: tuple[Prompt, ...] = BUILT_IN
    tokens: int = 96  # of an answer to one request at a time
    crowd: Crowd = field(default_factory=Crowd)

    @property
    def num_steps(self) -> int:
        """At one temperature: requests one at a time, and rounds of the crowd."""
        return len(MODES) * len(self.prompts) + self.crowd.num_rounds(len(MODES))


QUICK = Plan((0.0,), BUILT_IN[:1], 8, Crowd(clients=2, tokens=8, round_s=0.05, rounds=1))


def options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.drafters", description="Every drafter beside every other.")
    parser.add_argument("--quick", action="store_true", help="few tokens: whether it works, not how fast")
    parser.add_argument("--prompts", type=int, metavar="N", help="of each kind, all unless given")
    parser.add_argument("--tokens", type=int, metavar="N", help="of an answer to one request at a time")
    parser.add_argument("--results", type=Path, help="where the document is kept, if not benchmarks/results")
    parser.add_argument("--picture", type=Path, help="where it is drawn, if not docs")
    chosen = parser.parse_args(arguments)
    reduced = chosen.quick or chosen.prompts or chosen.tokens
    chosen.results = chosen.results or (None if reduced else RESULTS)
    chosen.picture = chosen.picture or (None if reduced else PICTURE)
    return chosen


def plan(chosen: argparse.Namespace) -> Plan:
    if chosen.quick:
        return QUICK
    kinds = dict.fromkeys(prompt.category for prompt in BUILT_IN)
    by_kind = [[prompt for prompt in BUILT_IN if prompt.category == kind] for kind in kinds]
    prompts = tuple(prompt for prompts in by_kind for prompt in prompts[: chosen.prompts])
    return replace(Plan(prompts=prompts), **({"tokens": chosen.tokens} if chosen.tokens else {}))


def measure(size: Plan) -> Found:
    """All cells, by temperature."""
    found: dict[str, Sequence[Cell]] = {}
    with served() as cascades, Progress(console=console, transient=True) as progress:
        for temperature in size.temperatures:
            task = progress.add_task(f"Temperature {temperature:g}", total=size.num_steps)

            def step(task: Any = task) -> None:
                progress.advance(task)

            params = SamplingParams(max_tokens=size.tokens, temperature=temperature, seed=1, ignore_eos=True)
            work = Workload(MODES, size.prompts, (1,), params)

            async def both(work: Workload = work, temperature: float = temperature) -> list[Cell]:
                single = await load(cascades.stream, work, step)
                return single + await measure_crowd(cascades.ask, MODES, size.prompts, temperature, size.crowd, step)

            found[at(temperature)] = asyncio.run(both())
    return found


def by_load(cells: Sequence[Cell]) -> list[list[Cell]]:
    """Those that were asked for the same answers."""
    return [[cell for cell in cells if cell.concurrency == load] for load in dict.fromkeys(one.concurrency for one in cells)]


def write(document: dict[str, Any], path: Path) -> None:
    """A line for each cell: a run has some hundred."""
    cells = ",\n".join(json.dumps(cell) for cell in document.pop("cells"))
    rest = json.dumps(document, indent=1).removesuffix("\n}")
    path.write_text(f'{rest},\n "cells": [\n{cells}\n ]\n}}\n')


def main(arguments: Sequence[str] | None = None) -> None:
    chosen = options(arguments)
    quiet()
    found = measure(plan(chosen))
    for temperature, cells in found.items():
        console.print(table(temperature, cells))
    first, costs = head(found), cost.costs()
    console.print("Guesses without a model:", costs)
    if chosen.results is not None:
        hardware = f"{processor()}, {os.cpu_count()} cores"
        write({"head": first, "cost": costs, "hardware": hardware, "cells": entries(found)}, chosen.results)
    if chosen.picture is not None:
        draw(first["drafters"], chosen.picture)
    print(json.dumps(first))
    if not all(same_text(group) for cells in found.values() for group in by_load(cells)):
        raise SystemExit("Modes gave different texts")


if __name__ == "__main__":
    main()
