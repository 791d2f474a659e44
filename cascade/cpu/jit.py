"""Tools for kernels: Numba's compiler, access to numbers at addresses, and the threads of PyTorch's OpenMP.

A kernel takes one address, that of its arguments as 64-bit integers (`arguments`), as OpenMP hands one pointer to its threads.
Kernels are compiled on import, for the instructions that PyTorch uses, and cached on disk by Numba.
"""

import ctypes
import hashlib
import struct
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import llvmlite.binding as llvm
import numba
import torch
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from cascade.cpu.processor import hides_avx512


@dataclass(frozen=True, slots=True)
class Worker:
    """A compiled kernel, which does the calling thread's part of the work."""

    call: Callable[[bytes], None]  # releases the GIL
    brief: Callable[[bytes], None]  # holds the GIL
    address: int


class Step(NamedTuple):
    """A worker and its arguments, for `run_step` or a `cascade.cpu.program.Program`."""

    worker: Worker
    numbers: tuple[int, ...]


F32, I8, I16, I32, I64 = ir.FloatType(), ir.IntType(8), ir.IntType(16), ir.IntType(32), ir.IntType(64)
_OPTIONS: dict[str, Any] = {"error_model": "numpy", "fastmath": {"contract", "nsz", "arcp"}}  # no checks for zero; fused sums
BRIEF = 2**15  # elements that take a few microseconds
WITHOUT_AVX512 = "haswell"  # LLVM's name of the first processors with AVX2 and fused multiply-add


# compile for no more than PyTorch uses
if hides_avx512():
    numba.config.CPU_NAME, numba.config.CPU_FEATURES = WITHOUT_AVX512, ""


@lru_cache
def _openmp() -> ctypes.CDLL | None:
    """The OpenMP library of PyTorch, if it is GNU's or has its interface."""
    names: list[str | None] = [None]
    if sys.platform == "linux":
        lines = Path("/proc/self/maps").read_text().splitlines()
        names += sorted({line.split()[-1] for line in lines if "libgomp" in line or "libiomp5" in line or "libomp" in line})
    for name in names:
        try:
            library = ctypes.CDLL(name)
            if all(hasattr(library, symbol) for symbol in ("GOMP_parallel", *_ASKED)):
                return library
        except (OSError, TypeError):  # OpenMP or these functions are missing
            continue
    return None


_ASKED = ("omp_get_thread_num", "omp_get_num_threads")
_alone = [ctypes.CFUNCTYPE(ctypes.c_int)(lambda: 0), ctypes.CFUNCTYPE(ctypes.c_int)(lambda: 1)]  # without OpenMP


for _name, _function in zip(_ASKED, _alone, strict=True):  # so that the compiler finds OpenMP
    _found = _function if _openmp() is None else getattr(_openmp(), _name)
    llvm.add_symbol(_name, ctypes.cast(_found, ctypes.c_void_p).value)
thread_num = types.ExternalFunction(_ASKED[0], types.int32())
num_threads = types.ExternalFunction(_ASKED[1], types.int32())


@lru_cache
def _sources() -> str:
    """A hash of the sources of all kernels."""
    texts = (path.read_bytes() for path in sorted(Path(__file__).parent.glob("*.py")))
    return hashlib.sha256(b"".join(texts)).hexdigest()[:16]


def kernel(function: Callable[[int], None]) -> Worker:
    """Compile a worker or load it from the cache. Its name has `_sources`, since Numba checks only its own file for changes."""
    function.__qualname__ += f"_{_sources()}"
    signature = types.void(types.int64)
    try:
        address = numba.cfunc(signature, cache=True, **_OPTIONS)(function).address
    except RuntimeError:  # there is no writable folder
        address = numba.cfunc(signature, **_OPTIONS)(function).address
    letting_go, holding = (make(None, ctypes.c_char_p) for make in (ctypes.CFUNCTYPE, ctypes.PYFUNCTYPE))
    return Worker(letting_go(address), holding(address), address)


def inlined(function: Callable[..., Any]) -> Any:
    """Compile a function that workers call."""
    return numba.njit(**_OPTIONS)(function)


def swept(function: Callable[..., Any]) -> Any:
    """Compile a sum over one row, in the order that suits the processor.

    Only for sums: element-wise results could have other bits where a short row is not vectorised.
    """
    return numba.njit(**{**_OPTIONS, "fastmath": {*_OPTIONS["fastmath"], "reassoc"}})(function)


def arguments(*numbers: int) -> bytes:
    """Pack integers for a worker."""
    return struct.pack(f"{len(numbers)}q", *numbers)


def bits(number: float) -> int:
    """A float32 as an argument; `real` is the inverse."""
    return int(struct.unpack("<i", struct.pack("<f", number))[0])


def run(worker: Worker, given: bytes, work: int) -> None:
    """Run a worker over about ``work`` elements with the threads that PyTorch may use here.

    Brief work keeps the GIL and runs in one thread: releasing the GIL and taking it back would cost more.
    """
    count, library = torch.get_num_threads(), _openmp()
    if work < BRIEF:
        worker.brief(given)
    elif count == 1 or library is None:
        worker.call(given)
    else:
        library.GOMP_parallel(ctypes.c_void_p(worker.address), given, count, 0)


def run_step(step: Step, work: int) -> None:
    run(step.worker, arguments(*step.numbers), work)


def _unary(result: types.Type, given: types.Type, build: Callable[[Any, Any], Any]) -> Any:
    """A function of one number, with LLVM code from ``build``."""

    @intrinsic
    def function(_: Any, number: Any) -> Any:
        return result(given), lambda context, b, signature, operands: build(b, operands[0])

    return function


def _pointer(kind: types.Type, to: ir.Type) -> Any:
    return _unary(types.CPointer(kind), types.int64, lambda b, address: b.inttoptr(address, to.as_pointer()))


def round_bits(b: Any, number: Any, words: ir.Type = I32, short: ir.Type = I16, lanes: int | None = None) -> Any:
    """The bits of a float32, or of a vector of ``lanes`` of them, rounded to bfloat16."""
    half, one, least = (ir.Constant(words, value if lanes is None else [value] * lanes) for value in (16, 1, 0x7FFF))
    word = b.bitcast(number, words)
    even = b.and_(b.lshr(word, half), one)
    return b.trunc(b.lshr(b.add(b.add(word, even), least), half), short)


def _power_of_two(b: Any, exponent: Any) -> Any:
    return b.bitcast(b.shl(b.add(b.trunc(exponent, I32), ir.Constant(I32, 127)), ir.Constant(I32, 23)), F32)


floats = _pointer(types.float32, F32)
"""A pointer to float32 at an address; it is indexed like an array."""
floats64 = _pointer(types.float64, ir.DoubleType())
"""A pointer to float64."""
halves = _pointer(types.int16, I16)
"""A pointer to numbers of 16 bits, such as bfloat16."""
integers = _pointer(types.int64, I64)
"""A pointer to int64."""
integers32 = _pointer(types.int32, I32)
"""A pointer to int32."""
real = _unary(types.float32, types.int64, lambda b, number: b.bitcast(b.trunc(number, I32), F32))
"""The float32 whose bits an argument has, see `bits`."""
bits_of = _unary(types.int32, types.float32, lambda b, number: b.bitcast(number, I32))
"""The bits of a float32, an int32."""
power_of_two = _unary(types.float32, types.int64, _power_of_two)
"""``2 ** exponent`` as a float32, for exponents from -126 to 127."""
rounded = _unary(types.int16, types.float32, round_bits)
"""A float32 as bfloat16, an int16: to the nearest, and of two to the even one."""


@numba.njit(**{**_OPTIONS, "fastmath": False})
def divided(dividend: float, divisor: float) -> Any:
    """The quotient, correctly rounded: the operator may multiply by a reciprocal, see `_OPTIONS`."""
    return dividend / divisor


@inlined
def integer(address: int, place: int) -> Any:
    """The 64-bit integer at a place after an address."""
    return integers(address)[place]


def function_of(b: Any, name: str, kind: ir.FunctionType) -> Any:
    """The LLVM function ``name`` in the module that ``b`` builds."""
    return cgutils.get_or_insert_function(b.module, kind, name)
