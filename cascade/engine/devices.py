"""Devices: their memory, how many positions fit into it, and which dtypes they are fast with."""

import contextlib
import platform
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from cascade.cpu.processor import has_bfloat16, instructions
from cascade.engine.memory import GIB, host_memory
from cascade.errors import ModelError
from cascade.scorer import BLOCK

HOST_SHARE = 1 / 8  # each model's share of the memory that a host has left: there are up to five, and other programs
# the share of a GPU's memory that weights and caches take; as in `cascade.settings.config`, which does without torch
UTILIZATION = 0.9
PASSES = 0.1  # the share of a GPU's memory left to passes, unless more of it is asked for

# GiB of one accelerator by Ray's names for them, as far as these say it
ACCELERATORS = {
    "T4": 15,
    "V100": 16,
    "V100-32G": 32,
    "L4": 22,
    "L40S": 44,
    "A10G": 22,
    "A100": 40,
    "A100-40G": 40,
    "A100-80G": 80,
    "H100": 80,
    "H200": 140,
    "B200": 178,
}


def default_device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


def free_bytes(device: torch.device) -> int:
    """Memory that can still be taken on ``device``, what PyTorch keeps there for reuse included."""
    if device.type == "cuda":
        kept = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return int(torch.cuda.mem_get_info(device)[0]) + kept
    return host_memory()


def sent(values: Sequence[Any], device: torch.device, dtype: torch.dtype = torch.int64) -> Tensor:
    """A tensor of ``values`` on ``device``. This does not wait for a GPU, which copies from pinned memory by itself."""
    return torch.tensor(values, dtype=dtype, pin_memory=device.type == "cuda").to(device, non_blocking=True)


def cache_tokens(device: torch.device, bytes_per_token: int, gpu_memory_utilization: float) -> int:
    """Positions that fit beside the weights, which are loaded; raises `ModelError` if that is not even a block.

    On a GPU this process may hold the share ``gpu_memory_utilization`` of the memory, as far as other processes leave it free;
    the rest is for passes. For several models pass the sum of their ``bytes_per_token``.
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


def product_dtype(device: torch.device) -> torch.dtype:
    """bfloat16 where ``device`` has instructions for it, else float32: with AVX2 alone 16 bits are seven times slower."""
    return torch.bfloat16 if device.type != "cpu" or has_bfloat16() else torch.float32


def held_dtype(saved: torch.dtype, device: torch.device) -> torch.dtype:
    """The dtype in which weights saved as ``saved`` are held on ``device``, unless another one is asked for.

    float32 for float16 on a CPU, which holds the same numbers and multiplies them several times faster.
    """
    return torch.float32 if saved is torch.float16 and device.type == "cpu" else saved


def processor() -> str:
    """Name and instructions of this machine's processor, such as ``AMD EPYC 7763, AVX2``."""
    name = platform.processor() or platform.machine()
    with contextlib.suppress(OSError, StopIteration):  # not Linux, or a processor without a name
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        name = next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return f"{name}, {instructions()}{' with bfloat16' if has_bfloat16() else ''}"


def add_exactly(device: torch.device) -> None:
    """Let this process add up 16-bit products on ``device`` in 32 bits.

    By default cuBLAS may add parts of a product in 16 bits, and the number of parts depends on the number of rows, so that a
    pass of eight tokens differs more from eight passes of one.
    """
    if device.type == "cuda":
        torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
        torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False
