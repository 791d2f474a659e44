"""How much memory devices have."""

import contextlib
import os
from pathlib import Path

import torch

GIB = 2**30
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
    """The GPU if there is one."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def free_bytes(device: torch.device) -> int:
    """Memory that can still be taken on ``device``, what PyTorch keeps there for reuse included."""
    if device.type == "cuda":
        kept = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return int(torch.cuda.mem_get_info(device)[0]) + kept
    return host_memory()


def add_exactly(device: torch.device) -> None:
    """Have products in 16 bits on ``device`` added up in 32, for this process.

    PyTorch lets cuBLAS join the parts of a product in 16 bits, and how many parts it makes depends on the number of rows: a
    pass of eight tokens would differ the more from eight passes of one.
    """
    if device.type == "cuda":
        torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
        torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False


def host_memory() -> int:
    """Memory that this process may still take, by the system and its control group."""
    limits = [_available()]
    group = Path("/sys/fs/cgroup")
    with contextlib.suppress(OSError, ValueError):  # there is no such group, or no limit
        limits.append(int((group / "memory.max").read_text()) - int((group / "memory.current").read_text()))
    return max(0, min(limits))


def _available() -> int:
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith("MemAvailable")) * 1024
    except (OSError, StopIteration):  # not Linux
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2
