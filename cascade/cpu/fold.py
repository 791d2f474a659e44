"""The largest of some numbers, and their sum: sixteen at a time, in registers, and then one lane after the other.

LLVM folds numbers in vectors only where it may take them in any order, and then in another one on each processor.
"""

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from cascade.cpu.jit import F32, I32, I64
from cascade.cpu.tile import LANES, VECTOR


def _fold(join: Callable[[Any, Any, Any], Any]) -> Any:
    """Joins ``length`` numbers, a multiple of `LANES`, from an address on to ``start``, with which each lane begins."""

    @intrinsic
    def fold(_: Any, address: Any, length: Any, start: Any) -> Any:
        def build(context: Any, b: Any, signature: Any, given: Any) -> Any:
            address, length, start = given
            numbers = b.inttoptr(address, F32.as_pointer())
            first = b.insert_element(ir.Constant(VECTOR, ir.Undefined), start, ir.Constant(I32, 0))
            everywhere = b.shuffle_vector(first, first, ir.Constant(ir.VectorType(I32, LANES), [0] * LANES))
            begin, loop, done = b.block, b.append_basic_block("loop"), b.append_basic_block("done")
            b.branch(loop)
            b.position_at_end(loop)
            place, lanes = b.phi(I64), b.phi(VECTOR)
            here = b.load(b.bitcast(b.gep(numbers, [place]), VECTOR.as_pointer()), align=4)
            joined, following = join(b, lanes, here), b.add(place, ir.Constant(I64, LANES))
            for phi, at_first, then in ((place, ir.Constant(I64, 0), following), (lanes, everywhere, joined)):
                phi.add_incoming(at_first, begin)
                phi.add_incoming(then, loop)
            b.cbranch(b.icmp_unsigned("<", following, length), loop, done)
            b.position_at_end(done)
            folded = start
            for lane in range(LANES):
                folded = join(b, folded, b.extract_element(joined, ir.Constant(I32, lane)))
            return folded

        return types.float32(types.int64, types.int64, types.float32), build

    return fold


largest = _fold(lambda b, one, other: b.select(b.fcmp_ordered(">", other, one), other, one))
"""``largest(address, length, start)``: of ``length`` float32, a multiple of `LANES` and not 0, and of ``start``."""
total = _fold(lambda b, one, other: b.fadd(one, other))
"""``total(address, length, 0)``: their sum, lane by lane, and then of the lanes in their order."""
