"""Features of this processor that PyTorch may use. All code that depends on them uses this module.

``ATEN_CPU_CAPABILITY=avx2`` makes PyTorch, and thereby this module, do without AVX-512; oneDNN does so with
``ONEDNN_MAX_CPU_ISA=AVX2``. Together they imitate a processor with only AVX2.
"""

from functools import lru_cache

import torch


def instructions() -> str:
    """The instructions that PyTorch uses: ``AVX512``, ``AVX2``, or ``DEFAULT`` for others."""
    return torch.backends.cpu.get_cpu_capability()


def has_avx512() -> bool:
    return instructions() == "AVX512"


def hides_avx512() -> bool:
    """Whether the processor has AVX-512, but PyTorch is set to do without it."""
    import llvmlite.binding as llvm  # needed only to compile

    return bool(llvm.get_host_cpu_features().get("avx512f")) and not has_avx512()


def has_matrix_tiles() -> bool:
    """Whether the processor has AMX for bfloat16, and the system lets this process use it."""
    return has_avx512() and bool(torch.cpu._is_amx_tile_supported()) and _init_amx()


@lru_cache
def _init_amx() -> bool:
    return bool(torch.cpu._init_amx())


def has_pairs() -> bool:
    """Whether the processor multiplies pairs of bfloat16, by AVX-512 BF16 or matrix tiles."""
    return has_avx512() and (bool(torch.cpu._is_avx512_bf16_supported()) or has_matrix_tiles())


def has_bfloat16() -> bool:
    """Whether the processor has instructions for products in bfloat16, and oneDNN uses them.

    oneDNN also multiplies bfloat16 by plain AVX-512, but half as fast as float32.
    """
    if not (torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported()):
        return False
    return not has_avx512() or has_pairs()
