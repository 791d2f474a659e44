"""What the programme measured on a GPU, as ``benchmarks/results/gpu.json``: ``python -m benchmarks.gpu.results FOLDER``.

FOLDER is that of ``python -m benchmarks.gpu --out``. Afterwards ``make figures`` writes the figures of README and docs.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.document import RESULTS, console, keep

NAMES = {"vllm": "vLLM", "torch": "PyTorch", "ray": "Ray", "transformers": "Transformers", "python": "Python"}
PASSES = ("start_s", "text", "choosing", "waits", "passes", "busy", "vllm_step_ms")
SERVED = ("server", "versus")  # steps whose answers were timed
INVARIANT = "full, VLLM_BATCH_INVARIANT=1"


def document(programme: dict[str, Any]) -> dict[str, Any]:
    """The figures of a run, as ``programme.json`` has them, without those of steps that failed before they had any."""
    figures: dict[str, Any] = programme["found"]
    warm = figures.get("warm", {})
    versions = {**warm.get("versions", {}), "torch": warm.get("torch"), "python": warm.get("python")}
    models = dict(figures.get("graphs", {}).get("models", {}))
    models |= {name: figures[step] for name, step in (("8b, FP8", "fp8"), (INVARIANT, "invariant")) if step in figures}
    devices = {entry["device"] for entry in figures.values()}
    return {
        "date": programme["date"],
        "processor": f"{', '.join(sorted(devices))}, {programme['processor']}",
        "model": "SmolLM2-135M-Instruct, and at Llama 8B's shapes",
        "software": ", ".join(f"{name} {versions[key]}" for key, name in NAMES.items() if versions.get(key)),
        "family": programme["family"],
        "models": {name: {key: entry[key] for key in PASSES if key in entry} for name, entry in models.items()},
        "served": {step: served(figures[step]) for step in SERVED if step in figures},
        "killed": {tier: figures["kill"][tier] for tier in ("medium", "full") if tier in figures.get("kill", {})},
        "library": {key: entry for key, entry in figures.get("library", {}).items() if isinstance(entry, dict)},
        "written": {key: entry for key, entry in figures.get("text", {}).items() if key.startswith("tokens")},
        "trained": {name: figures["train"][name] for name in ("medium", "tiny") if name in figures.get("train", {})},
        "problems": {name: entry["problem"] for name, entry in programme["steps"].items() if entry["problem"]},
    }


def served(figures: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """By load and mode: tokens per second of all prompts, and how many texts are those without drafts, out of how many."""
    loads: dict[str, dict[str, Any]] = {}
    for key, entry in figures.items():
        cells = entry["cells"] if isinstance(entry, dict) and "cells" in entry else entry
        if not isinstance(cells, list) or "at once" not in key:
            continue
        load, _, of_vllm = key.partition(" at once")
        alike = {} if of_vllm else entry["alike"]
        for cell in cells:
            if cell["category"] == "all":
                speed = {"tokens_per_second": round(cell["tokens_per_second"], 1), "failed": cell["failed"]}
                loads.setdefault(load, {})[cell["mode"]] = speed | alike.get(cell["mode"], {})
    return loads


def main(arguments: Sequence[str] | None = None) -> None:
    made = argparse.ArgumentParser(prog="python -m benchmarks.gpu.results", description="Keep what the programme measured.")
    made.add_argument("folder", type=Path)
    made.add_argument("--results", type=Path, default=RESULTS / "gpu.json", help="%(default)s")
    chosen = made.parse_args(arguments)
    programme: dict[str, Any] = json.loads((chosen.folder / "programme.json").read_text(encoding="utf-8"))
    if programme["small"] and chosen.results == RESULTS / "gpu.json":
        sys.exit("These are figures of a processor: with --small, name another file by --results")
    keep(document(programme), chosen.results)
    console.print(chosen.results)


if __name__ == "__main__":
    main()
