"""Runs many kernels in one call from Python, since a call costs more than a kernel of a small pass.

All threads meet after each kernel, several hundred times a pass, in a spin barrier of our own: OpenMP's puts threads to sleep
at once where a process has more of them than cores, as a process with several models has, and waking one takes longer than most
kernels.
"""

import platform
from collections.abc import Collection, Sequence
from itertools import chain
from typing import Any

import numpy as np
import numpy.typing as npt
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from cascade.cpu.jit import I64, Step, Worker, function_of, inlined, integer, kernel, num_threads, run

SPINS = 4096  # checks of the others before a thread yields its core: some ten microseconds
HEADER = 2  # numbers before those of steps: arrivals at all barriers so far, and the number of steps
PAUSE = "llvm.x86.sse2.pause" if platform.machine() in ("x86_64", "AMD64") else ""

sched_yield = types.ExternalFunction("sched_yield", types.int32())


@intrinsic
def _call(_: Any, worker: Any, given: Any) -> Any:
    """Call the worker at one address with the arguments at another."""

    def build(context: Any, b: Any, signature: Any, operands: Any) -> Any:
        address, given = operands
        function = b.inttoptr(address, ir.FunctionType(ir.VoidType(), [I64]).as_pointer())
        b.call(function, [given])
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), build


@intrinsic
def _arrive(_: Any, counter: Any) -> Any:
    """Add 1 to the number at an address that all threads share."""

    def build(context: Any, b: Any, signature: Any, operands: Any) -> Any:
        b.atomic_rmw("add", b.inttoptr(operands[0], I64.as_pointer()), ir.Constant(I64, 1), "seq_cst")
        return context.get_dummy_value()

    return types.void(types.int64), build


@intrinsic
def _arrivals(_: Any, counter: Any) -> Any:
    """Load the number at an address that all threads share, with the processor's hint for a loop that waits."""

    def build(context: Any, b: Any, signature: Any, operands: Any) -> Any:
        if PAUSE:
            b.call(function_of(b, PAUSE, ir.FunctionType(ir.VoidType(), [])), [])
        return b.load_atomic(b.inttoptr(operands[0], I64.as_pointer()), "seq_cst", 8)

    return types.int64(types.int64), build


@inlined
def _meet(counter: int, arrivals: int) -> None:
    """Count this thread's arrival, and wait until there are ``arrivals``."""
    _arrive(counter)
    spins = 0
    while _arrivals(counter) < arrivals:
        spins += 1
        if spins > SPINS:
            sched_yield()


@kernel
def _run_all(given: int) -> None:
    threads = num_threads()
    for step in range(integer(given, 1)):
        _call(integer(given, HEADER + 2 * step), given + integer(given, HEADER + 1 + 2 * step))
        if threads > 1:
            _meet(given, threads * (step + 1))


class Program:
    """Steps that run one after another. It can run again after changes of some arguments."""

    def __init__(self, steps: Sequence[Step], work: int) -> None:
        """``work`` as in `cascade.cpu.jit.run`."""
        self._work = work
        self._workers = [step.worker for step in steps]
        self._begins = np.cumsum([HEADER + 2 * len(steps), *(len(step.numbers) for step in steps)])
        starts = ((step.worker.address, 8 * int(at)) for step, at in zip(steps, self._begins, strict=False))
        numbers = chain.from_iterable((*starts, *(step.numbers for step in steps)))
        self._numbers = np.array([0, len(steps), *numbers], dtype=np.int64)

    def places(self, workers: Collection[Worker], fields: Sequence[int]) -> npt.NDArray[np.int64]:
        """Indices ``[steps, fields]`` of these arguments in the steps of some workers, for `put`."""
        begins = [begin for worker, begin in zip(self._workers, self._begins, strict=False) if worker in workers]
        return np.array(begins, dtype=np.int64)[:, None] + np.array(fields, dtype=np.int64)

    def put(self, places: npt.NDArray[np.int64], numbers: npt.NDArray[np.int64]) -> None:
        """Set the arguments at ``places`` to ``numbers``, of the same shape."""
        self._numbers[places] = numbers

    def run(self) -> None:
        """Run all steps; see `cascade.cpu.jit.run`."""
        run(_run_all, self._numbers.tobytes(), self._work)
