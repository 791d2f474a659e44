"""The kernels that choose own tokens on a GPU: their laws in Triton's interpreter, and that they compile for GPUs."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")
ROOT = Path(__file__).parents[2]
COMPILE = """
import sys
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile
from cascade.engine.sampling.kernel import _of_blocks, _of_rows

target = GPUTarget("cuda", int(sys.argv[1]), 32)
numbers = dict.fromkeys(("stride", "rows", "size", "kept", "count", "number"), "i32")
for dtype, short in (("float32", "fp32"), ("bfloat16", "bf16"), ("float16", "fp16")):
    pointers = {"logits": f"*{short}", "highest": f"*{short}", "given": "*i64", "best": "*i64", "out": "*i64"}
    for kernel, constants in ((_of_blocks, {"BLOCK": 1024}), (_of_rows, {"WIDTH": 512})):
        known = numbers | pointers | dict.fromkeys(constants, "constexpr")
        signature = {name: known[name] for name in kernel.arg_names}
        assert compile(ASTSource(kernel, signature, constants), target).asm["cubin"]
    print(dtype)
"""
LAWS = Path(__file__).with_name("kernel_laws.py")


def test_their_laws_hold() -> None:
    """Guards texts on GPUs against noise, ties, filters or runner-ups that are not those of PyTorch's operations."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(LAWS)]
    run = subprocess.run(
        command, cwd=ROOT, env={**os.environ, "TRITON_INTERPRET": "1"}, capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stdout


@pytest.mark.parametrize("architecture", [80, 90, 100])
def test_they_compile_for_gpus(architecture: int) -> None:
    """Guards the first pass on a GPU against what only the compiler refuses: the interpreter takes more."""
    run = subprocess.run(
        [sys.executable, "-c", COMPILE, str(architecture)], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stderr
    assert run.stdout.split() == ["float32", "bfloat16", "float16"]
