"""Figures of all cells: a document, its last line, tables."""

from collections.abc import Mapping, Sequence
from math import prod
from typing import Any, TypeAlias

from rich.box import SIMPLE
from rich.table import Table

from benchmarks.drafters.modes import ALONE, MODES, NAMED
from cascade.bench.load import Cell, joined
from cascade.bench.report import speed_up

WHOLE = "all"  # category of all prompts together
Found: TypeAlias = Mapping[str, Sequence[Cell]]  # by temperature


def every(cells: Sequence[Cell]) -> list[Cell]:
    """Those of one request at a time by category, then all of them together; then those of the crowd."""
    single = [cell for cell in cells if cell.concurrency == 1]
    return [*single, *joined(single), *(cell for cell in cells if cell.concurrency > 1)]


def tokens_per_pass(cell: Cell) -> float:
    """Of the full tier."""
    return cell.tokens / max(1, cell.edges.full_passes)


def entries(found: Found) -> list[dict[str, Any]]:
    """One for each cell."""
    return [
        {
            "mode": cell.mode.name,
            "category": cell.category,
            "temperature": temperature,
            "concurrency": cell.concurrency,
            "tokens_per_second": round(cell.tokens_per_second, 1),
            "speed_up": round(speed_up(cell, all_), 3),
            "tokens_per_full_pass": round(tokens_per_pass(cell), 2),
        }
        for temperature, cells in found.items()
        for all_ in [every(cells)]
        for cell in all_
    ]


def head(found: Found) -> dict[str, Any]:
    """Speed and tokens a full pass of each mode with one request at a time, and which of those that are named is the best.

    That is by the product over all temperatures.
    """
    drafters: dict[str, dict[str, dict[str, float]]] = {mode.name: {} for mode in MODES[1:]}
    for one in entries(found):
        if one["concurrency"] == 1 and one["category"] == WHOLE and one["mode"] != ALONE.name:
            figures = {"speedup": one["speed_up"], "accepted_len": one["tokens_per_full_pass"]}
            drafters[one["mode"]][one["temperature"]] = figures
    best = max((mode.name for mode in NAMED), key=lambda name: prod(one["speedup"] for one in drafters[name].values()))
    return {"drafters": drafters, "best": best}


def table(temperature: str, cells: Sequence[Cell]) -> Table:
    """Speed over the full model alone, by kind of prompt, and of the crowd; * is the best of a column."""
    all_ = every(cells)
    places = [(cell.concurrency, cell.category) for cell in all_ if cell.mode == ALONE]
    columns = [category if load == 1 else f"{load} at once" for load, category in places]
    result = Table("mode", *columns, "a pass", title=f"Over alone, {temperature}", box=SIMPLE)
    by = {(cell.concurrency, cell.category, cell.mode.name): cell for cell in all_}
    speeds = {place: {mode.name: speed_up(by[*place, mode.name], all_) for mode in MODES} for place in places}
    for mode in MODES[1:]:
        row = [(speeds[place][mode.name], max(speeds[place].values())) for place in places]
        passes = f"{tokens_per_pass(by[1, WHOLE, mode.name]):.2f}"
        result.add_row(mode.name, *(f"{speed:.2f}{'*' if speed == most else ''}" for speed, most in row), passes)
    return result
