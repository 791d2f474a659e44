"""How many positions of keys and values a device has memory for."""

import torch

from cascade.devices import GIB, host_memory
from cascade.errors import ModelError
from cascade.pool import BLOCK

HOST_SHARE = 1 / 8  # of the memory a host has left, for each model: there are up to five, and other programs


def cache_tokens(device: torch.device, bytes_per_token: int, gpu_memory_utilization: float) -> int:
    """Positions that fit beside the weights, which are loaded; raises `ModelError` if that is not even a block.

    On a GPU all memory may be used but the share ``1 - gpu_memory_utilization``, which is left to passes and to others.
    """
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        usable = free - round((1 - gpu_memory_utilization) * total)
        sum_ = f"{free / GIB:.2f} GiB free of {total / GIB:.2f} at gpu_memory_utilization {gpu_memory_utilization:g}"
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
