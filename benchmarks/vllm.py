"""A full tier on vLLM against vLLM itself, on the same weights: what is most likely to fail comes first.

    make bench-vllm
    python -m benchmarks.vllm --model Qwen/Qwen3-8B --dtype bfloat16    # on a GPU

1. ``text``: passes over right and wrong drafts, rolled back at random, write what passes of one token write.
2. ``passes``: what a pass of 1 to 64 tokens costs, and one of 1 to 64 rows.
3. ``served``: `vllm bench serve` asks this project's server and ``vllm serve``, 1, 8 and 32 requests at once, in turns, all
   in this environment if it has pandas and datasets beside vLLM.

A part that fails is named under ``problems``, and the others go on. The last line is one JSON document, also in
benchmarks/results/vllm.json, which is written after each part.
"""

import argparse
import gc
import json
import random
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from typing import Any

import torch

from benchmarks.document import RESULTS, console, keep, parsed, parser, shape, stamp
from benchmarks.peers import served
from benchmarks.peers.contract import Models
from benchmarks.prompts import by_category
from cascade import SamplingParams, family
from cascade.draft import Draft
from cascade.engine.gguf import converted
from cascade.engine.vllm.model import VllmModel
from cascade.scorer import Row

PARTS = ("text", "passes", "served")
SHARE = 0.28  # of a GPU's memory for each server: three of them are there at once
REQUESTS = {1: 6, 8: 24, 32: 64}  # at once, and in all
GREEDY = SamplingParams(temperature=0, seed=0)
REPEATS = 15  # of a timed pass, of which the median counts
COUNTS = (1, 2, 4, 8, 16, 32, 64)  # of tokens, and of rows
TOKENS = 96  # of an answer at most


def text(model: VllmModel, length: int = 200) -> dict[str, Any]:
    """How many tokens of a greedy text are the same with random drafts, half of them wrong, and without."""
    prompt, rng = list(range(5, 25)), random.Random(0)
    alone = written(model, prompt, length)

    def drafts(so_far: Sequence[int]) -> list[int]:
        right = alone[len(so_far) : len(so_far) + 6]
        if right and rng.random() < 0.5:
            right[rng.randrange(len(right))] = 7
        return right

    drafted = written(model, prompt, length, drafts)
    same = next((place for place, pair in enumerate(zip(alone, drafted, strict=True)) if pair[0] != pair[1]), length)
    return {"tokens": length, "same": same, "same_bits": model.same_bits}


def written(
    model: VllmModel, prompt: Sequence[int], length: int, drafts: Callable[[Sequence[int]], list[int]] = lambda so_far: []
) -> list[int]:
    """Greedy text of so many tokens after ``prompt``, with what ``drafts`` guess behind the text so far."""
    store, text, held, begin = model.new_cache(), list(prompt), 0, len(prompt)
    store.reserve(begin + length + 8)
    while len(text) < begin + length:
        draft = Draft(tuple(tokens := drafts(text[begin:])), bytes(len(tokens)))
        own = list(model.run([Row(store, held, text[held:], 1, GREEDY, draft=draft)])[0].own)
        new = draft.walk(own)[0]
        held, text = len(text) + len(new) - 1, [*text, *new]
    store.free()
    return text[begin : begin + length]


def passes(model: VllmModel) -> dict[str, Any]:
    """Milliseconds of a pass of one row after 200 positions, by its tokens; and of rows of one token, by their number."""
    stores = [model.new_cache() for _ in range(max(COUNTS))]
    for store in stores:
        store.reserve(272)
    for begin in range(0, max(COUNTS), 8):
        model.run([Row(store, 0, list(range(5, 205)), 1, GREEDY) for store in stores[begin : begin + 8]])

    def timed(number: int, tokens: int) -> float:
        rows = [Row(store, 200, list(range(5, 5 + tokens)), tokens, GREEDY) for store in stores[:number]]
        model.run(rows)
        times = []
        for _ in range(REPEATS):
            begin = time.perf_counter()
            model.run(rows)
            times.append(time.perf_counter() - begin)
        return round(statistics.median(times) * 1e3, 2)

    figures = {
        "by_tokens": {str(tokens): timed(1, tokens) for tokens in COUNTS},
        "by_rows": {str(number): timed(number, 1) for number in COUNTS},
    }
    for store in stores:
        store.free()
    return figures


def serve(chosen: argparse.Namespace, source: str) -> dict[str, Any]:
    """Tokens a second by requests at once and mode, and their ratios; see `served`."""
    tier: dict[str, Any] = {
        "name": "full",
        "model_loading_config": {"model_id": "full", "model_source": source},
        "engine_kwargs": {"engine": "vllm", "dtype": chosen.dtype, "max_model_len": 2048, "drafter": ["suffix"]},
    }
    share = SHARE if torch.cuda.is_available() else None
    if share:
        tier["engine_kwargs"]["gpu_memory_utilization"] = share
        tier["deployment_config"] = {"ray_actor_options": {"num_gpus": 1}}
    models = Models(source, "", "")
    plan = served.Plan(by_category(2), TOKENS, chosen.temperature, REQUESTS, "vllm_ngram")
    options: dict[str, Any] = {"config": {"tiers": [tier]}, "dtype": chosen.dtype, "share": share, "python": sys.executable}
    cells: dict[str, Any] = {}
    with ExitStack() as stack:
        arena = served.Arena(models, plan, stack, **options)
        cells = served.measure(arena, plan, lambda at_once, figures: console.print(at_once, figures))
    speeds = {at_once: {mode: cell["tokens_per_second"] for mode, cell in modes.items()} for at_once, modes in cells.items()}
    ratios = {at_once: _ratios(figures) for at_once, figures in speeds.items()}
    return {"served": ratios, "cells": cells, "missing": arena.missing, "temperature": chosen.temperature}


def _ratios(speeds: dict[str, float]) -> dict[str, float | None]:
    def over(mode: str, other: str) -> float | None:
        return round(speeds[mode] / speeds[other], 3) if mode in speeds and other in speeds else None

    return {
        "alone_vs_vllm": over("alone", "vllm_alone"),
        "suffix_vs_alone": over("auto", "alone"),
        "suffix_vs_vllm_ngram": over("auto", "vllm_ngram"),
    }


def main(arguments: Sequence[str] | None = None) -> None:
    made = parser("vllm", "A full tier on vLLM against vLLM itself.", PARTS, quick=False)
    made.add_argument("--model", help="path or hub id; SmolLM2-135M-Instruct unless given")
    made.add_argument("--dtype", default="float32", help="of weights and products (%(default)s)")
    made.add_argument("--temperature", type=float, default=0.0, help="of requests over HTTP (%(default)s)")
    chosen = parsed(made, arguments)
    wanted, results = chosen.only or PARTS, chosen.results or RESULTS / "vllm.json"
    source = chosen.model or converted(family.full())
    gpu = torch.cuda.is_available()
    document: dict[str, Any] = stamp({"full": shape(source)}) | {"model": chosen.model or family.MODEL, "dtype": chosen.dtype}
    document |= {"problems": [], "device": torch.cuda.get_device_name() if gpu else "cpu"}
    parts: dict[str, Callable[[VllmModel], dict[str, Any]]] = {"text": text, "passes": passes}
    if own := [name for name in parts if name in wanted]:
        options = {"dtype": chosen.dtype, "max_model_len": 2048}
        options |= {"gpu_memory_utilization": SHARE} if gpu else {"enforce_eager": True}
        with closing(VllmModel(source, cache_tokens=24_576, options=options)) as model:
            for name in own:
                _attempt(name, lambda part=parts[name]: part(model), document)  # type: ignore[misc]
                keep(document, results)
        del model
        gc.collect()
        if gpu:
            torch.cuda.empty_cache()  # for the servers
    if "served" in wanted:
        _attempt("served", lambda: serve(chosen, source), document)
        keep(document, results)
    console.print(document)
    print(json.dumps({"served": document.get("served"), "problems": document["problems"]}))


def _attempt(name: str, part: Callable[[], dict[str, Any]], document: dict[str, Any]) -> None:
    """Add what a part measured, or why it failed."""
    try:
        figures = part()
        document |= figures if name == "served" else {name: figures}
        console.print(name, figures)
    except Exception as error:  # of any library
        document["problems"].append(f"{name}: {type(error).__name__}: {error}")


if __name__ == "__main__":
    main()
