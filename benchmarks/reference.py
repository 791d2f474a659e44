"""What the served cascade is compared with, and what the simulator needs: run in a process of its own, on its own core.

Every function loads what it needs once; the process is a worker of `concurrent.futures.ProcessPoolExecutor`.
"""

import os
import statistics
import time
from functools import lru_cache
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from cascade.engine.model import Model
from cascade.params import SamplingParams
from cascade.scorer import Row, Store

GREEDY = SamplingParams(temperature=0, seed=0)
PASS_SIZES = (1, 2, 3, 4, 6, 8, 12, 16)
PASS_REPEATS = 24
CONTEXT = 150  # positions before a pass
NUM_BUSY = 4  # tokens of a pass that is only there to be in the way
STOP = "stop"


def pin(cores: list[int]) -> None:
    """Bind this process to ``cores``, one thread a core."""
    os.sched_setaffinity(0, cores)
    torch.set_num_threads(len(cores))


@lru_cache
def network(source: str, dtype: str) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(source, dtype=getattr(torch, dtype)).eval()


@lru_cache
def tokenizer(source: str) -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(source)


def generate(source: str, dtype: str, prompt: str, max_tokens: int, assistant: tuple[str, str] | None) -> tuple[int, float]:
    """Transformers' own greedy ``generate``, assisted by the model ``assistant`` (source, dtype) if given: tokens, seconds."""
    ids = tokenizer(source)(prompt, return_tensors="pt")
    options = {"assistant_model": network(*assistant)} if assistant else {}
    model = network(source, dtype)
    begin = time.perf_counter()
    out = model.generate(**ids, max_new_tokens=max_tokens, do_sample=False, pad_token_id=0, **options)
    return out.shape[1] - ids["input_ids"].shape[1], time.perf_counter() - begin


@lru_cache
def scorer(source: str, dtype: str) -> Model:
    return Model.from_pretrained(source, dtype=dtype)


@lru_cache
def written(source: str, dtype: str) -> Store:
    """Keys and values of a text of `CONTEXT` tokens."""
    cache: Store = scorer(source, dtype).new_cache()
    scorer(source, dtype).run([Row(cache, 0, [7] * CONTEXT, 1, GREEDY)])
    return cache


def one_pass(source: str, dtype: str, num_tokens: int) -> float:
    """A pass after `CONTEXT` positions; seconds of the processor."""
    row = Row(written(source, dtype), CONTEXT, [7] * num_tokens, num_tokens, GREEDY)
    begin = time.thread_time()
    scorer(source, dtype).run([row])
    return time.thread_time() - begin


def verify(source: str, dtype: str) -> None:
    """One pass of a verifier of many guesses."""
    one_pass(source, dtype, PASS_SIZES[-1])


def keep_busy(source: str, dtype: str, folder: Path) -> None:
    """Passes of a verifier, until a file named `STOP` is in ``folder``."""
    while not (folder / STOP).exists():
        one_pass(source, dtype, NUM_BUSY)


def pass_costs(source: str, dtype: str) -> list[tuple[int, float]]:
    """Median seconds of the processor for a pass over 1, 2, ... tokens."""
    one_pass(source, dtype, 1)
    costs = {size: [one_pass(source, dtype, size) for _ in range(PASS_REPEATS)] for size in PASS_SIZES}
    return [(size, statistics.median(seconds)) for size, seconds in costs.items()]


def own_tokens(source: str, dtype: str, prompt: str, text: tuple[int, ...]) -> list[int]:
    """What a tier says at each position of a finished text: ``[len(text)]``."""
    model = scorer(source, dtype)
    ids = tokenizer(source)(prompt)["input_ids"]
    row = Row(model.new_cache(), 0, [*ids, *text[:-1]], len(text), GREEDY)
    return list(model.run([row])[0].own)
