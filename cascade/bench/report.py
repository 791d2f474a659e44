"""The cells of `cascade.bench.load` as tables and as one JSON document."""

from collections.abc import Sequence
from typing import Any

from rich.table import Table

from cascade.bench.load import Cell, joined, quantile, same_text
from cascade.messages import Edge


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


def speeds(cells: Sequence[Cell]) -> Table:
    """All categories together: speed, and how long a client waits."""
    columns = ("at once", "mode", "tokens/s", "speed-up", "first token p50", "p99", "gap p50", "p99", "failed")
    table = Table(*columns, title="Speed")
    every = joined(cells)
    for number, cell in enumerate(every):
        repeated = number and every[number - 1].concurrency == cell.concurrency
        table.add_row(
            "" if repeated else str(cell.concurrency),
            cell.mode.name,
            f"{cell.tokens_per_second:.1f}",
            f"{speed_up(cell, every):.2f}x",
            *(f"{quantile(cell.first_token_s, share) * 1e3:.0f} ms" for share in (0.5, 0.99)),
            *(f"{quantile(cell.gaps_s, share) * 1e3:.1f} ms" for share in (0.5, 0.99)),
            str(len(cell.errors)) if cell.errors else "",
        )
    return table


def categories(cells: Sequence[Cell]) -> Table:
    """The last mode by category: speed-up, and the share of guesses that each edge accepted."""
    chosen = [cell for cell in cells if cell.mode == cells[-1].mode]
    edges = list(dict.fromkeys(key for cell in chosen for key in cell.edges if key[0]))
    names = [f"{drafter} → {verifier}" for drafter, verifier in edges]
    table = Table("at once", "category", "speed-up", *names, title=f"{cells[-1].mode.name}: speed-up and acceptance")
    for cell in chosen:
        shares = (acceptance(cell, edge) for edge in edges)
        table.add_row(
            str(cell.concurrency),
            cell.category,
            f"{speed_up(cell, cells):.2f}x",
            *("-" if share is None else f"{share:.0%}" for share in shares),
        )
    return table


def acceptance(cell: Cell, edge: tuple[str, str]) -> float | None:
    """Share of the guesses on ``edge``, drafter and verifier, that were accepted; ``None`` if none was scored."""
    total = cell.edges.get(edge)
    return total.accepted / total.proposed if total is not None and total.proposed else None


def _entry(cell: Cell, cells: Sequence[Cell]) -> dict[str, Any]:
    full_passes = cell.edges.full_passes
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
        "tokens_per_full_pass": cell.tokens / full_passes if full_passes else None,
        "first_token_ms": _quantiles(cell.first_token_s),
        "gap_ms": _quantiles(cell.gaps_s),
        "edges": [_edge_entry(edge) for edge in cell.edges.values()],
    }


def _edge_entry(edge: Edge) -> dict[str, Any]:
    return {
        "drafter": edge.drafter or None,
        "verifier": edge.verifier,
        "passes": edge.passes,
        "proposed": edge.proposed,
        "accepted": edge.accepted,
        "acceptance": edge.accepted / edge.proposed if edge.proposed else None,
        "mean_accepted_len": edge.mean_accepted_len,
        "accepted_by_position": edge.accepted_by_position,
        "proposed_by_position": edge.proposed_by_position,
        "accepted_by_rank": edge.accepted_by_rank,
        "proposed_by_rank": edge.proposed_by_rank,
        "corrected": edge.corrected,
        "prepared": edge.prepared,
        "waiting": edge.waiting,
    }


def _quantiles(seconds: Sequence[float]) -> dict[str, float]:
    return {name: quantile(seconds, share) * 1e3 for name, share in (("p50", 0.5), ("p99", 0.99))}
