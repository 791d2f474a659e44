"""The document of a run as a picture: speed over the full model alone, a row for each mode, one request at a time."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from matplotlib import rc_context
from matplotlib.figure import Figure

from cascade.bench.picture import COLOURS

THICK = 0.8  # of a row's bars together, as a share of the distance between two rows


def draw(drafters: Mapping[str, Mapping[str, Mapping[str, float]]], path: Path) -> None:
    """Write ``drafters`` of a document's head, by mode and temperature, as SVG; raises `OSError`."""
    names, temperatures = list(drafters), list(next(iter(drafters.values())))
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "drafters", "font.family": "sans-serif"}):
        figure = Figure(figsize=(8, 1.2 + 0.32 * len(names)), layout="constrained")
        axes: Any = figure.subplots()
        for number, (temperature, colour) in enumerate(zip(temperatures, COLOURS, strict=False)):
            thick = THICK / len(temperatures)
            places = [row + (number + 0.5) * thick - THICK / 2 for row in range(len(names))]
            speeds = [drafters[name][temperature]["speedup"] for name in names]
            label = f"temperature {temperature.removeprefix('t')}"
            axes.barh(places, speeds, 0.92 * thick, label=label, color=colour)
        axes.axvline(1, color="#888888", linewidth=1, linestyle="--")
        axes.set_yticks(range(len(names)), names)
        axes.invert_yaxis()
        axes.margins(y=0.01)
        axes.set_xlabel("tokens per second over those of the full model alone")
        figure.legend(loc="outside upper center", ncols=len(temperatures), frameon=False)
        axes.spines[["top", "right"]].set_visible(False)
        figure.savefig(path, format="svg", metadata={"Date": None})
