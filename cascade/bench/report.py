"""The cells of `cascade.bench.load` as tables and as one JSON document."""

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Column, Table

from cascade.bench.load import Cell, joined, quantile, same_text


def speed_up(cell: Cell, cells: Sequence[Cell]) -> float:
    """Tokens per second of a cell over those of the first mode on the same category and concurrency; 0 if that has none."""
    base = next(c for c in cells if (c.category, c.concurrency) == (cell.category, cell.concurrency))
    return cell.tokens_per_second / base.tokens_per_second if base.tokens_per_second else 0.0


def document(cells: Sequence[Cell], **about: Any) -> dict[str, Any]:
    """All cells, then those of all categories together; keys name the units, and ``about`` says what was measured."""
    every = [*cells, *joined(cells)]
    return {
        **about,
        "same_text": same_text(cells),
        "failed": sum(len(cell.errors) for cell in cells),
        "cells": [_entry(cell, every) for cell in every],
    }


def headline() -> str:
    """What stands above the lines of cells."""
    return f"{'at once':>7}  {'category':<14} {'tokens/s':>8}  {'speed-up':>8}  {'a pass':>6}  mode"


def line(cell: Cell, cells: Sequence[Cell]) -> str:
    """One cell, for those who wait for the others: its speed, and how many tokens a pass of the full tier brought."""
    return (
        f"{cell.concurrency:>7}  {cell.category:<14} {cell.tokens_per_second:>8.1f}  {speed_up(cell, cells):>7.2f}x"
        f"  {cell.tokens_per_full_pass:>6.2f}  {cell.mode.name}"
    )


def waits(cells: Sequence[Cell]) -> Table:
    """All categories together: how long a client waits, in milliseconds, and how many requests failed."""
    names = ("first token p50", "p99", "gap p50", "p99", "failed")
    columns = (Column("at once"), Column("mode", no_wrap=True), *(Column(name, justify="right") for name in names))
    table = Table(*columns, title="Waits of all categories, ms", box=SIMPLE_HEAD, pad_edge=False)
    for cell in joined(cells):
        table.add_row(
            str(cell.concurrency),
            cell.mode.name,
            *(f"{quantile(cell.first_token_s, share) * 1e3:.0f}" for share in (0.5, 0.99)),
            *(f"{quantile(cell.gaps_s, share) * 1e3:.1f}" for share in (0.5, 0.99)),
            str(len(cell.errors)) if cell.errors else "",
        )
    return table


def categories(cells: Sequence[Cell]) -> Table:
    """Each category, and all: speed-up of every mode over the first one, and its tokens of a pass of the full tier."""
    every = [*cells, *joined(cells)]
    base, *modes = dict.fromkeys(cell.mode.name for cell in cells)
    title = f"Speed-up over {base}, and tokens of a full pass"
    table = Table("at once", "category", *modes, title=title)
    for n in dict.fromkeys(cell.concurrency for cell in cells):
        for category in dict.fromkeys(cell.category for cell in every):
            row = [cell for cell in every if (cell.concurrency, cell.category) == (n, category)]
            shown = (f"{speed_up(cell, row):.2f}x  {cell.tokens_per_full_pass:.2f}" for cell in row[1:])
            table.add_row(str(n), category, *shown, end_section=category == every[-1].category)
    return table


def _entry(cell: Cell, cells: Sequence[Cell]) -> dict[str, Any]:
    return {
        "mode": cell.mode.name,
        "category": cell.category,
        "concurrency": cell.concurrency,
        "requests": cell.requests,
        "errors": sorted(set(cell.errors)),
        "failed": len(cell.errors),
        "tokens": cell.tokens,
        "seconds": cell.seconds,
        "tokens_per_second": cell.tokens_per_second,
        "speed_up": speed_up(cell, cells),
        "tokens_per_full_pass": cell.tokens_per_full_pass if cell.edges else None,
        "first_token_ms": _quantiles(cell.first_token_s),
        "gap_ms": _quantiles(cell.gaps_s),
        "edges": [
            asdict(edge)
            | {"drafter": edge.drafter or None, "mean_accepted_len": edge.mean_accepted_len}
            | {"acceptance": edge.accepted / edge.proposed if edge.proposed else None}
            for edge in cell.edges.values()
        ],
    }


def _quantiles(seconds: Sequence[float]) -> dict[str, float]:
    return {name: quantile(seconds, share) * 1e3 for name, share in (("p50", 0.5), ("p99", 0.99))}
