"""Long prompts: how often 0.5B agrees with 1.5B there, and how fast answers are, with the prompt's prefix cached and not.

A prompt is a chat that begins with other problems of HumanEval, as many as fit, and ends with the one to solve.
"""

import time
from collections.abc import Sequence
from itertools import count
from typing import Any

from benchmarks.document import console
from benchmarks.turns import rotated
from cascade.agreement import Written, agreement, along, chat_ids
from cascade.answer import Completion
from cascade.engine.tokenizer import Tokenizer
from cascade.local import Cascade
from cascade.params import Handling, SamplingParams, Speculation
from cascade.prompts import Prompt

LENGTHS = (1024, 4096, 16384)  # tokens of a prompt, at most
WAYS = {"alone": Speculation("off"), "tiny": Speculation(tiers=("tiny",)), "auto": Speculation()}


def prompts(tokenizer: Tokenizer, problems: Sequence[Prompt], length: int, number: int) -> list[Prompt]:
    """So many that share their beginning and end with different problems."""
    last_ones, before = problems[:number], problems[number:]
    last = max(len(chat_ids(tokenizer, problem.text)) for problem in last_ones)
    beginning = ""
    for problem in before:
        longer = f"{beginning}{problem.text}\n"
        if last + len(tokenizer.encode_part(longer)) > length:
            break
        beginning = longer
    return [Prompt(beginning + problem.text, f"{length} tokens") for problem in last_ones]


def measure(models: Sequence[str], problems: Sequence[Prompt], number: int, tokens: int, dtype: str) -> dict[str, Any]:
    """By length, below ``cells``: greedy answers."""
    tokenizer, params = Tokenizer.from_pretrained(models[-1]), SamplingParams(max_tokens=tokens, temperature=0, seed=0)
    cells: dict[str, Any] = {}
    texts: dict[int, list[Written]] = {}
    same = True
    with Cascade.from_pretrained(models, dtype=dtype, drafter=("suffix",)) as cascade:
        for length in LENGTHS:
            cells[str(length)], answers = _speeds(cascade, prompts(tokenizer, problems, length, number), params)
            texts[length] = [(prompt, next(iter(outputs))) for prompt, outputs in answers.items()]
            same = same and all(len(outputs) == 1 for outputs in answers.values())
            console.print(length, cells[str(length)])
    for length, written in texts.items():
        recording = along(models[:-1], written, [params] * number, [str(length)] * number, dtype)
        cells[str(length)]["agreement"] = round(agreement(recording, 0).own, 3)
    return {"same_text": same, "cells": cells}


def _speeds(
    cascade: Cascade, prompts: Sequence[Prompt], params: SamplingParams
) -> tuple[dict[str, Any], dict[tuple[int, ...], set[tuple[int, ...]]]]:
    """Of each way: tokens per second after the first one, and seconds until the first one; and the answers to each prompt.

    The first prompt of a way is new to it, and the others share its beginning.
    """
    took: dict[str, list[tuple[float, float, int]]] = {way: [] for way in WAYS}
    answers: dict[tuple[int, ...], set[tuple[int, ...]]] = {}
    salts = {way: f"{way} {next(_SALTS)}" for way in WAYS}
    for number, prompt in enumerate(prompts):
        ids = tuple(chat_ids(cascade.tokenizer, prompt.text))
        for way in rotated(tuple(WAYS), number):
            begin = time.perf_counter()
            completion = cascade.generate(ids, params, WAYS[way], Handling(cache_salt=salts[way]))
            seconds = time.perf_counter() - begin
            assert isinstance(completion, Completion)
            first = completion.stats.first_token_s or seconds
            took[way].append((first, seconds - first, completion.stats.completion_tokens - 1))
            answers.setdefault(ids, set()).add(completion.token_ids)
    return {way: _cell(of_way) for way, of_way in took.items()}, answers


_SALTS = count()


def _cell(took: Sequence[tuple[float, float, int]]) -> dict[str, float | None]:
    (new, *_), cached = took[0], [first for first, _, _ in took[1:]]
    rest, tokens = (sum(answer[place] for answer in took) for place in (1, 2))
    return {
        "first_token_s": round(new, 2),
        "first_token_s_known_prefix": round(sum(cached) / len(cached), 2) if cached else None,
        "tokens_per_second": round(tokens / rest, 1) if rest else 0.0,
    }
