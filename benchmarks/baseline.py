"""Transformers on the same weights, in a process of its own: in one process OpenMP would count the threads of both.

With more of them than cores all sleep whenever they wait for each other, and either side would pay for the other.
"""

import time
from collections.abc import Sequence

import torch
from transformers import AutoModelForCausalLM, GenerationConfig, PreTrainedModel

from benchmarks.document import quiet

POSITIONS = 2048  # of context, enough for every request
_held: list[PreTrainedModel] = []


def load(source: str, dtype: str) -> PreTrainedModel:
    network = AutoModelForCausalLM.from_pretrained(source, dtype=getattr(torch, dtype)).eval()
    network.config.max_position_embeddings = POSITIONS
    return network


def hold(source: str, dtype: str) -> None:
    """Load the network that the other functions run, and run it once."""
    quiet()
    _held[:] = [load(source, dtype)]
    generate([[50, 51, 52]], 4)


def generate(prompts: Sequence[Sequence[int]], n: int) -> tuple[float, list[list[int]]]:
    """Seconds of greedy ``generate`` of exactly ``n`` tokens after prompts padded to the longest, and these tokens."""
    longest = max(map(len, prompts))
    ids = torch.tensor([[0] * (longest - len(prompt)) + list(prompt) for prompt in prompts])
    mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    limits = {"max_new_tokens": n, "min_new_tokens": n}
    begin = time.perf_counter()
    out: torch.Tensor = _held[0].generate(ids, attention_mask=mask, do_sample=False, pad_token_id=0, **limits)
    return time.perf_counter() - begin, out[:, longest:].tolist()


def generate_batch(requests: Sequence[tuple[Sequence[int], int]]) -> float:
    """Seconds of prompts and numbers of tokens by the manager after ``generate_batch``, started before the clock is."""
    network = _held[0]
    config = GenerationConfig(do_sample=False, eos_token_id=-1, max_new_tokens=64)
    before = network.config._attn_implementation
    try:
        with network.continuous_batching_context_manager(generation_config=config, timeout=5) as manager:
            manager.add_request([50, 51, 52], max_new_tokens=2)
            while manager.get_result(timeout=1) is None:
                pass
            begin = time.perf_counter()
            for prompt, answer in requests:
                manager.add_request(list(prompt), max_new_tokens=answer)
            left = len(requests)
            while left:
                result = manager.get_result(timeout=1)
                left -= result is not None and result.is_finished()
                if not manager.is_running():
                    raise RuntimeError("Transformers' continuous batching stopped")
            return time.perf_counter() - begin
    finally:
        network.set_attn_implementation(before)
