"""The tile: a few rows times a block of sixteen columns, the one inner loop of products and of attention.

Each number of the outcome is a chain of fused multiply-adds over the depth, in order: nothing else is in it, so its bits do not
depend on how many rows there are, on how many threads, or on the width of the processor's registers.
"""

from typing import Any

import torch
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from cascade.native.jit import F32, I16, I32, I64, function_of, inlined

LANES = 16  # columns of a block
ROWS = 8 if torch.backends.cpu.get_cpu_capability() == "AVX512" else 6  # of a tile at most: their sums stay in registers

VECTOR = ir.VectorType(F32, LANES)
HALVES, WORDS = ir.VectorType(I16, LANES), ir.VectorType(I32, LANES)
UNDEFINED = ir.Constant(VECTOR, ir.Undefined)


class _Loop:
    """Builds a tile of so many rows, its blocks of weights float32 or, in 16 bits, bfloat16. It may add to what is there."""

    def __init__(self, b: Any, rows: int, width: int, onward: bool) -> None:
        self._b, self._rows, self._width, self._onward = b, rows, width, onward

    def build(self, x: Any, w: Any, out: Any, stride: Any, depth: Any, chunk: Any) -> None:
        """Chains are as long as a chunk; chunks are added up."""
        b, begin, zero, nil = self._b, self._b.block, ir.Constant(VECTOR, [0.0] * LANES), ir.Constant(I64, 0)
        outer, inner, after, done = (b.append_basic_block(name) for name in ("outer", "inner", "after", "done"))
        x, out = (b.inttoptr(address, F32.as_pointer()) for address in (x, out))
        w = b.inttoptr(w, (F32 if self._width == 32 else I16).as_pointer())
        b.branch(outer)
        b.position_at_end(outer)
        first, sums = b.phi(I64), [b.phi(VECTOR) for _ in range(self._rows)]
        limit = b.add(first, chunk)
        last = b.select(b.icmp_unsigned("<", limit, depth), limit, depth)
        places = [
            b.bitcast(b.gep(out, [b.mul(stride, ir.Constant(I64, row))]), VECTOR.as_pointer()) for row in range(self._rows)
        ]
        starts = [b.load(at, align=4) for at in places] if self._onward else [zero] * self._rows
        b.branch(inner)
        b.position_at_end(inner)
        place, chains = b.phi(I64), [b.phi(VECTOR) for _ in range(self._rows)]
        longer, following = self._step(x, w, place, chains), b.add(place, ir.Constant(I64, 1))
        b.cbranch(b.icmp_unsigned("<", following, last), inner, after)
        b.position_at_end(after)
        added = [b.fadd(total, chain) for total, chain in zip(sums, longer, strict=True)]
        b.cbranch(b.icmp_unsigned("<", last, depth), outer, done)
        for phi, start, step in ((first, nil, last), *zip(sums, [zero] * self._rows, added, strict=True)):
            phi.add_incoming(start, begin)
            phi.add_incoming(step, after)
        for phi, start, step in ((place, first, following), *zip(chains, starts, longer, strict=True)):
            phi.add_incoming(start, outer)
            phi.add_incoming(step, inner)
        b.position_at_end(done)
        for at, total in zip(places, added, strict=True):
            b.store(total, at, align=4)

    def _step(self, x: Any, w: Any, place: Any, chains: list[Any]) -> list[Any]:
        """One place of the depth: a vector of weights, times one number of each row."""
        b, fma = self._b, function_of(self._b, "llvm.fma.v16f32", ir.FunctionType(VECTOR, [VECTOR] * 3))
        weights = self._weights(b.gep(w, [b.mul(place, ir.Constant(I64, LANES))]))
        here, longer = b.gep(x, [b.mul(place, ir.Constant(I64, self._rows))]), []
        for row, chain in enumerate(chains):
            number = b.load(b.gep(here, [ir.Constant(I64, row)]))
            first = b.insert_element(UNDEFINED, number, ir.Constant(I32, 0))
            everywhere = b.shuffle_vector(first, UNDEFINED, ir.Constant(WORDS, [0] * LANES))
            longer.append(b.call(fma, [everywhere, weights, chain]))
        return longer

    def _weights(self, at: Any) -> Any:
        b = self._b
        if self._width == 32:
            return b.load(b.bitcast(at, VECTOR.as_pointer()), align=4)
        halves = b.load(b.bitcast(at, HALVES.as_pointer()), align=2)
        return b.bitcast(b.shl(b.zext(halves, WORDS), ir.Constant(WORDS, [16] * LANES)), VECTOR)


def _tile(rows: int, width: int, onward: bool) -> Any:
    @intrinsic
    def tile(_: Any, x: Any, w: Any, out: Any, stride: Any, depth: Any, chunk: Any) -> Any:
        def build(context: Any, b: Any, signature: Any, given: Any) -> Any:
            _Loop(b, rows, width, onward).build(*given)
            return context.get_dummy_value()

        return types.void(*[types.int64] * 6), build

    return tile


def _tiles(width: int, onward: bool = False) -> Any:
    one, two, three, four, five, six, seven, eight = (_tile(rows, width, onward) for rows in range(1, 9))

    @inlined
    def tile(rows: int, x: int, w: int, out: int, stride: int, depth: int, chunk: int) -> None:
        if rows == 1:
            one(x, w, out, stride, depth, chunk)
        elif rows == 2:
            two(x, w, out, stride, depth, chunk)
        elif rows == 3:
            three(x, w, out, stride, depth, chunk)
        elif rows == 4:
            four(x, w, out, stride, depth, chunk)
        elif rows == 5:
            five(x, w, out, stride, depth, chunk)
        elif rows == 6:
            six(x, w, out, stride, depth, chunk)
        elif rows == 7:
            seven(x, w, out, stride, depth, chunk)
        else:
            eight(x, w, out, stride, depth, chunk)

    return tile


tile = _tiles(32)
"""``tile(rows, x, w, out, stride, depth, chunk)``: at ``out`` ``rows`` times `LANES` numbers, rows ``stride`` apart.

``x`` is the address of ``[depth, rows]`` float32, ``w`` that of ``[depth, LANES]``; ``chunk`` is the length of a chain.
"""
onward = _tiles(32, onward=True)
"""The same in one chain that goes on from what is at ``out``: two tiles of a part of the depth each are one of all of it."""
tile_of_halves = _tiles(16)
"""`tile` for weights in bfloat16, which are widened on the way."""
