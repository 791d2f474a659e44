"""What one tier does on a device: steps against their floor, passes, gaps between them, and how exact they are."""

import itertools
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
from torch._C._autograd import DeviceType
from transformers import PreTrainedModel

from benchmarks.scale import GREEDY, Scale, ms, params, seconds, tokens
from benchmarks.shapes import copied, words, worse
from cascade.engine.model import Model
from cascade.local import Cascade
from cascade.params import SamplingParams, Speculation
from cascade.scorer import Row, Scored

PASS_SIZES = (1, 2, 4, 8, 16)
LULL_S = 5e-6  # without any kernel: shorter ones lie between those of one graph, and no host ends them


def decode(network: PreTrainedModel, model: Model, peak: float, scale: Scale) -> dict[str, Any]:
    """One row, step by step, against the floor; every step is a pass of its own, with its host read."""
    cache, text, taken = model.new_cache(), tokens(scale.context, 0), []
    text += model.run([Row(cache, 0, text, 1, GREEDY)])[0].own
    for _ in range(scale.passes * scale.repeats):
        row = Row(cache, len(text) - 1, text[-1:], 1, GREEDY)
        begin = time.perf_counter()
        [scored] = model.run([row])
        text += [*scored.own, *scored.ahead]
        taken.append(time.perf_counter() - begin)
    cache.free()
    unread = 0 if network.config.tie_word_embeddings else network.get_input_embeddings().weight.nbytes
    floor_s = (model.weight_bytes - unread + len(text) * model.bytes_per_token) / peak
    step_s = statistics.median(taken)
    return {"step_ms": ms(step_s), "floor_ms": ms(floor_s), "share_of_floor": round(floor_s / step_s, 3)}


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
    return {"pass_ms": {n: ms(s) for n, s in typical.items()}, "pass_8_vs_1": round(typical[8] / typical[1], 3)}


def gaps(model: Model, cascade: Cascade, scale: Scale) -> dict[str, Any]:
    """Between two passes of one request: what the tier does on the host, and how long the device waits in all."""
    run, times = model.run, []

    def timed(rows: Sequence[Row]) -> list[Scored]:
        begin = time.perf_counter()
        scored = run(rows)
        times.append((begin, time.perf_counter()))
        return scored

    model.run = timed  # type: ignore[method-assign]
    try:
        cascade.generate(tokens(16, 5), params(scale.tokens))
        found = {"tier_gap_ms": ms(statistics.median(b - a for (_, a), (b, _) in itertools.pairwise(times)))}
        if model.device.type == "cuda":
            found["device_gap_ms"] = ms(_device_gap(lambda: cascade.generate(tokens(16, 6), params(scale.tokens)), times))
    finally:
        del model.run
    return found


def _device_gap(work: Callable[[], object], times: list[tuple[float, float]]) -> float:
    """Seconds that the device waits, a pass, as its profiler sees it; the profiler itself makes them more."""
    times.clear()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        work()
        torch.cuda.synchronize()
    spans = [
        (event.time_range.start / 1e6, event.time_range.end / 1e6)
        for event in profile.events()
        if event.device_type == DeviceType.CUDA
    ]
    return idle_s(spans) / max(1, len(times) - 1)


def idle_s(spans: Sequence[tuple[float, float]]) -> float:
    """Seconds between the first of ``spans`` and the last that are in none of them, short lulls aside."""
    idle, (_, end), *rest = 0.0, *sorted(spans)
    for begin, until in rest:
        idle += max(0.0, begin - end) if begin - end > LULL_S else 0.0
        end = max(end, until)
    return idle


def differing(model: Model, scale: Scale) -> dict[str, Any]:
    """Tokens that passes of eight choose otherwise than passes of one, and how far the two likeliest are apart there."""
    prompt = tokens(scale.context, 3)
    cache, other = model.new_cache(), model.new_cache()
    text = [*prompt, *model.run([Row(cache, 0, prompt, 1, GREEDY)])[0].own]
    while len(text) < len(prompt) + scale.tokens:
        text += model.run([Row(cache, len(text) - 1, text[-1:], 1, GREEDY)])[0].own
    model.run([Row(other, 0, prompt, 1, GREEDY)])
    margins, compared = [], 0
    for start in range(len(prompt), len(text) - 8, 8):
        row = Row(other, start, text[start : start + 8], 8, GREEDY)
        own, logits = model.run([row])[0].own, model.logits([row]).float()
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
    models = [Model(worse(network), cache_tokens=scale.room), Model(copied(network), cache_tokens=scale.room)]
    same, kept = 0, 0
    with Cascade(models, words(network.config.vocab_size), drafter=None) as cascade:
        requests = list(enumerate((0.0, 0.0, 0.8, 1.0)))
        for seed, temperature in requests:
            schedule: Literal["async", "lockstep"] = "lockstep" if seed % 2 else "async"
            asked = SamplingParams(max_tokens=scale.tokens, temperature=temperature, seed=seed, ignore_eos=True)
            prompt = tokens(scale.context, seed)
            alone = cascade.generate(prompt, asked, Speculation("off"))
            joined = cascade.generate(prompt, asked, Speculation(tiers=cascade.names[:-1], schedule=schedule))
            same += alone.token_ids == joined.token_ids
            kept += sum(edge.accepted for edge in joined.stats.edges)
    return {"same_text": same == len(requests), "same_texts": f"{same} of {len(requests)}", "accepted": kept}
