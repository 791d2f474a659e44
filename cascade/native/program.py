"""Kernels one after the other in one call: what lies between two calls takes longer than a kernel of a small pass."""

import struct
from collections.abc import Sequence
from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from cascade.native.jit import I64, Step, barrier, integer, kernel, num_threads, run


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


def run_all(steps: Sequence[Step], work: int) -> None:
    """Run ``steps``, each when the one before has ended, as `cascade.native.jit.run` does a worker."""
    at, head, numbers = 8 * (1 + 2 * len(steps)), [len(steps)], list[int]()
    for worker, own in steps:
        head += (worker.address, at)
        numbers += own
        at += 8 * len(own)
    run(_run_all, struct.pack(f"{len(head) + len(numbers)}q", *head, *numbers), work)
