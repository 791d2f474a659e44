"""What devices are like: how much memory they have, and what processors do with 16 bits."""

import contextlib
import platform
from pathlib import Path

import torch

from cascade.engine.memory import host_memory

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


# Parameters of a model whose passes are bound by what lies between products, not by reading weights.
SMALL = 400_000_000


def default_device() -> str:
    """The GPU if there is one."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def free_bytes(device: torch.device) -> int:
    """Memory that can still be taken on ``device``, what PyTorch keeps there for reuse included."""
    if device.type == "cuda":
        kept = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return int(torch.cuda.mem_get_info(device)[0]) + kept
    return host_memory()


def has_bfloat16() -> bool:
    """Whether this processor has instructions for products in bfloat16, and oneDNN takes them.

    oneDNN also takes AVX-512 without such instructions, and is half as fast there as in float32.
    """
    if not (torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported()):
        return False
    emulates = torch.backends.cpu.get_cpu_capability() == "AVX512"
    return not emulates or torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()


def wider_dtype(saved: torch.dtype, device: torch.device, parameters: int) -> torch.dtype | None:
    """The dtype in which weights of ``saved`` are to be held on ``device`` if that is another one.

    float32 on processors that multiply 16 bits slowly: it holds the same numbers in twice the memory, and passes of several
    tokens, which drafts are made for, take half the time. So it is for small models on processors with AVX-512 and bfloat16 but
    without matrix tiles, where what lies between products is slow in bfloat16. Told from the processor and not timed, so that
    all replicas on machines of one kind write the same text.
    """
    if device.type != "cpu" or saved is torch.float32:
        return None
    if saved is torch.bfloat16 and has_bfloat16():
        plain = torch.backends.cpu.get_cpu_capability() == "AVX512" and not torch.cpu._is_amx_tile_supported()
        if not (plain and parameters < SMALL):
            return None
    return torch.float32


def processor() -> str:
    """Name and instructions of this machine's processor, such as ``AMD EPYC 7763, AVX2``."""
    name = platform.processor() or platform.machine()
    with contextlib.suppress(OSError, StopIteration):  # not Linux, or a processor without a name
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        name = next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    instructions = torch.backends.cpu.get_cpu_capability() + (" with bfloat16" if has_bfloat16() else "")
    return f"{name}, {instructions}"


def add_exactly(device: torch.device) -> None:
    """Have products in 16 bits on ``device`` added up in 32, for this process.

    PyTorch lets cuBLAS join the parts of a product in 16 bits, and how many parts it makes depends on the number of rows: a
    pass of eight tokens would differ the more from eight passes of one.
    """
    if device.type == "cuda":
        torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
        torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False
