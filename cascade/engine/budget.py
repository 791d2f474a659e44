"""How many positions of keys and values a device has memory for."""

import torch

from cascade.engine.devices import free_bytes
from cascade.engine.memory import GIB, host_memory
from cascade.errors import ModelError
from cascade.scorer import BLOCK

HOST_SHARE = 1 / 8  # of the memory a host has left, for each model: there are up to five, and other programs
UTILIZATION = 0.9  # of a GPU's memory, by weights and caches; as in `cascade.settings.config`, which does without torch
PASSES = 0.1  # of a GPU's memory, left to passes unless more of it is asked for


def cache_tokens(device: torch.device, bytes_per_token: int, gpu_memory_utilization: float) -> int:
    """Positions that fit beside the weights, which are loaded; raises `ModelError` if that is not even a block.

    On a GPU all that this process holds may take the share ``gpu_memory_utilization`` of the memory, as far as others leave it
    free; what is beyond is left to passes. For several models pass the sum of their ``bytes_per_token``.
    """
    if device.type == "cuda":
        free, total, own = free_bytes(device), torch.cuda.mem_get_info(device)[1], torch.cuda.memory_allocated(device)
        spare = round(min(1 - gpu_memory_utilization, PASSES) * total)
        usable = min(round(gpu_memory_utilization * total) - own, free - spare)
        sum_ = (
            f"{free / GIB:.2f} GiB free of {total / GIB:.2f}, {own / GIB:.2f} its own, "
            f"at gpu_memory_utilization {gpu_memory_utilization:g}"
        )
    else:
        free = host_memory()
        usable = round(HOST_SHARE * free)
        sum_ = f"an eighth of the {free / GIB:.2f} GiB free"
    tokens = max(0, usable) // bytes_per_token
    if tokens < BLOCK:
        raise ModelError(
            f"{device} has memory for {tokens} tokens of {bytes_per_token} bytes ({sum_}): "
            "take a larger device, or set cache_tokens"
        )
    return tokens
