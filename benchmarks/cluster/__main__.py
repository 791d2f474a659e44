"""A cascade with a device for each replica, measured on two cores: emulated devices, fake GPUs in Ray, the server as it is.

    make bench-cluster

First the family is recorded (`cascade.agreement`): its answers to built-in prompts, and each tier's tokens along them. Passes
take what those of Qwen3 0.6B, 4B and 32B take on an H100 each. Parts: ``one`` (one request at a time: the full model alone,
pairs, three tiers, and these with text drafters inside the full one, beside the simulator), ``scale`` (1 to 64 requests at
once, one to four full replicas), ``map`` (one request at a time, a trio of the map for which three tiers pay, `placed`) and
``pair`` (the same, Qwen2.5-Coder 0.5B and 1.5B as `benchmarks.family` has recorded them, in the time of Qwen3 0.6B and 32B).
Texts must be those that the full model wrote alone, else the run fails.
With ``--only`` the other parts of the document at ``--results`` stay.
Devices are fakes (`benchmarks.cluster.emulated`): what is measured is all around them. The last line is one JSON document.
"""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.cluster import crowd, placed, single
from benchmarks.cluster.devices import Setup, table
from benchmarks.document import STAMPS, console, dated, finish, parsed, parser, stamp, timed
from benchmarks.family.agreement import recorded
from benchmarks.family.models import MODEL, path
from benchmarks.prompts import by_category
from cascade import family
from cascade.agreement import record
from cascade.params import SamplingParams
from cascade.simulation.costs import TRIO
from cascade.simulation.recording import Recording

WORK = Path(__file__).parents[1] / ".work"
RECORDING, PAIR = WORK / "recording.json", recorded(0.0)
PARTS = ("one", "scale", "map", "pair")
# each part has its own date and processor, for others may run later and elsewhere
QUICK_STRETCH = 1.0
PROMPTS, TOKENS = 2, 96  # of each category that are recorded; of a text
DTYPE = "float32"  # of what is recorded
DRAFTERS = ("suffix", "lookahead")  # inside the full tier, whose passes of many tokens take no longer than those of one


def measure(parts: Sequence[str], *, quick: bool) -> dict[str, Any]:
    """The document: what ran, and its head, which is the last line."""
    size, many, mapped = single.Size(), crowd.Size(), single.Size(stretch=3.0)
    prompts, tokens, texts = PROMPTS, TOKENS, placed.PROMPTS
    if quick:
        size = mapped = single.Size(stretch=QUICK_STRETCH, tokens=24, alone=8, warm_up=8)
        many = crowd.Size(stretch=QUICK_STRETCH, tokens=24, loads=(1, 4), replicas=((1, 1, 1),))
        prompts, tokens, texts = 1, 24, 1
    WORK.mkdir(exist_ok=True)
    if "one" in parts or "scale" in parts:
        recording = timed("Recording the family", lambda: _recorded(prompts, tokens))
        console.print(single.agreement(recording, family.NAMES))
    figures: dict[str, Any] = {}
    if "one" in parts:
        setup = Setup(size.stretch, recording=RECORDING, drafters=DRAFTERS)
        figures["one"] = timed("One request", lambda: single.measure(recording, setup, size, console.print))
        console.print(single.table(figures["one"]))
    if "scale" in parts:
        figures["scale"] = timed("Many requests", lambda: crowd.measure(RECORDING, many, console.print))
        console.print(crowd.table(figures["scale"]))
    if "map" in parts:
        toys = placed.recording(mapped.tokens, texts)
        toys.save(WORK / "map.json")
        trio = Setup(mapped.stretch, recording=WORK / "map.json", pass_ms=placed.PASS_MS)
        figures["map"] = timed("A trio of the map", lambda: single.measure(toys, trio, mapped, console.print))
        console.print(single.table(figures["map"]))
    if "pair" in parts:
        figures["pair"] = timed("The published pair", lambda: _pair(size, console.print))
        console.print(single.table(figures["pair"]))
    sizes = {"stretch": {"one": size.stretch, "scale": many.stretch, "map": mapped.stretch, "pair": size.stretch}}
    devices = {model: table(load) for model, load in TRIO.items()}
    return dated({"head": head(figures)} | figures | sizes | {"devices": devices} | stamp(), figures)


def _pair(size: single.Size, report: Callable[[str], object]) -> dict[str, Any]:
    """The published pair, as tiny and full."""
    setup = Setup(size.stretch, recording=PAIR, sources={"tiny": path("0.5B"), "full": path("1.5B")})
    return {"model": MODEL} | single.measure(Recording.load(PAIR), setup, size, report)


def _recorded(prompts: int, tokens: int) -> Recording:
    """Own tokens of the family, which the tiers of a server read from a file."""
    params = SamplingParams(max_tokens=tokens, temperature=0)
    recording = record(family.paths(), by_category(prompts), params, DTYPE)
    recording.save(RECORDING)
    return recording


def joined(kept: dict[str, Any], figures: dict[str, Any]) -> dict[str, Any]:
    """The document of a run of some parts, and the others as another run has left them, with their dates and processors."""
    both = kept | figures
    return both | {"head": head(both)} | {name: kept.get(name, {}) | figures[name] for name in STAMPS}


def head(figures: dict[str, Any]) -> dict[str, Any]:
    """One figure for each claim; nothing of parts that did not run."""
    headlines: dict[str, Callable[[Any], Any]] = dict.fromkeys(PARTS, single.headline) | {"scale": crowd.headline}
    return {part: line(figures[part]) if part in figures else {} for part, line in headlines.items()} | planned(figures)


def planned(figures: dict[str, Any]) -> dict[str, dict[str, float]]:
    """By cell, what the planner chooses over the best size choice, and over the full model alone."""
    best: dict[str, float] = {}
    alone: dict[str, float] = {}
    for kind, ratios in figures.get("one", {}).get("by_category", {}).items():
        best[f"one {kind}"], alone[f"one {kind}"] = ratios["auto_vs_best"], ratios["auto_vs_alone"]
    for replicas, loads in figures.get("scale", {}).items():
        for load, cell in loads.items():
            name, ratios = f"{replicas} {load}", cell["ratios"]
            best[name], alone[name] = round(ratios["auto"] / max(1.0, ratios["three"]), 3), ratios["auto"]
    return {"auto_vs_best": best, "auto_vs_alone": alone}


def main(arguments: Sequence[str] | None = None) -> None:
    chosen = parsed(parser("cluster", "A cascade on emulated devices.", PARTS), arguments)
    figures = measure(chosen.only or [part for part in PARTS if part != "pair" or PAIR.exists()], quick=chosen.quick)
    if chosen.only and chosen.results is not None and chosen.results.exists():
        figures = joined(json.loads(chosen.results.read_text(encoding="utf-8")), figures)
    finish(figures, figures["head"], chosen.results)


if __name__ == "__main__":
    main()
