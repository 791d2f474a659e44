"""One tier on a GPU: against what its memory could do, and against Transformers on the same weights in the same process.

    make bench-gpu

Weights are made on the spot, in the shapes of Qwen2.5 with 0.5 B, 7 B and 32 B parameters, in bfloat16: one row against the
floor (bytes of weights and cache over measured bandwidth), passes of several tokens, what the host does between passes, how
many tokens differ between passes of one token and of several, and how far the two likeliest were apart there; then continuous
batching and ``generate`` (growing cache; static cache, compiled). Last, whether a cascade writes what its full model writes
alone. What is compared takes turns, and of each the best run counts. A part that fails is named under ``problems``, and the
others go on.

The last line is one JSON document, also in benchmarks/results/gpu.json, which is written after each shape. On a CPU,
``--device cpu --shape tiny`` goes through the same code.
"""

import argparse
import gc
import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from rich.console import Console
from rich.table import Table

from benchmarks.device_metrics import decode, differing, gaps, passes, same_text
from benchmarks.scale import SMALL, Scale, bandwidth, params, tokens
from benchmarks.shapes import SHAPES, Shape, build, copied, words
from benchmarks.vs_transformers import batching, single
from cascade.engine.devices import free_bytes, processor
from cascade.engine.memory import GIB
from cascade.engine.model import Model
from cascade.local import Cascade

RESULTS = Path(__file__).parent / "results" / "gpu.json"
console = Console(stderr=True)


def compare(shape: Shape, device: torch.device, scale: Scale, found: dict[str, Any]) -> None:
    """Everything about one shape in bfloat16, into ``found``."""
    network = build(shape, device, torch.bfloat16)
    free, begin = free_bytes(device), time.perf_counter()
    model = Model(copied(network), cache_tokens=scale.room)
    found["start_s"] = round(time.perf_counter() - begin, 2)
    if device.type == "cuda":
        taken = free - free_bytes(device) - model.cache_tokens * model.bytes_per_token
        found["graphs_gib"] = round(taken / GIB, 2)
    found |= {"parameters": model.num_parameters, "weight_gib": round(model.weight_bytes / GIB, 2), "path": model.path}
    peak = bandwidth(device, scale.copied)
    found["bandwidth_gb_per_s"] = round(peak / 1e9, 1)
    with Cascade([model], words(shape.vocab), drafter=None) as cascade:
        cascade.generate(tokens(16, 9), params(4))
        parts: tuple[Callable[[], dict[str, Any]], ...] = (
            lambda: decode(network, model, peak, scale),
            lambda: passes(model, scale),
            lambda: gaps(model, cascade, scale),
            lambda: {"bfloat16_exactness": differing(model, scale)},
            lambda: batching(network, cascade, scale),
            lambda: single(network, cascade, scale),
        )
        for part in parts:
            attempt(part, found)
    if device.type == "cuda":
        found["peak_gib"] = round(torch.cuda.max_memory_allocated(device) / GIB, 2)


def attempt(part: Callable[[], dict[str, Any] | None], found: dict[str, Any]) -> None:
    """Add what a part found, or why it failed: the others are of use without it."""
    problems = found.setdefault("problems", [])
    try:
        said = part() or {}
        problems += said.pop("problems", [])
        found |= said
    except Exception as error:  # of any library
        problems.append(f"{type(error).__name__}: {error}")


def release(device: torch.device) -> None:
    """Give back what the last network took: what was compiled for it holds its weights, too."""
    torch.compiler.reset()
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)


def measure(names: Sequence[str], device: torch.device, scale: Scale, results: Path) -> dict[str, Any]:
    """The JSON document; what there is of it is in the file ``results`` after each part."""
    document: dict[str, Any] = {
        "shapes": {},
        "float32_exactness": {},
        "bfloat16_cascade": {},
        "hardware": torch.cuda.get_device_name(device) if device.type == "cuda" else processor(),
        "versions": {"torch": torch.__version__, "cuda": torch.version.cuda, "transformers": transformers.__version__},
    }
    for name in names:
        found: dict[str, Any] = {}
        document["shapes"][name] = found
        attempt(lambda name=name, found=found: compare(SHAPES[name], device, scale, found), found)  # type: ignore[misc]
        console.print(f"[bold]{name}[/]", found)
        release(device)
        save(document, results)
    for kind, dtype in (("float32_exactness", torch.float32), ("bfloat16_cascade", torch.bfloat16)):
        attempt(lambda dtype=dtype: same_text(build(SHAPES[names[0]], device, dtype), scale), document[kind])  # type: ignore[misc]
        release(device)
    save(document, results)
    return document


def save(document: dict[str, Any], results: Path) -> None:
    results.parent.mkdir(exist_ok=True)
    results.write_text(json.dumps(document, indent=2) + "\n")


WANTED = {
    "share_of_floor": "≥ 0.75 (7 B, 32 B)",
    "step_ms": "≤ 1.5 (0.5 B)",
    "pass_8_vs_1": "≤ 1.15",
    "tier_gap_ms": "≤ 0.2, the device's",
    "device_gap_ms": "≤ 0.2",
    "decode_vs_generate": "> 1",
    "decode_vs_generate_static": "> 1",
    "batch_vs_generate_batch": "> 1",
}


def table(document: dict[str, Any]) -> Table:
    """What was found beside what is wanted, one column a shape."""
    shapes = document["shapes"].values()
    out = Table("", *document["shapes"], "wanted", title=document["hardware"])
    for name, wanted in WANTED.items():
        out.add_row(name, *(str(found.get(name, "-")) for found in shapes), wanted)
    out.add_row("tokens that differ", *(str(f.get("bfloat16_exactness", {}).get("rate", "-")) for f in shapes), "")
    out.add_row("same text in float32", str(document["float32_exactness"].get("same_text", "-")), "True")
    out.add_row("same text in bfloat16", str(document["bfloat16_cascade"].get("same_texts", "-")), "")
    out.add_row("problems", *(str(len(found["problems"])) for found in shapes), "0")
    return out


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", help="such as cuda:0")
    parser.add_argument("--shape", nargs="+", choices=SHAPES, default=["0.5b", "7b", "32b"])
    parser.add_argument("--results", type=Path, default=RESULTS, help="file to write")
    chosen = parser.parse_args(arguments)
    device = torch.device(chosen.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        raise SystemExit("bench-gpu needs an NVIDIA GPU and a PyTorch built for CUDA: this machine has none")
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    document = measure(chosen.shape, device, SMALL if "tiny" in chosen.shape else Scale(), chosen.results)
    console.print(table(document))
    print(json.dumps(document))


if __name__ == "__main__":
    main()
