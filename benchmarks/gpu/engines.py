"""Steps of models in this process, without a server: what passes cost, and whether text stays as it is."""

import gc
import importlib.metadata
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu import inflate
from benchmarks.gpu.step import Notes
from benchmarks.prompts import by_category
from benchmarks.turns import at
from benchmarks.vllm import GREEDY, passes, text
from cascade import LLM, SamplingParams, Speculation, family
from cascade.draft import Draft
from cascade.engine.model import Model
from cascade.engine.sampling.own_tokens import by_kernel, by_operations, find_kernel, sampled
from cascade.engine.vllm.engine import undisturbed
from cascade.engine.vllm.model import VllmModel
from cascade.messages import RUNNER_UPS
from cascade.scorer import Row, Scorer

PACKAGES = ("vllm", "ray", "transformers", "flashinfer-python")
IMPORTS = ("vllm.entrypoints.llm", "ray.serve")
CACHE_TOKENS = 24_576  # each model's: 64 rows of 272, and a text
PROFILED = 5  # passes
WHOLE: dict[str, Any] = {"compilation_config": {"cudagraph_mode": "FULL"}}  # engine arguments for graphs of whole passes
READ_BYTES = 1 << 24


def warm(notes: Notes) -> None:
    """Read packages ahead, import vLLM and Ray side by side, unpack the family's models."""
    versions: dict[str, str | None] = {}
    for name in PACKAGES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = None
    notes.keep(versions=versions, python=sys.version.split()[0])
    begin = time.perf_counter()
    importing = {name: subprocess.Popen([sys.executable, "-c", f"import {name}"]) for name in IMPORTS}
    spec = importlib.util.find_spec("vllm")
    for folder in (spec.submodule_search_locations or ()) if spec is not None else ():
        for file in Path(folder).rglob("*.so"):
            with file.open("rb", buffering=0) as opened:
                while opened.read(READ_BYTES):
                    pass
    notes.keep(read_s=round(time.perf_counter() - begin, 1))
    for name, process in importing.items():
        failed = process.wait()
        notes.keep(**{f"import {name}": f"ended with {failed}" if failed else f"{time.perf_counter() - begin:.1f} s"})
    notes.keep(models=family.paths())


def graphs(notes: Notes) -> None:
    """Graphs of pieces, then of whole passes: text with half of the drafts wrong, what passes cost, how long the device works
    in one; and vLLM's own step."""
    sources = {} if notes.small else {"8b": (notes.inflated(), {"load_format": inflate.FORMAT})}
    results: dict[str, Any] = {}
    problems: list[str] = []
    for name, (source, how) in (sources | {"tiny": (family.path("tiny"), {})}).items():
        for kind, further in (("", {}), (", whole graphs", WHOLE)):
            entry = results[name + kind] = {}
            try:
                with _model(notes, source, entry, **how, **further) as model:
                    for part in (text, choosing, waits, passes, busy):
                        entry[part.__name__] = part(model)
                        notes.keep(models=results)
            except Exception as error:  # a library may raise anything: not every machine lets its GPU be profiled
                problems.append(f"{name}{kind}, with {', '.join(entry)}: {type(error).__name__}: {error}")
        results[name]["vllm_step_ms"] = own_step(notes, source, how)
        notes.keep(models=results)
    if problems:
        raise SystemExit("; ".join(problems))


@contextmanager
def _model(notes: Notes, source: str, results: dict[str, Any], **how: Any) -> Iterator[VllmModel]:
    """A model, whose memory is free afterwards; what starting took is added to ``figures``."""
    begin = time.perf_counter()
    model = VllmModel(source, cache_tokens=CACHE_TOKENS, options=notes.options(**how))
    results |= {"start_s": round(time.perf_counter() - begin, 1), "summary": model.summary}
    with closing(model):
        yield model
    del model
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def choosing(model: VllmModel) -> dict[str, Any]:
    """Own tokens of random logits by the kernels of a GPU and by PyTorch's operations: whether they and their runner-ups are
    the same, and microseconds until they are there, by the number of rows. Without a GPU the operations alone."""
    kernel, rng = find_kernel(model.device), torch.Generator().manual_seed(0)
    results: dict[str, Any] = {}
    for rows in (1, 8, 64):
        logits = (torch.randn(rows, model.vocab_size, generator=rng) * 3).to(model.device, model.dtype)
        noisy = list(sampled([(SamplingParams(temperature=0.8, seed=row), 200, 1) for row in range(rows)]))
        ways: dict[str, Callable[[], torch.Tensor]] = {"operations": partial(by_operations, logits, noisy, RUNNER_UPS)}
        if kernel is not None:
            ways["kernel"] = partial(by_kernel, kernel, logits, noisy, RUNNER_UPS)
        tokens = {}
        for name, way in ways.items():
            tokens[name] = way()[: 1 + RUNNER_UPS].tolist()
            begin = time.perf_counter()
            for _ in range(PROFILED):
                way().cpu()
            results[f"{rows}, {name}"] = round((time.perf_counter() - begin) / PROFILED * 1e6, 1)
        results[f"{rows}, same"] = all(of_way == tokens["operations"] for of_way in tokens.values())
    return results


def waits(model: VllmModel) -> list[str]:
    """Where the host waits for the device while it launches a pass; nowhere is expected."""
    stores = [model.new_cache() for _ in range(2)]
    sampling = SamplingParams(temperature=0.8, seed=1)
    rows = [Row(stores[0], 0, [5, 6, 7, 8], 4, sampling, runner_ups=RUNNER_UPS), Row(stores[1], 0, [5], 1, GREEDY)]
    model.run(rows)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        if model.device.type == "cuda":
            torch.cuda.set_sync_debug_mode("warn")
        launched = model.launch(rows)
        if model.device.type == "cuda":
            torch.cuda.set_sync_debug_mode("default")
    model.collect(launched)
    for store in stores:
        store.free()
    return [f"{warning.filename}:{warning.lineno}: {warning.message}" for warning in caught]


def busy(model: VllmModel) -> dict[str, dict[str, float]]:
    """Of passes by their rows of one token: milliseconds of the wall clock, and those in which the device's kernels ran.

    The profiler makes passes longer; kernels take what they take without it.
    """
    gpu = torch.cuda.is_available()
    kind = torch.profiler.ProfilerActivity.CUDA if gpu else torch.profiler.ProfilerActivity.CPU
    results = {}
    for number in (1, 32):
        stores = [model.new_cache() for _ in range(number)]
        rows = [Row(store, 0, [5, 6, 7, 8], 1, GREEDY) for store in stores]
        model.run(rows)
        begin = time.perf_counter()
        for _ in range(PROFILED):
            model.run(rows)
        wall_s = time.perf_counter() - begin
        with torch.profiler.profile(activities=[kind]) as profile:
            for _ in range(PROFILED):
                model.run(rows)
        averages = profile.key_averages()
        total_us = sum(entry.self_device_time_total if gpu else entry.self_cpu_time_total for entry in averages)
        results[str(number)] = {
            "wall_ms": round(wall_s / PROFILED * 1e3, 3),
            "device_ms": round(total_us / PROFILED / 1e3, 3),
        }
        for store in stores:
            store.free()
    return results


def own_step(notes: Notes, source: str, how: dict[str, Any]) -> dict[str, float]:
    """Milliseconds of a step of vLLM by itself after 200 positions, by the number of its rows."""
    from vllm import LLM as Engine
    from vllm import SamplingParams as Params

    length, at_once = 8 if notes.small else 100, [1, 8, 32]
    options = notes.options(enable_prefix_caching=False, cudagraph_capture_sizes=at_once, **how)
    with undisturbed():
        engine = Engine(source, skip_tokenizer_init=True, **options)

    def seconds(rows: int, tokens: int) -> float:
        prompts = [{"prompt_token_ids": [5 + row, *range(5, 204)]} for row in range(rows)]
        begin = time.perf_counter()
        engine.generate(prompts, Params(temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False), use_tqdm=False)
        return time.perf_counter() - begin

    results = {}
    for rows in at_once:
        seconds(rows, 2)
        short, long = (min(seconds(rows, tokens) for _ in range(2)) for tokens in (1, 1 + length))
        results[str(rows)] = round((long - short) / length * 1e3, 3)
    return results


def library(notes: Notes) -> None:
    """`cascade.LLM` with two draft models in one process: the texts and the speed with drafts, and without."""
    tiny, medium, full = family.paths()
    count, tokens = (2, 16) if notes.small else (12, 96)
    prompts = [prompt.text for prompt in by_category(2)][:count]
    begin = time.perf_counter()
    with LLM(full, [medium, tiny], engine="vllm", dtype=notes.dtype) as llm:
        notes.keep(start_s=round(time.perf_counter() - begin, 1))
        for temperature in (0.0, 0.8):
            params = SamplingParams(max_tokens=tokens, temperature=temperature, seed=1)
            outputs, speeds = {}, {}
            for name, speculation in (("alone", Speculation("off")), ("tiers", Speculation(tiers=("tiny", "medium")))):
                begin = time.perf_counter()
                answers = llm.cascade.generate(prompts, params, speculation)
                outputs[name] = [answer.token_ids for answer in answers]
                speeds[name] = round(sum(map(len, outputs[name])) / (time.perf_counter() - begin), 1)
            same = [alone == tiers for alone, tiers in zip(outputs["alone"], outputs["tiers"], strict=True)]
            notes.keep(**{at(temperature): {"same": sum(same), "texts": len(same), "tokens_per_second": speeds}})


def invariant(notes: Notes) -> None:
    """Whether rows have the text that they have alone, whatever shares their passes; runs with ``VLLM_BATCH_INVARIANT=1``."""
    rows, length = (4, 12) if notes.small else (32, 100)
    results: dict[str, Any] = {}
    with _model(notes, family.path("tiny" if notes.small else "full"), results) as model:
        notes.keep(**results, same_bits=model.same_bits)
        prompts = [[5 + row, *range(7, 27 + row)] for row in range(rows)]
        alone = [together(model, [prompt], length)[0] for prompt in prompts]
        same = sum(text == other for text, other in zip(alone, together(model, prompts, length), strict=True))
        notes.keep(rows=rows, same=same, text=text(model, 24 if notes.small else 200))


def together(model: Scorer, prompts: list[list[int]], length: int) -> list[list[int]]:
    """Greedy texts of ``length`` tokens after ``prompts``, all in the same passes."""
    stores, texts, held = [model.new_cache() for _ in prompts], [list(prompt) for prompt in prompts], [0] * len(prompts)
    for _ in range(length):
        rows = [
            Row(store, start, text[start:], 1, GREEDY, draft=Draft((), b""))
            for store, start, text in zip(stores, held, texts, strict=True)
        ]
        for place, scored in enumerate(model.collect(model.launch(rows))):
            held[place] = len(texts[place])
            texts[place] += scored.own
    for store in stores:
        store.free()
    return [text[len(prompt) :] for text, prompt in zip(texts, prompts, strict=True)]


def fp8(notes: Notes) -> None:
    """FP8 weights, keys and values: text with drafts as without, and what passes cost. vLLM's CPU build has only the latter."""
    source, how = (family.path("tiny"), {}) if notes.small else (notes.inflated(), {"load_format": inflate.FORMAT})
    weights: dict[str, Any] = {} if notes.small else {"quantization": "fp8"}
    results: dict[str, Any] = {}
    with _model(notes, source, results, kv_cache_dtype="fp8", **weights, **how) as model:
        notes.keep(**results)
        _parts(notes, model)


def own(notes: Notes) -> None:
    """Our own engine on the GPU, or the CPU: text with drafts as without, and what passes cost."""
    device = "cpu" if notes.small else "cuda:0"
    source = family.path("tiny" if notes.small else "full")
    _parts(notes, Model.from_pretrained(source, dtype=notes.dtype, device=device, cache_tokens=CACHE_TOKENS))


def _parts(notes: Notes, model: Any) -> None:
    parts: dict[str, Callable[[], Any]] = {
        "text": lambda: text(model, 24 if notes.small else 200),
        "passes": lambda: passes(model),
    }
    for name, part in parts.items():
        notes.keep(**{name: part()})
