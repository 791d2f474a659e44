"""Kernels one after the other in one call: what lies between two calls takes longer than a kernel of a small pass."""

from collections.abc import Collection, Sequence
from itertools import chain
from typing import Any

import numpy as np
import numpy.typing as npt
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from cascade.cpu.jit import I64, Step, Worker, barrier, integer, kernel, num_threads, run


@intrinsic
def _call(_: Any, worker: Any, given: Any) -> Any:
    """Let the worker at an address have the arguments at another one."""

    def build(context: Any, b: Any, signature: Any, operands: Any) -> Any:
        address, given = operands
        function = b.inttoptr(address, ir.FunctionType(ir.VoidType(), [I64]).as_pointer())
        b.call(function, [given])
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), build


@kernel
def _run_all(given: int) -> None:
    for step in range(integer(given, 0)):
        _call(integer(given, 1 + 2 * step), given + integer(given, 2 + 2 * step))
        if num_threads() > 1:
            barrier()


class Program:
    """Steps, each run when the one before has ended; again and again, with some of their numbers changed."""

    def __init__(self, steps: Sequence[Step], work: int) -> None:
        """``work`` is as of `cascade.cpu.jit.run`."""
        self._work = work
        self._workers = [step.worker for step in steps]
        self._begins = np.cumsum([1 + 2 * len(steps), *(len(step.numbers) for step in steps)])
        starts = ((step.worker.address, 8 * int(at)) for step, at in zip(steps, self._begins, strict=False))
        numbers = chain.from_iterable((*starts, *(step.numbers for step in steps)))
        self._numbers = np.array([len(steps), *numbers], dtype=np.int64)

    def places(self, workers: Collection[Worker], fields: Sequence[int]) -> npt.NDArray[np.int64]:
        """Where these numbers of the steps of some workers are, ``[steps, fields]``."""
        begins = [begin for worker, begin in zip(self._workers, self._begins, strict=False) if worker in workers]
        return np.array(begins, dtype=np.int64)[:, None] + np.array(fields, dtype=np.int64)

    def put(self, places: npt.NDArray[np.int64], numbers: npt.NDArray[np.int64]) -> None:
        """Change the numbers at `places`, as many."""
        self._numbers[places] = numbers

    def run(self) -> None:
        """Run the steps, as `cascade.cpu.jit.run` does a worker."""
        run(_run_all, self._numbers.tobytes(), self._work)
