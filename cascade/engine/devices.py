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

HOST_SHARE = 1 / 8  # each model's share of a host's free memory, which up to five models and other programs share
# share of a GPU's memory for weights and caches; the same as in `cascade.settings.config`, which does not import PyTorch
UTILIZATION = 0.9
PASSES = 0.1  # share of a GPU's memory that is left for passes by default

# GiB of accelerators by Ray's names, as far as these determine the size
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
    """Free memory on ``device``, including what PyTorch keeps for reuse."""
    if device.type == "cuda":
        kept = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return int(torch.cuda.mem_get_info(device)[0]) + kept
    return host_memory()


def sent(values: Sequence[Any], device: torch.device, dtype: torch.dtype = torch.int64) -> Tensor:
    """A tensor of ``values`` on ``device``. Does not wait for a GPU, which copies from pinned memory asynchronously."""
    return torch.tensor(values, dtype=dtype, pin_memory=device.type == "cuda").to(device, non_blocking=True)


def cache_tokens(device: torch.device, bytes_per_token: int, gpu_memory_utilization: float) -> int:
    """Positions of keys and values that fit beside the loaded weights; raises `ModelError` if there is no room for a block.

    On a GPU this process may use the share ``gpu_memory_utilization`` of the memory, as far as it is free; the rest is for
    passes. For several models pass the sum of their ``bytes_per_token``.
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
    """bfloat16 if ``device`` has instructions for it, else float32: with only AVX2, bfloat16 is seven times slower."""
    return torch.bfloat16 if device.type != "cpu" or has_bfloat16() else torch.float32


def held_dtype(saved: torch.dtype, device: torch.device) -> torch.dtype:
    """The default dtype for weights that are saved as ``saved``, on ``device``.

    On a CPU it is float32 for float16: it holds the same numbers, and a CPU multiplies them several times faster.
    """
    return torch.float32 if saved is torch.float16 and device.type == "cpu" else saved


def processor() -> str:
    """Name and instructions of this machine's processor, such as ``AMD EPYC 7763, AVX2``."""
    name = platform.processor() or platform.machine()
    with contextlib.suppress(OSError, StopIteration):  # not Linux, or the processor has no name
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        name = next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return f"{name}, {instructions()}{' with bfloat16' if has_bfloat16() else ''}"


def add_exactly(device: torch.device) -> None:
    """Let this process accumulate 16-bit products on ``device`` in 32 bits.

    By default cuBLAS may sum partial products in 16 bits. Their number depends on the number of rows, so a pass of eight tokens
    would differ more from eight passes of one.
    """
    if device.type == "cuda":
        torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
        torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False
