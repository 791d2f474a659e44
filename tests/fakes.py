"""Tensors that are on a GPU without one, and without numbers: PyTorch's fake ones."""

import ctypes
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

GUARD = """
#include <c10/core/impl/DeviceGuardImplInterface.h>
using namespace c10::impl;
extern "C" void set_guard(bool on) {
  registerDeviceGuard(c10::DeviceType::CUDA, on ? new NoOpDeviceGuardImpl<c10::DeviceType::CUDA>() : nullptr);
}
"""


@contextmanager
def guarded(folder: Path) -> Iterator[None]:
    """Let PyTorch's functions take tensors of CUDA, too, where it was built without; a CUDA build does by itself."""
    if torch.backends.cuda.is_built():
        yield
        return
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("a PyTorch without CUDA takes fake tensors of CUDA only with a few lines of C++, and there is no g++")
    installed = Path(torch.__file__).parent
    source, library = folder / "guard.cpp", folder / "guard.so"
    source.write_text(GUARD)
    places = [f"-I{installed / 'include'}", f"-L{installed / 'lib'}", f"-Wl,-rpath,{installed / 'lib'}"]
    subprocess.run([compiler, "-std=c++20", "-shared", "-fPIC", *places, source, "-lc10", "-o", library], check=True)
    guard = ctypes.CDLL(str(library))
    guard.set_guard(True)
    try:
        yield
    finally:
        guard.set_guard(False)


@contextmanager
def faked(patch: pytest.MonkeyPatch) -> Iterator[list[torch.Size]]:
    """All tensors made meanwhile are fake. Gives the shapes of what the host has read; single numbers it cannot read at all."""
    reads: list[torch.Size] = []

    def tolist(tensor: FakeTensor) -> object:
        assert tensor.device.type == "cuda"
        reads.append(tensor.shape)
        return np.zeros(tensor.shape, int).tolist()

    patch.setattr(FakeTensorMode, "may_turn_const", lambda mode, tensor: False)  # numbers of the host are not kept either
    patch.setattr(FakeTensor, "tolist", tolist)
    patch.setattr(FakeTensor, "numpy", lambda tensor: np.zeros(tensor.shape, str(tensor.dtype).removeprefix("torch.")))
    with FakeTensorMode():
        yield reads
