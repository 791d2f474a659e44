"""What the simulator makes of published measurements: PipeSpec's seven speeds, and what this chain would give with its models.

    python -m benchmarks.published

Given are PipeSpec's raw figures (`benchmarks.published.pipespec`). `acceptance.json` has other pairs. The last line is one JSON
document.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.document import console, finish, parsed, parser, stamp, timed
from benchmarks.published import pipespec
from cascade.planner.cost import Profile
from cascade.simulation.costs import H100, Load
from cascade.simulation.plan import Traffic, predict, recorded_tiers
from cascade.simulation.recording import Recording

# parameters that a pass multiplies (all but the input embedding, where that is not the output embedding), layers, KV bytes
LLAMA = {
    "1B": (Load(2 * 1_235_814_400, 1_235_814_400, 16, 32_768), 1),
    "8B": (Load(2 * 7_504_924_672, 7_504_924_672, 32, 131_072), 1),
    "70B": (Load(2 * 69_503_033_344, 69_503_033_344, 80, 327_680), 4),
}
MEASURED, H100S = "as PipeSpec measured them", "in bfloat16 on H100s: 70B on four, 8B and 1B on one each"


def costs(data: pipespec.Data) -> dict[str, tuple[Profile, ...]]:
    """What passes cost, bottom to top."""
    return {
        MEASURED: tuple(data.cost(name) for name in pipespec.NAMES),
        H100S: tuple(load.profile(H100, ranks) for load, ranks in LLAMA.values()),
    }


def ours(prices: Sequence[Profile], texts: Recording) -> dict[str, Any]:
    """What this chain gives, one request at a time: milliseconds a token by mode, and over the full model alone."""
    tiers = recorded_tiers(pipespec.NAMES, prices, texts, pipespec.VOCAB)
    [prediction] = predict(tiers, Traffic((1,)), texts)
    return {
        mode: {"token_ms": round(1e3 / speed, 2), "over_alone": round(prediction.over_alone(mode), 2)}
        for mode, speed in prediction.speeds.items()
    }


def measure(*, quick: bool) -> dict[str, Any]:
    data = pipespec.Data.load()
    texts = pipespec.recording(data)
    if quick:
        texts = Recording(texts.texts[:2])
    results: dict[str, Any] = {"pipespec": timed("PipeSpec's seven speeds", lambda: pipespec.figures(data, texts))}
    console.print(results["pipespec"])
    results["chain"] = {}
    for name, prices in costs(data).items():
        results["chain"][name] = timed(f"This chain, passes {name}", lambda prices=prices: ours(prices, texts))  # type: ignore[misc]
        console.print(results["chain"][name])
    shares = {f"{lower} → {upper}": round(texts.shared(*at), 3) for lower, upper, at in _pairs()}
    published = json.loads((Path(__file__).parent / "acceptance.json").read_text(encoding="utf-8"))
    return results | {"agreement": shares, "published": published["pairs"]}


def _pairs() -> list[tuple[str, str, tuple[int, int]]]:
    names = pipespec.NAMES
    return [(names[low], names[high], (low, high)) for high in range(len(names)) for low in range(high)]


def head(results: Mapping[str, Any]) -> dict[str, Any]:
    """How far the simulator is off at most, and what the third tier adds to the best of the others."""
    ratios = [figures["ratio"] for figures in results["pipespec"].values()]
    line: dict[str, Any] = {"predicted_over_measured": [min(ratios), max(ratios)]}
    for name, modes in results["chain"].items():
        over = {mode: figures["over_alone"] for mode, figures in modes.items()}
        three = " → ".join(pipespec.NAMES)
        best = max(value for mode, value in over.items() if mode not in (three, "planner"))
        line[name] = {"three": over[three], "three_over_best": round(over[three] / best, 3), "planner": over["planner"]}
    return line


def main(arguments: Sequence[str] | None = None) -> None:
    chosen = parsed(parser("published", "Published measurements and the simulator."), arguments)
    results = measure(quick=chosen.quick)
    line = head(results)
    made = stamp({"simulated": "no model: acceptance and costs are published"})
    finish({"head": line} | results | made, line, chosen.results)


if __name__ == "__main__":
    main()
