"""Every drafter of the family beside every other, alone and with tiers below: accepted length and speed.

    make bench-drafters

Modes take turns on every prompt, at three temperatures, one request at a time, in the library of this process. No request knows
another's text. The full model alone is there twice: how far ``alone, again`` is from 1 says how well all figures are known.
Loads of many requests are `benchmarks.never_slower`'s. All modes must give the same text, else the run fails. A full run draws
`docs/drafters.svg`. The last line is one JSON document.
"""

import argparse
import asyncio
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks.asked import stamp
from benchmarks.baseline import quiet
from benchmarks.drafters import cost
from benchmarks.drafters.modes import MODES, served
from benchmarks.drafters.picture import draw
from benchmarks.drafters.report import Found, entries, head, table
from benchmarks.turns import Answers, at, in_turns, questions, same_text
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
    prompts: int = 1  # of each category
    tokens: int = 64  # of an answer


QUICK = Plan((0.0,), 1, 8)


def options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.drafters", description="Every drafter beside every other.")
    parser.add_argument("--quick", action="store_true", help="few tokens: whether it works, not how fast")
    parser.add_argument("--prompts", type=int, metavar="N", help=f"of each kind ({Plan().prompts})")
    parser.add_argument("--tokens", type=int, metavar="N", help=f"of an answer ({Plan().tokens})")
    parser.add_argument("--results", type=Path, help="where the document is kept, if not benchmarks/results")
    parser.add_argument("--picture", type=Path, help="where it is drawn, if not docs")
    chosen = parser.parse_args(arguments)
    chosen.results = chosen.results or (None if chosen.quick else RESULTS)
    chosen.picture = chosen.picture or (None if chosen.quick else PICTURE)
    return chosen


def plan(chosen: argparse.Namespace) -> Plan:
    asked = QUICK if chosen.quick else Plan()
    return replace(asked, prompts=chosen.prompts or asked.prompts, tokens=chosen.tokens or asked.tokens)


def measure(size: Plan) -> Found:
    """All cells, by temperature and mode; a temperature's table is shown when it is done."""
    found: dict[str, dict[str, Answers]] = {}
    asked = questions(size.prompts)
    with served() as cascades:
        for temperature in size.temperatures:
            params = SamplingParams(max_tokens=size.tokens, temperature=temperature)
            modes = asyncio.run(in_turns(cascades.ask, MODES, asked, params, console.print))
            found[at(temperature)] = modes
            console.print(table(at(temperature), modes))
    return found


def write(document: dict[str, Any], path: Path) -> None:
    """A line for each cell: a run has some hundred."""
    cells = ",\n".join(json.dumps(cell) for cell in document.pop("cells"))
    path.parent.mkdir(exist_ok=True)
    rest = json.dumps(document, indent=1).removesuffix("\n}")
    path.write_text(f'{rest},\n "cells": [\n{cells}\n ]\n}}\n')


def main(arguments: Sequence[str] | None = None) -> None:
    chosen = options(arguments)
    quiet()
    found = measure(plan(chosen))
    first, costs = head(found), cost.costs()
    console.print("Guesses without a model:", costs)
    if chosen.results is not None:
        write({"head": first, "cost": costs} | stamp() | {"cells": entries(found)}, chosen.results)
    if chosen.picture is not None:
        draw(first["drafters"], chosen.picture)
    print(json.dumps(first))
    if not all(same_text(modes.values()) for modes in found.values()):
        raise SystemExit("Modes gave different texts")


if __name__ == "__main__":
    main()
