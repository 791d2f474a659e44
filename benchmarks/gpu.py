"""One tier on a GPU: against what its memory could do, and against Transformers on the same weights in the same process.

    make bench-gpu

Weights are made on the spot, in the shapes of Qwen2.5 with 0.5 B, 7 B and 32 B parameters, in bfloat16: one row against the
floor (bytes of weights and cache over measured bandwidth), passes of several tokens, what the host does between passes, and
``generate`` (growing cache; static cache, compiled) and continuous batching. Then exactness: in float32 a cascade against its
full model alone, in bfloat16 how many tokens differ between passes of one token and of several, and how far the two likeliest
were apart there. What is compared takes turns, and of each the best run counts. The last line is one JSON document, also in
benchmarks/results/gpu.json. On a CPU, ``--device cpu --shape tiny`` goes through the same code.
"""

import argparse
import asyncio
import gc
import itertools
import json
import platform
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
import transformers
from rich.console import Console
from rich.table import Table
from transformers import ContinuousBatchingConfig, GenerationConfig, PreTrainedModel

from benchmarks.shapes import SHAPES, Shape, build, twin, words, worse
from cascade.local import Cascade
from cascade.model import Model
from cascade.params import SamplingParams, Speculation
from cascade.scorer import Row

RESULTS = Path(__file__).parent / "results" / "gpu.json"
GREEDY = SamplingParams(temperature=0, seed=0)
PASS_SIZES = (1, 2, 4, 8, 16)
console = Console(stderr=True)


@dataclass(frozen=True, slots=True)
class Scale:
    """How much is measured."""

    context: int = 512  # tokens before those that are timed
    tokens: int = 128  # of an answer
    repeats: int = 3
    passes: int = 20  # of each size
    copied: int = 2**30  # bytes, to measure bandwidth
    requests: int = 16
    blocks: int | None = None  # of Transformers' own cache, which else takes most of the memory

    def batch(self) -> list[tuple[int, int]]:
        """Tokens of prompts and of answers, ragged."""
        return [(8 + 37 * i % (self.context // 4), 8 + 29 * i % (self.tokens // 2)) for i in range(self.requests)]


SMALL = Scale(context=32, tokens=16, repeats=1, passes=2, copied=2**20, requests=3, blocks=16)


def tokens(n: int, seed: int) -> list[int]:
    """Token ids that differ from seed to seed from the first on."""
    return [(seed * 7919 + place * 104729 + 17) % 400 + 50 for place in range(n)]


def params(n: int) -> SamplingParams:
    return SamplingParams(max_tokens=n, temperature=0, seed=0, ignore_eos=True)


def settle(device: torch.device) -> None:
    """Wait until the device has done all it was told."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def seconds(work: Callable[[], object], device: torch.device) -> float:
    settle(device)
    begin = time.perf_counter()
    work()
    settle(device)
    return time.perf_counter() - begin


def bandwidth(device: torch.device, scale: Scale) -> float:
    """Bytes per second of a large copy, read and written."""
    source = torch.empty(scale.copied, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    best = min(seconds(lambda: target.copy_(source), device) for _ in range(5))
    return 2 * scale.copied / best


def decode(network: PreTrainedModel, model: Model, peak: float, scale: Scale) -> dict[str, Any]:
    """One row, step by step, against the floor; every step is a pass of its own, with its host read."""
    cache, text, taken = model.new_cache(), tokens(scale.context, 0), []
    text += model.run([Row(cache, 0, text, 1, GREEDY)])[0]
    for _ in range(scale.passes * scale.repeats):
        row = Row(cache, len(text) - 1, text[-1:], 1, GREEDY)
        begin = time.perf_counter()
        text += model.run([row])[0]
        taken.append(time.perf_counter() - begin)
    cache.free()
    unread = 0 if network.config.tie_word_embeddings else network.get_input_embeddings().weight.nbytes
    floor_s = (model.weight_bytes - unread + len(text) * model.bytes_per_token) / peak
    step_s = statistics.median(taken)
    return {"step_ms": _ms(step_s), "floor_ms": _ms(floor_s), "share_of_floor": round(floor_s / step_s, 3)}


def passes(model: Model, scale: Scale) -> dict[str, Any]:
    """Milliseconds of passes of several tokens, every position scored."""
    cache = model.new_cache()
    model.run([Row(cache, 0, tokens(scale.context, 1), 1, GREEDY)])
    rows = {n: Row(cache, scale.context, tokens(n, 2), n, GREEDY) for n in PASS_SIZES}
    taken: dict[int, list[float]] = {n: [] for n in PASS_SIZES}
    for _ in range(scale.passes):
        for n, row in rows.items():
            taken[n].append(seconds(lambda row=row: model.run([row]), model.device))  # type: ignore[misc]
    cache.free()
    typical = {n: statistics.median(times) for n, times in taken.items()}
    return {"pass_ms": {n: _ms(s) for n, s in typical.items()}, "pass_8_vs_1": round(typical[8] / typical[1], 3)}


def gaps(model: Model, cascade: Cascade, scale: Scale) -> dict[str, Any]:
    """Between two passes of one request: what the tier does on the host, and how long the device waits in all."""
    run, times = model.run, []

    def timed(rows: Sequence[Row]) -> list[list[int]]:
        begin = time.perf_counter()
        own = run(rows)
        times.append((begin, time.perf_counter()))
        return own

    model.run = timed  # type: ignore[method-assign]
    try:
        cascade.generate(tokens(16, 5), params(scale.tokens))
        found = {"tier_gap_ms": _ms(statistics.median(b - a for (_, a), (b, _) in itertools.pairwise(times)))}
        if model.device.type == "cuda":
            found["device_gap_ms"] = _ms(_device_gap(lambda: cascade.generate(tokens(16, 6), params(scale.tokens)), times))
    finally:
        del model.run
    return found


def _device_gap(work: Callable[[], object], times: list[tuple[float, float]]) -> float:
    """Seconds without any kernel or copy, a pass, as the profiler of the device sees it."""
    times.clear()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        work()
        torch.cuda.synchronize()
    spans = sorted(
        (event.time_range.start, event.time_range.end)
        for event in profile.events()
        if event.device_type == torch.autograd.DeviceType.CUDA
    )
    idle, end = 0.0, spans[0][1]
    for begin, until in spans:
        idle += max(0.0, begin - end)
        end = max(end, until)
    return idle / 1e6 / max(1, len(times) - 1)


def generate(network: PreTrainedModel, prompt: list[int], n: int, **options: Any) -> list[int]:
    """Transformers' greedy ``generate`` of exactly ``n`` tokens."""
    ids = torch.tensor([prompt], device=network.device)
    wanted = {"max_new_tokens": n, "min_new_tokens": n, "do_sample": False}
    out: torch.Tensor = network.generate(ids, attention_mask=torch.ones_like(ids), **wanted, **options)
    return out[0, len(prompt) :].tolist()


def single(network: PreTrainedModel, cascade: Cascade, scale: Scale) -> dict[str, Any]:
    """Tokens per second of one request, its prompt of 16 tokens included."""
    device, prompt, n = network.device, tokens(16, 0), scale.tokens
    ways: dict[str, Callable[[], object]] = {
        "tier": lambda: cascade.generate(prompt, params(n)),
        "generate": lambda: generate(network, prompt, n),
        "generate_static": lambda: generate(network, prompt, n, cache_implementation="static"),
    }
    best = dict.fromkeys(ways, float("inf"))
    for way in ways.values():
        way()  # compiles, and fills caches
    for _ in range(scale.repeats):
        cascade.tiers[0].memory.pool.clear()
        for name, way in ways.items():
            best[name] = min(best[name], seconds(way, device))
    return {f"{name}_tokens_per_s": round(n / s, 1) for name, s in best.items()} | {
        f"decode_vs_{name}": round(best[name] / best["tier"], 3) for name in ways if name != "tier"
    }


def generate_batch(network: PreTrainedModel, batch: list[tuple[int, int]], blocks: int | None) -> float:
    """Seconds of a batch by the manager behind Transformers' ``generate_batch``, which is started before the clock is."""
    config = GenerationConfig(do_sample=False, eos_token_id=-1, max_new_tokens=max(answer for _, answer in batch))
    before = network.config._attn_implementation
    try:
        memory = ContinuousBatchingConfig(num_blocks=blocks)
        with network.continuous_batching_context_manager(config, timeout=5, continuous_batching_config=memory) as manager:
            manager.add_request(tokens(8, 99), max_new_tokens=2)
            _wait(manager, 1)
            begin = time.perf_counter()
            for seed, (prompt, answer) in enumerate(batch):
                manager.add_request(tokens(prompt, seed), max_new_tokens=answer)
            _wait(manager, len(batch))
            return time.perf_counter() - begin
    finally:
        network.set_attn_implementation(before)


def _wait(manager: Any, left: int) -> None:
    while left:
        result = manager.get_result(timeout=1)
        left -= result is not None and result.is_finished()
        if left and not manager.is_running():
            raise RuntimeError("Transformers' continuous batching stopped")


def batching(network: PreTrainedModel, cascade: Cascade, scale: Scale) -> dict[str, Any]:
    """Tokens per second of ragged requests at once."""
    batch = scale.batch()

    async def ours() -> None:
        work = (cascade.agenerate(tokens(prompt, seed), params(answer)) for seed, (prompt, answer) in enumerate(batch))
        await asyncio.gather(*work)

    wanted, tier, continuous = sum(answer for _, answer in batch), [], []
    for _ in range(scale.repeats):
        cascade.tiers[0].memory.pool.clear()
        tier.append(seconds(lambda: asyncio.run(ours()), network.device))
        continuous.append(generate_batch(network, batch, scale.blocks))
    return {
        "tier_batch_tokens_per_s": round(wanted / min(tier), 1),
        "generate_batch_tokens_per_s": round(wanted / min(continuous), 1),
        "batch_vs_generate_batch": round(min(continuous) / min(tier), 3),
    }


def differing(model: Model, scale: Scale) -> dict[str, Any]:
    """Tokens that passes of eight choose otherwise than passes of one, and how far the two likeliest are apart there."""
    prompt = tokens(scale.context, 3)
    cache, other = model.new_cache(), model.new_cache()
    text = [*prompt, *model.run([Row(cache, 0, prompt, 1, GREEDY)])[0]]
    while len(text) < len(prompt) + scale.tokens:
        text += model.run([Row(cache, len(text) - 1, text[-1:], 1, GREEDY)])[0]
    model.run([Row(other, 0, prompt, 1, GREEDY)])
    margins, compared = [], 0
    for start in range(len(prompt), len(text) - 8, 8):
        row = Row(other, start, text[start : start + 8], 8, GREEDY)
        own, logits = model.run([row])[0], model.logits([row]).float()
        best = logits.topk(2).values
        for place, (said, kept) in enumerate(zip(own, text[start + 1 : start + 9], strict=True)):
            compared += 1
            if said != kept:
                margins.append(round(float(best[place, 0] - best[place, 1]), 4))
    cache.free()
    other.free()
    return {"compared": compared, "differing": len(margins), "rate": round(len(margins) / compared, 5), "margins": margins}


def same_text(network: PreTrainedModel, scale: Scale) -> dict[str, Any]:
    """Whether a cascade writes what its full model writes alone, and how many of the drafter's tokens it took.

    Asynchronous and lockstep take turns: a full model that waits for nobody may be done before its first guesses arrive.
    """
    models = [Model(worse(network), cache_tokens=_room(scale)), Model(twin(network), cache_tokens=_room(scale))]
    same, kept = True, 0
    with Cascade(models, words(network.config.vocab_size)) as cascade:
        for seed, temperature in enumerate((0.0, 0.0, 0.8, 1.0)):
            schedule: Literal["async", "lockstep"] = "lockstep" if seed % 2 else "async"
            asked = SamplingParams(max_tokens=scale.tokens, temperature=temperature, seed=seed, ignore_eos=True)
            prompt = tokens(scale.context, seed)
            alone = cascade.generate(prompt, asked, Speculation("off"))
            joined = cascade.generate(prompt, asked, Speculation(tiers=cascade.names[:-1], schedule=schedule))
            same &= alone.token_ids == joined.token_ids
            kept += sum(edge.accepted for edge in joined.stats.edges)
    return {"same_text": same, "accepted": kept}


def _room(scale: Scale) -> int:
    return 2 * (scale.context + scale.tokens) * scale.requests


def compare(shape: Shape, device: torch.device, scale: Scale) -> dict[str, Any]:
    """Everything about one shape in bfloat16."""
    network = build(shape, device, torch.bfloat16)
    model = Model(twin(network), cache_tokens=_room(scale))
    found = {"parameters": model.num_parameters, "weight_gib": round(model.weight_bytes / 2**30, 2), "path": model.path}
    peak = bandwidth(device, scale)
    found["bandwidth_gb_per_s"] = round(peak / 1e9, 1)
    with Cascade([model], words(shape.vocab)) as cascade:
        cascade.generate(tokens(16, 9), params(4))
        parts: tuple[Callable[[], dict[str, Any]], ...] = (
            lambda: decode(network, model, peak, scale),
            lambda: passes(model, scale),
            lambda: gaps(model, cascade, scale),
            lambda: single(network, cascade, scale),
            lambda: batching(network, cascade, scale),
            lambda: {"bfloat16_exactness": differing(model, scale)},
        )
        found["problems"] = []
        for part in parts:
            attempt(part, found)
    return found


def attempt(part: Callable[[], dict[str, Any]], found: dict[str, Any]) -> None:
    """Add what a part found, or why it failed: the others are of use without it."""
    try:
        found |= part()
    except Exception as error:  # of any library
        found["problems"].append(f"{type(error).__name__}: {error}")


def _ms(value: float) -> float:
    return round(value * 1e3, 4)


def measure(names: Sequence[str], device: torch.device, scale: Scale) -> dict[str, Any]:
    """The JSON document."""
    shapes = {}
    for name in names:
        shapes[name] = compare(SHAPES[name], device, scale)
        console.print(f"[bold]{name}[/]", shapes[name])
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
    exactness: dict[str, Any] = {"problems": []}
    attempt(lambda: same_text(build(SHAPES[names[0]], device, torch.float32), scale), exactness)
    return {
        "shapes": shapes,
        "float32_exactness": exactness,
        "hardware": torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or "CPU",
        "versions": {"torch": torch.__version__, "cuda": torch.version.cuda, "transformers": transformers.__version__},
    }


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
    """What the issue asks for, one column a shape."""
    out = Table("", *document["shapes"], "wanted", title=document["hardware"])
    for name, wanted in WANTED.items():
        out.add_row(name, *(str(found.get(name, "-")) for found in document["shapes"].values()), wanted)
    out.add_row(
        "tokens that differ", *(str(f.get("bfloat16_exactness", {}).get("rate", "-")) for f in document["shapes"].values()), ""
    )
    out.add_row("same text in float32", str(document["float32_exactness"].get("same_text", "-")), "True")
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
    document = measure(chosen.shape, device, SMALL if "tiny" in chosen.shape else Scale())
    console.print(table(document))
    chosen.results.parent.mkdir(exist_ok=True)
    chosen.results.write_text(json.dumps(document, indent=2) + "\n")
    print(json.dumps(document))


if __name__ == "__main__":
    main()
