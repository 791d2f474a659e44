"""Where a third tier pays: trios of published costs and agreement in the simulator, at one request and at eight.

    python -m benchmarks.map

Nothing here is measured on a device: passes are priced by `cascade.simulation.costs` or given as round numbers, agreement is
given, and every tier has devices of its own. The last line is one JSON document.
"""

from collections.abc import Iterator, Sequence
from typing import Any

from benchmarks.document import console, finish, parsed, parser, stamp, timed
from cascade.planner.cost import Profile
from cascade.simulation.costs import QWEN3, TRIO, flat
from cascade.simulation.plan import Traffic, modes, predict, toy_tiers

NAMES = ("tiny", "medium", "full")
LOADS = (1, 8)

# prices of tiers, bottom to top, and how often the lower two agree with the full one
TRIOS = {
    "Qwen3 32B, 4B, 0.6B on an H100 each": (QWEN3, ((0.43, 0.52), (0.65, 0.80), (0.75, 0.85))),
    "80, 20, 2 ms": (flat(2, 20, 80), ((0.70, 0.88),)),
}

# the picture: what a pass of the medium model takes of the full one's 80 ms, a tenth of it that of the tiny one, and how often
# the medium model agrees with the full one, which is as often as the tiny one agrees with the medium one
FULL_MS = 80
MEDIUM_COSTS = (0.5, 0.25, 0.12, 0.06, 0.03)
MEDIUM_AGREES = (0.5, 0.6, 0.7, 0.8, 0.9, 0.95)


def measure(*, quick: bool) -> list[dict[str, Any]]:
    """A row for each trio, pair of agreements and load: speeds over the full model alone, by mode."""
    rows = []
    for trio, (costs, agreements) in TRIOS.items():
        for shares in agreements[:1] if quick else agreements:
            for load, over in speeds(costs, shares, quick=quick):
                rows.append({"trio": trio, "agreement": list(shares), "load": load, "over_alone": over})
                console.print(rows[-1])
    return rows


def picture(*, quick: bool) -> list[dict[str, Any]]:
    """The same for each cost and agreement of the medium model."""
    cells = []
    for cost in MEDIUM_COSTS[:1] if quick else MEDIUM_COSTS:
        for share in MEDIUM_AGREES[:1] if quick else MEDIUM_AGREES:
            costs = flat(FULL_MS * cost / 10, FULL_MS * cost, FULL_MS)
            for load, over in speeds(costs, (share * share, share), quick=quick):
                cells.append({"cost": cost, "agreement": share, "load": load, "over_alone": over})
                console.print(cells[-1])
    return cells


def speeds(costs: Sequence[Profile], shares: Sequence[float], *, quick: bool) -> Iterator[tuple[int, dict[str, float]]]:
    """Each load, and by mode the speed over the full model alone."""
    traffic = Traffic((1,), tokens=24, answers=1) if quick else Traffic(LOADS)
    for prediction in predict(toy_tiers(NAMES, costs, shares), traffic):
        yield prediction.load, {mode: round(prediction.over_alone(mode), 2) for mode in modes(NAMES)}


def main(arguments: Sequence[str] | None = None) -> None:
    chosen = parsed(parser("map", "Where a third tier pays, simulated."), arguments)
    rows = timed("The map", lambda: measure(quick=chosen.quick))
    devices = {model: round(1e3 * cost.predict(1), 2) for model, cost in zip(TRIO, QWEN3, strict=True)}
    cells = timed("The picture", lambda: picture(quick=chosen.quick))
    document = {"rows": rows, "cells": cells, "pass_ms": devices} | stamp({"simulated": "no model: agreement is given"})
    finish(document, {"rows": len(rows)}, chosen.results)


if __name__ == "__main__":
    main()
