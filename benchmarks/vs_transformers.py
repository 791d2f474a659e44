"""One tier against Transformers, on the same weights in the same process."""

import asyncio
import time
from collections.abc import Callable
from typing import Any

import torch
from transformers import ContinuousBatchingConfig, GenerationConfig, PreTrainedModel

from benchmarks.scale import Scale, params, seconds, tokens
from cascade.local import Cascade

MEMORY_SHARE = 0.3  # of what is free, for Transformers' cache: far more than the requests fill
PATIENCE_S = 120.0  # for a batch


def single(network: PreTrainedModel, cascade: Cascade, scale: Scale) -> dict[str, Any]:
    """Tokens per second of one request, its prompt of 16 tokens included; a way that fails leaves the others."""
    device, prompt, n = network.device, tokens(16, 0), scale.tokens
    ways: dict[str, Callable[[], object]] = {
        "tier": lambda: cascade.generate(prompt, params(n)),
        "generate": lambda: generate(network, prompt, n),
        "generate_static": lambda: generate(network, prompt, n, cache_implementation="static"),
    }
    problems = {name: problem for name, way in ways.items() if (problem := tried(way))}  # compiles, and fills caches
    best = dict.fromkeys((name for name in ways if name not in problems), float("inf"))
    for _ in range(scale.repeats):
        cascade.tiers[0].kv_admission.block_manager.clear()
        for name in best:
            best[name] = min(best[name], seconds(ways[name], device))
    found: dict[str, Any] = {f"{name}_tokens_per_s": round(n / s, 1) for name, s in best.items()}
    if "tier" in best:
        found |= {f"decode_vs_{name}": round(s / best["tier"], 3) for name, s in best.items() if name != "tier"}
    return found | {"problems": [f"{name}: {problem}" for name, problem in problems.items()]}


def tried(work: Callable[[], object]) -> str | None:
    """What is wrong with it, if it raises."""
    try:
        work()
    except Exception as error:  # of any library
        return f"{type(error).__name__}: {error}"
    return None


def generate(network: PreTrainedModel, prompt: list[int], n: int, **options: Any) -> list[int]:
    """Transformers' greedy ``generate`` of exactly ``n`` tokens."""
    ids = torch.tensor([prompt], device=network.device)
    wanted = {"max_new_tokens": n, "min_new_tokens": n, "do_sample": False}
    out: torch.Tensor = network.generate(ids, attention_mask=torch.ones_like(ids), **wanted, **options)
    return out[0, len(prompt) :].tolist()


def batching(network: PreTrainedModel, cascade: Cascade, scale: Scale) -> dict[str, Any]:
    """Tokens per second of ragged requests at once."""
    batch = scale.batch()

    async def ours() -> None:
        work = (cascade.agenerate(tokens(prompt, seed), params(answer)) for seed, (prompt, answer) in enumerate(batch))
        await asyncio.gather(*work)

    asyncio.run(ours())  # as the others, not its first time
    wanted, tier, continuous = sum(answer for _, answer in batch), [], []
    for _ in range(scale.repeats):
        cascade.tiers[0].kv_admission.block_manager.clear()
        tier.append(seconds(lambda: asyncio.run(ours()), network.device))
        continuous.append(generate_batch(network, batch, scale.blocks))
    return {
        "tier_batch_tokens_per_s": round(wanted / min(tier), 1),
        "generate_batch_tokens_per_s": round(wanted / min(continuous), 1),
        "batch_vs_generate_batch": round(min(continuous) / min(tier), 3),
    }


def generate_batch(network: PreTrainedModel, batch: list[tuple[int, int]], blocks: int | None) -> float:
    """Seconds of a batch by the manager behind Transformers' ``generate_batch``, started and warm before the clock is."""
    config = GenerationConfig(do_sample=False, eos_token_id=-1, max_new_tokens=max(answer for _, answer in batch))
    memory = ContinuousBatchingConfig(num_blocks=blocks, max_memory_percent=MEMORY_SHARE if blocks is None else None)
    before = network.config._attn_implementation
    try:
        with network.continuous_batching_context_manager(config, timeout=5, continuous_batching_config=memory) as manager:
            for warm_up in (True, False):
                begin = time.perf_counter()
                for seed, (prompt, answer) in enumerate(batch):  # other texts the second time: what is known is not scored
                    manager.add_request(tokens(prompt, seed + warm_up * len(batch)), max_new_tokens=answer)
                _wait(manager, len(batch))
            return time.perf_counter() - begin
    finally:
        network.set_attn_implementation(before)


def _wait(manager: Any, left: int) -> None:
    end = time.monotonic() + PATIENCE_S
    while left:
        result = manager.get_result(timeout=1)
        left -= result is not None and result.is_finished()
        if left and (not manager.is_running() or time.monotonic() > end):
            raise RuntimeError("Transformers' continuous batching stopped")
