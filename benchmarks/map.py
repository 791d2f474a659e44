"""Where a third tier pays: trios of published costs and agreement in the simulator, at one request and at eight.

    python -m benchmarks.map

Nothing here is measured on a device: passes are priced by `cascade.simulation.costs` or given as round numbers, agreement is
given, and every tier has devices of its own. The last line is one JSON document.
"""

from collections.abc import Sequence
from typing import Any

from benchmarks.document import console, finish, parsed, parser, stamp, timed
from cascade.simulation.costs import QWEN3, TRIO, flat
from cascade.simulation.plan import Traffic, modes, predict, toy_tiers

NAMES = ("tiny", "medium", "full")
LOADS = (1, 8)

# prices of tiers, bottom to top, and how often the lower two agree with the full one
TRIOS = {
    "Qwen3 32B, 4B, 0.6B on an H100 each": (QWEN3, ((0.43, 0.52), (0.65, 0.80), (0.75, 0.85))),
    "80, 20, 5 ms": (flat(5, 20, 80), ((0.80, 0.92),)),
    "80, 20, 2 ms": (flat(2, 20, 80), ((0.70, 0.88),)),
    "40, 20, 2 ms": (flat(2, 20, 40), ((0.60, 0.90),)),
}


def measure(*, quick: bool) -> list[dict[str, Any]]:
    """A row for each trio, pair of agreements and load: speeds over the full model alone, by mode."""
    rows = []
    traffic = Traffic((1,), tokens=24, answers=1) if quick else Traffic(LOADS)
    for trio, (costs, agreements) in TRIOS.items():
        for shares in agreements[:1] if quick else agreements:
            for prediction in predict(toy_tiers(NAMES, costs, shares), traffic):
                over = {mode: round(prediction.over_alone(mode), 2) for mode in modes(NAMES)}
                rows.append({"trio": trio, "agreement": list(shares), "load": prediction.load, "over_alone": over})
                console.print(rows[-1])
    return rows


def main(arguments: Sequence[str] | None = None) -> None:
    chosen = parsed(parser("map", "Where a third tier pays, simulated."), arguments)
    rows = timed("The map", lambda: measure(quick=chosen.quick))
    devices = {model: round(1e3 * cost.predict(1), 2) for model, cost in zip(TRIO, QWEN3, strict=True)}
    document = {"rows": rows, "pass_ms": devices} | stamp({"simulated": "no model: agreement is given"})
    finish(document, {"rows": len(rows)}, chosen.results)


if __name__ == "__main__":
    main()
