"""The cells of `benchmarks.load` as lines and as JSON."""

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from benchmarks.load import Cell, joined


def speed_up(cell: Cell, cells: Sequence[Cell]) -> float:
    """Tokens per second of a cell over those of the first mode on the same category and concurrency; 0 if that has none."""
    base = next(c for c in cells if (c.category, c.concurrency) == (cell.category, cell.concurrency))
    return cell.tokens_per_second / base.tokens_per_second if base.tokens_per_second else 0.0


def entries(cells: Sequence[Cell]) -> list[dict[str, Any]]:
    """All cells, then those of all categories together; keys name the units."""
    every = [*cells, *joined(cells)]
    return [_entry(cell, every) for cell in every]


def line(cell: Cell, cells: Sequence[Cell]) -> str:
    """One cell in one line: its speed, and how many tokens a pass of the full tier gave."""
    return (
        f"{cell.concurrency:>7}  {cell.category:<14} {cell.tokens_per_second:>8.1f}  {speed_up(cell, cells):>7.2f}x"
        f"  {cell.tokens_per_full_pass:>6.2f}  {cell.mode.name}"
    )


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
        "edges": [
            asdict(edge)
            | {"drafter": edge.drafter or None, "mean_accepted_len": edge.mean_accepted_len}
            | {"acceptance": edge.accepted / edge.proposed if edge.proposed else None}
            for edge in cell.edges
        ],
    }
