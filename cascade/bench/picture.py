"""The cells of `cascade.bench.load` as one picture: speed-up and acceptance by category and number of requests at once."""

from collections.abc import Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from cascade.bench.load import Cell
from cascade.bench.report import acceptance, speed_up

COLOURS = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00")  # told apart by the colour-blind
BARS = 0.8  # width of a group of bars, as a share of the distance between two groups


def draw(cells: Sequence[Cell], path: Path) -> None:
    """Write the picture of the last mode, as SVG or PNG according to the suffix of ``path``; raises `OSError`."""
    mode = cells[-1].mode
    chosen = [cell for cell in cells if cell.mode == mode]
    edges = list(dict.fromkeys(key for cell in chosen for key in cell.edges if key[0]))
    categories = tuple(dict.fromkeys(cell.category for cell in chosen))
    figure = Figure(figsize=(max(6.0, 1.6 * len(categories) + 2), 2.8 + 2.2 * len(edges)), layout="constrained")
    first, *others = figure.subplots(1 + len(edges), 1, squeeze=False)[:, 0]
    figure.suptitle(mode.name)
    _bars(first, chosen, categories, [speed_up(cell, cells) for cell in chosen])
    first.axhline(1, color="#888888", linewidth=1, linestyle="--")
    first.set_ylabel(f"speed-up over\n{cells[0].mode.name}")
    first.legend(title="requests at once", loc="center left", bbox_to_anchor=(1, 0.5), frameon=False)
    for axes, edge in zip(others, edges, strict=True):
        _bars(axes, chosen, categories, [100 * (acceptance(cell, edge) or 0.0) for cell in chosen])
        axes.set_ylim(0, 100)
        axes.set_ylabel(f"accepted, %\n{edge[0]} → {edge[1]}")
    figure.savefig(path, dpi=150)


def _bars(axes: Axes, cells: Sequence[Cell], categories: Sequence[str], heights: Sequence[float]) -> None:
    """A group of bars for each category, one bar for each number of requests at once."""
    counts = tuple(dict.fromkeys(cell.concurrency for cell in cells))
    width = BARS / len(counts)
    for number, count in enumerate(counts):
        shown = {cell.category: height for cell, height in zip(cells, heights, strict=True) if cell.concurrency == count}
        places = [categories.index(category) + (number + 0.5) * width - BARS / 2 for category in shown]
        colour = COLOURS[number % len(COLOURS)]
        bars = axes.bar(places, list(shown.values()), 0.92 * width, label=str(count), color=colour)
        axes.bar_label(bars, fmt="%.3g", fontsize=7)
    axes.set_xticks(range(len(categories)), categories)
    axes.margins(y=0.15)
    axes.spines[["top", "right"]].set_visible(False)
