"""Where a third tier pays: trios of published costs and agreement in the simulator, at one request and at eight.

    python -m benchmarks.map

Nothing here is measured on a device: passes are priced by `cascade.simulation.costs` or given as round numbers, agreement is
given, and every tier has devices of its own. The last line is one JSON document.
"""

from collections.abc import Sequence
from typing import Any

from benchmarks.document import console, finish, parsed, parser, stamp, timed
from cascade.planner.cost import Profile
from cascade.simulation.plan import Asked, modes, predict, toy_tiers
from cascade.simulation.trio import H100, TRIO

NAMES = ("tiny", "medium", "full")
QWEN3 = tuple(shape.load.profile(H100) for shape in TRIO)  # 0.6B, 4B, 32B, an H100 each
LOADS = (1, 8)


def flat(*pass_ms: float) -> tuple[Profile, ...]:
    """Passes that cost as much for up to 256 tokens, and twice as much for 512; bottom to top."""
    return tuple(Profile([(1, ms / 1e3), (256, ms / 1e3), (512, ms / 500)]) for ms in pass_ms)


# prices of tiers, bottom to top, and how often the lower two say what the full one says
TRIOS = {
    "Qwen3 32B, 4B, 0.6B on an H100 each": (QWEN3, ((0.43, 0.52), (0.65, 0.80), (0.75, 0.85))),
    "80, 20, 5 ms": (flat(5, 20, 80), ((0.80, 0.92),)),
    "80, 20, 2 ms": (flat(2, 20, 80), ((0.70, 0.88),)),
    "40, 20, 2 ms": (flat(2, 20, 40), ((0.60, 0.90),)),
}


def measure(*, quick: bool) -> list[dict[str, Any]]:
    """A row for each trio, pair of agreements and load: speeds over the full model alone, by mode."""
    found = []
    asked = Asked((1,), tokens=24, answers=1) if quick else Asked(LOADS)
    for trio, (costs, agreements) in TRIOS.items():
        for shares in agreements[:1] if quick else agreements:
            for prediction in predict(toy_tiers(NAMES, costs, shares), asked):
                over = {mode: round(prediction.over_alone(mode), 2) for mode in modes(NAMES)}
                found.append({"trio": trio, "agreement": list(shares), "load": prediction.load, "over_alone": over})
                console.print(found[-1])
    return found


def main(arguments: Sequence[str] | None = None) -> None:
    chosen = parsed(parser("map", "Where a third tier pays, simulated."), arguments)
    rows = timed("The map", lambda: measure(quick=chosen.quick))
    devices = {shape.name: round(1e3 * cost.predict(1), 2) for shape, cost in zip(TRIO, QWEN3, strict=True)}
    document = {"rows": rows, "pass_ms": devices} | stamp({"simulated": "no model: agreement is given"})
    finish(document, {"rows": len(rows)}, chosen.results)


if __name__ == "__main__":
    main()
