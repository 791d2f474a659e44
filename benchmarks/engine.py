"""One tier alone against Transformers on the same weights and threads, each in a process of its own.

    make bench-engine

SmolLM2-135M-Instruct in float32 and, where the processor has instructions for it, in bfloat16: one request against
``generate``; passes of a few tokens; two batches of 16 requests of different lengths against Transformers' continuous batching
and against a padded ``generate``; the time to the first token after a prefix that is known. What is compared takes turns, and
of each the best run counts: a busy machine only ever adds. OMP_NUM_THREADS is honoured. The last line is one JSON document.
"""

import asyncio
import gc
import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
import transformers

from benchmarks.baseline import generate, generate_batch, hold, load
from benchmarks.document import console, finish, parsed, parser, stamp
from benchmarks.passes import DTYPES, pass_ms
from cascade import family
from cascade.engine.model import Model
from cascade.engine.threads import apart
from cascade.engine.tokenizer import Tokenizer
from cascade.local import Cascade
from cascade.params import SamplingParams

REPEATS = 3
NEW_TOKENS = 48
PASS_SIZES = (1, 2, 4, 8)
EVEN = [(8 + 37 * i % 120, 8 + 29 * i % 64) for i in range(16)]  # tokens of prompts and of answers, evenly spread
# Chat traffic: sixteen equally likely lengths of Azure's conversation trace of 2023, 19,366 requests (Patel et al., Splitwise,
# ISCA 2024; the mean answer is 41 % of the longest, as it is of sixteen drawn at random), made shorter for a CPU.
CHAT_PROMPTS = (165, 206, 374, 391, 401, 412, 818, 1001, 1037, 1067, 1100, 1147, 1312, 1770, 3018, 4089)
CHAT_ANSWERS = (33, 53, 68, 81, 89, 95, 104, 118, 141, 171, 223, 389, 397, 411, 427, 502)
SHORTER = 16
CHAT = [(CHAT_PROMPTS[5 * i % 16] // SHORTER, CHAT_ANSWERS[7 * i % 16] // SHORTER) for i in range(16)]  # hardly correlated
Batch = list[tuple[int, int]]
BATCHES: dict[str, Batch] = {"batch16": EVEN, "chat16": CHAT}
PREFIX = 1000
LARGE = 10**8  # parameters of a model whose batches run once


def tokens(n: int, seed: int) -> list[int]:
    """Token ids that differ from seed to seed from the first on."""
    return [(seed * 7919 + place * 104729 + 17) % 4000 + 50 for place in range(n)]


def params(n: int) -> SamplingParams:
    return SamplingParams(max_tokens=n, temperature=0, seed=0, ignore_eos=True)


def seconds(work: Callable[[], object]) -> float:
    begin = time.perf_counter()
    work()
    return time.perf_counter() - begin


class Others:
    """The share of the machine's processors that other programs take from now on: beside them nothing can be measured."""

    def __init__(self, rival: Executor) -> None:
        self._rival = rival
        self._before = self._read()

    def _read(self) -> tuple[float, float, float]:
        """Seconds on all processors: altogether, in use, in use by this process and the other."""
        times = [int(part) / os.sysconf("SC_CLK_TCK") for part in Path("/proc/stat").read_text().splitlines()[0].split()[1:9]]
        used = sum(times) - times[3] - times[4]
        return sum(times), used, time.process_time() + self._rival.submit(time.process_time).result()

    def share(self) -> float:
        whole, used, own = (after - before for after, before in zip(self._read(), self._before, strict=True))
        return max(0.0, used - own) / whole if whole else 0.0


async def serve(cascade: Cascade, requests: Batch) -> None:
    """The same requests by a tier."""
    work = (cascade.agenerate(tokens(prompt, seed), params(answer)) for seed, (prompt, answer) in enumerate(requests))
    await asyncio.gather(*work)


def decoding(rival: Executor, cascade: Cascade) -> dict[str, Any]:
    """Tokens per second of one request, its prompt of 16 tokens included."""
    prompt, theirs, ours = tokens(16, 0), [], []
    for _ in range(REPEATS):
        spent, said = rival.submit(generate, [prompt], NEW_TOKENS).result()
        theirs.append(spent)
        ours.append(seconds(lambda: cascade.generate(prompt, params(NEW_TOKENS))))
    text = cascade.generate(prompt, params(NEW_TOKENS)).token_ids
    return {
        "generate_tokens_per_s": round(NEW_TOKENS / min(theirs), 1),
        "tier_tokens_per_s": round(NEW_TOKENS / min(ours), 1),
        "decode_vs_generate": round(min(theirs) / min(ours), 3),
        "same_tokens": said[0] == list(text),
    }


def passes(model: Model) -> dict[str, Any]:
    """Milliseconds of passes, of which one of eight tokens should take hardly longer than one of two."""
    best = pass_ms(model, PASS_SIZES, 4 * REPEATS)
    return {"pass_ms": best, "pass_8_vs_2": round(best["8"] / best["2"], 3)}


def batching(rival: Executor, cascade: Cascade, name: str, repeats: int) -> dict[str, Any]:
    """Tokens per second of a batch; in a padded one the longest answer is everyone's, and only what is wanted counts."""
    requests = BATCHES[name]
    wanted = sum(answer for _, answer in requests)
    longest = max(answer for _, answer in requests)
    prompts = [tokens(prompt, seed) for seed, (prompt, _) in enumerate(requests)]
    padded, continuous, ours = [], [], []
    for _ in range(repeats):
        padded.append(rival.submit(generate, prompts, longest).result()[0])
        asked = [(prompt, answer) for prompt, (_, answer) in zip(prompts, requests, strict=True)]
        continuous.append(rival.submit(generate_batch, asked).result())
        cascade.tiers[0].kv_admission.block_manager.clear()  # no prompt is known
        ours.append(seconds(lambda: asyncio.run(serve(cascade, requests))))
    return {
        f"padded_generate_{name}_tokens_per_s": round(wanted / min(padded), 1),
        f"generate_batch_{name}_tokens_per_s": round(wanted / min(continuous), 1),
        f"tier_{name}_tokens_per_s": round(wanted / min(ours), 1),
        f"{name}_vs_padded_generate": round(min(padded) / min(ours), 3),
        f"{name}_vs_generate_batch": round(min(continuous) / min(ours), 3),
    }


def first_token(cascade: Cascade, prompt: list[int]) -> float:
    return seconds(lambda: cascade.generate(prompt, params(1)))


def prefix(cascade: Cascade) -> dict[str, Any]:
    """Seconds to the first token of two requests that begin with the same PREFIX tokens."""
    first, second = [], []
    for seed in range(100, 100 + REPEATS):
        shared = tokens(PREFIX, seed)
        first.append(first_token(cascade, shared + tokens(16, seed + 200)))
        second.append(first_token(cascade, shared + tokens(16, seed + 300)))
    return {
        "first_token_ms": round(min(first) * 1e3, 1),
        "first_token_known_prefix_ms": round(min(second) * 1e3, 1),
        "prefix_ttft": round(min(second) / min(first), 4),
    }


def compare(source: str, dtype: str) -> dict[str, Any]:
    """Everything about one model in one dtype."""
    model, tokenizer = apart(lambda: Model(load(source, dtype))), Tokenizer.from_pretrained(source)
    repeats = 2 if model.num_parameters < LARGE else 1
    with (
        ProcessPoolExecutor(1, get_context("spawn"), hold, (source, dtype)) as rival,
        Cascade([model], tokenizer, drafter=None) as cascade,
    ):
        others = Others(rival)
        cascade.generate(tokens(16, 9), params(4))
        return {
            "parameters": model.num_parameters,
            "threads_up_to": dict(model.threads.steps),  # tokens of a pass; larger ones take all
            **decoding(rival, cascade),
            **batching(rival, cascade, "batch16", repeats),
            **batching(rival, cascade, "chat16", repeats),
            **prefix(cascade),
            "taken_by_others": round(others.share(), 3),
        }


def main(arguments: Sequence[str] | None = None) -> None:
    chosen = parsed(parser("engine", "One tier against Transformers.", quick=False), arguments)
    source = apart(family.full)  # this thread must not compute, see `cascade.engine.threads.apart`
    models: dict[str, dict[str, Any]] = {}
    for dtype in DTYPES:
        begin = time.perf_counter()
        found = apart(lambda dtype=dtype: passes(Model(load(source, dtype))))  # type: ignore[misc]
        found |= compare(source, dtype)
        models[dtype] = found
        gc.collect()
        console.print(f"[bold]{dtype}[/] {time.perf_counter() - begin:.0f} s", found)
    low = ("decode_vs_generate", *(f"{name}_vs_{other}" for name in BATCHES for other in ("generate_batch", "padded_generate")))
    document = {
        # the worst of all dtypes
        "ratios": {name: min(found[name] for found in models.values()) for name in low}
        | {name: max(found[name] for found in models.values()) for name in ("prefix_ttft", "pass_8_vs_2")},
        "taken_by_others": max(found["taken_by_others"] for found in models.values()),  # of all processors
        "models": models,
        "prefix_tokens": PREFIX,
        "threads": torch.get_num_threads(),
        "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
        **stamp(),
    }
    finish(document, document, chosen.results)


if __name__ == "__main__":
    main()
