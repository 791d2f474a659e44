"""What the processor is asked, and an older one that is imitated."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

ASKS = re.compile(r"torch\.backends\.cpu|torch\.cpu\.|get_host_cpu|_is_mkldnn_|cpu_features")
IMITATED = {"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2"}
SAID = """
from cascade.cpu import jit
from cascade.cpu.processor import *
from cascade.engine.devices import processor
import numba
print(instructions(), has_matrix_tiles(), has_pairs(), has_bfloat16(), "with bfloat16" in processor(), numba.config.CPU_NAME)
"""


def test_the_processor_is_asked_in_one_place() -> None:
    """Guards the imitation of an older processor: what asks by itself sees the newer one."""
    asking = {
        path.relative_to(ROOT).as_posix()
        for folder in ("cascade", "deployments", "benchmarks")
        for path in (ROOT / folder).rglob("*.py")
        if ASKS.search(path.read_text(encoding="utf-8"))
    }
    assert asking == {"cascade/cpu/processor.py"}


def test_a_processor_with_avx2_alone_is_imitated() -> None:
    """Guards `make test-avx2` against instructions that such a processor lacks."""
    environment = os.environ | IMITATED
    done = subprocess.run([sys.executable, "-c", SAID], env=environment, capture_output=True, text=True, check=True)
    instructions, *others, target = done.stdout.split()
    if instructions not in ("AVX2", "AVX512"):
        pytest.skip(f"PyTorch uses {instructions} here")
    assert instructions == "AVX2"
    assert others == ["False"] * 4
    assert "avx512" not in target
