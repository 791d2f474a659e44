"""Tokens per second of the pair, one request at a time: every way to draft, and other engines with the same pair beside it."""

import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

from benchmarks.document import console
from benchmarks.family.models import PAIR, file_of, path
from benchmarks.peers import contest, environments, report
from benchmarks.peers.contest import Post
from benchmarks.peers.contract import AS_PUBLISHED, BFLOAT16, Models
from cascade.agreement import chat_ids
from cascade.engine.tokenizer import Tokenizer
from cascade.prompts import Prompt

SMALL, LARGE = PAIR
LLAMA = ("llama_alone", "llama_lookup", "llama_draft")
WAYS = ("cascade_alone", "cascade_tiny", "cascade_suffix", "cascade_suffix_tiny", "cascade_auto")
# who takes turns; more than one engine of others beside ours does not fit the memory of a small machine
CONTESTS: dict[str, tuple[Post, ...]] = {
    "modes": (Post("ours", WAYS, dtype=BFLOAT16),),
    "vllm": (
        Post("ours", ("cascade_alone", "cascade_auto"), dtype=BFLOAT16),
        *(Post("vllm_cpu", (mode,), environments.VLLM, BFLOAT16) for mode in ("vllm_alone", "vllm_draft")),
    ),
    "llama": (
        Post("ours", ("cascade_alone", "cascade_auto"), dtype=BFLOAT16),
        Post("llama_cpp_python", tuple(f"{mode}_bf16" for mode in LLAMA), environments.LLAMA, BFLOAT16),
        Post("llama_cpp_python", LLAMA, environments.LLAMA, AS_PUBLISHED),
    ),
}


def measure(
    name: str,
    prompts: Sequence[Prompt],
    tokens: int,
    temperatures: Sequence[float],
    seconds: float,
    done: Callable[[dict[str, Any]], object],
) -> None:
    """A contest, in which no round begins after ``seconds``; ``done`` hears of all cells when a temperature is measured."""
    begin = time.monotonic()
    models = Models(path(LARGE), path(SMALL))
    tokenizer = Tokenizer.from_pretrained(models.full)
    ids = [chat_ids(tokenizer, prompt.text) for prompt in prompts]
    cells: dict[str, Any] = {}
    same: list[bool] = []
    crew = contest.Crew()

    def keep(temperature: str, turns: report.Turns) -> None:
        rounds = max(map(len, turns.values()), default=0)
        cells[temperature] = {mode: {"rounds": rounds, **cell} for mode, cell in report.cells(turns, compared=False).items()}
        same.append(report.lossless(turns))
        console.print(report.table(f"{name}, {temperature}", cells[temperature]))
        done({"same_text": all(same), "versions": crew.versions, "missing": crew.missing, "cells": dict(cells)})

    with ExitStack() as stack:
        for post in CONTESTS[name]:
            own = models if post.engine != "llama_cpp_python" else Models(str(file_of(LARGE)), str(file_of(SMALL)))
            crew.hire((post,), own, sorted(tokenizer.end_ids), stack)
        left = begin + seconds - time.monotonic()
        contest.measure(crew, contest.Plan(ids, tokens, temperatures, left), keep)
