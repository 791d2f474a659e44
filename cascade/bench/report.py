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
    """The heading of lines."""
    return f"{'at once':>7}  {'category':<14} {'tokens/s':>8}  {'speed-up':>8}  {'a pass':>6}  mode"


def line(cell: Cell, cells: Sequence[Cell]) -> str:
    """One cell in one line: its speed, and how many tokens a pass of the full tier gave."""
    return (
        f"{cell.concurrency:>7}  {cell.category:<14} {cell.tokens_per_second:>8.1f}  {speed_up(cell, cells):>7.2f}x"
        f"  {cell.tokens_per_full_pass:>6.2f}  {cell.mode.name}"
    )


def waits(cells: Sequence[Cell]) -> Table:
    """How long clients wait, in milliseconds, and how many requests failed; of cells that are `joined`."""
    names = ("first token p50", "p99", "gap p50", "p99", "failed")
    columns = (Column("at once"), Column("mode", no_wrap=True), *(Column(name, justify="right") for name in names))
    table = Table(*columns, title="Waits of all categories, ms", box=SIMPLE_HEAD, pad_edge=False)
    for cell in cells:
        table.add_row(
            str(cell.concurrency),
            cell.mode.name,
            *(f"{quantile(cell.first_token_s, share) * 1e3:.0f}" for share in (0.5, 0.99)),
            *(f"{quantile(cell.gaps_s, share) * 1e3:.1f}" for share in (0.5, 0.99)),
            str(len(cell.errors)) if cell.errors else "",
        )
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
            for edge in cell.edges
        ],
    }


def _quantiles(seconds: Sequence[float]) -> dict[str, float]:
    return {name: quantile(seconds, share) * 1e3 for name, share in (("p50", 0.5), ("p99", 0.99))}
