"""The tile: a few rows times one or several blocks of sixteen columns, the one inner loop of products and of attention.

Each number of the outcome is a chain of fused multiply-adds over the depth, in order: nothing else is in it, so its bits do not
depend on how many rows there are, on how many blocks are computed side by side, on how many threads, or on the width of the
processor's registers. A link of a chain waits for the one before, four cycles on most processors, so a tile should have eight
chains and more: few rows take several blocks side by side.
"""

from collections.abc import Mapping
from typing import Any

import torch
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from cascade.cpu.jit import F32, I16, I32, I64, function_of, inlined

LANES = 16  # columns of a block
_MANY_REGISTERS = torch.backends.cpu.get_cpu_capability() == "AVX512"
ROWS = 12 if _MANY_REGISTERS else 6  # of a tile at most: their sums stay in registers
WIDE = (1, 4, 4 if _MANY_REGISTERS else 2, 2)  # blocks side by side, by rows; one of more rows

VECTOR = ir.VectorType(F32, LANES)
HALVES, WORDS = ir.VectorType(I16, LANES), ir.VectorType(I32, LANES)
UNDEFINED = ir.Constant(VECTOR, ir.Undefined)


class _Loop:
    """Builds a tile of so many rows and blocks, their weights float32 or, in 16 bits, bfloat16. It may add to what is there."""

    def __init__(self, b: Any, rows: int, blocks: int, width: int, onward: bool) -> None:
        self._b, self._rows, self._blocks, self._width, self._onward = b, rows, blocks, width, onward
        self._chains = [(row, block) for row in range(rows) for block in range(blocks)]

    def build(self, x: Any, w: Any, out: Any, stride: Any, depth: Any, chunk: Any, block_stride: Any) -> None:
        """Chains are as long as a chunk; chunks are added up. Blocks are as many numbers apart."""
        b, begin, zero, nil = self._b, self._b.block, ir.Constant(VECTOR, [0.0] * LANES), ir.Constant(I64, 0)
        outer, inner, after, done = (b.append_basic_block(name) for name in ("outer", "inner", "after", "done"))
        x, out = (b.inttoptr(address, F32.as_pointer()) for address in (x, out))
        w = b.inttoptr(w, (F32 if self._width == 32 else I16).as_pointer())
        b.branch(outer)
        b.position_at_end(outer)
        first, sums = b.phi(I64), [b.phi(VECTOR) for _ in self._chains]
        limit = b.add(first, chunk)
        last = b.select(b.icmp_unsigned("<", limit, depth), limit, depth)
        places = [
            b.bitcast(
                b.gep(out, [b.add(b.mul(stride, ir.Constant(I64, row)), ir.Constant(I64, block * LANES))]), VECTOR.as_pointer()
            )
            for row, block in self._chains
        ]
        starts = [b.load(at, align=4) for at in places] if self._onward else [zero] * len(self._chains)
        b.branch(inner)
        b.position_at_end(inner)
        place, chains = b.phi(I64), [b.phi(VECTOR) for _ in self._chains]
        longer, following = self._step(x, w, block_stride, place, chains), b.add(place, ir.Constant(I64, 1))
        b.cbranch(b.icmp_unsigned("<", following, last), inner, after)
        b.position_at_end(after)
        added = [b.fadd(total, chain) for total, chain in zip(sums, longer, strict=True)]
        b.cbranch(b.icmp_unsigned("<", last, depth), outer, done)
        for phi, start, step in ((first, nil, last), *zip(sums, [zero] * len(sums), added, strict=True)):
            phi.add_incoming(start, begin)
            phi.add_incoming(step, after)
        for phi, start, step in ((place, first, following), *zip(chains, starts, longer, strict=True)):
            phi.add_incoming(start, outer)
            phi.add_incoming(step, inner)
        b.position_at_end(done)
        for at, total in zip(places, added, strict=True):
            b.store(total, at, align=4)

    def _step(self, x: Any, w: Any, block_stride: Any, place: Any, chains: list[Any]) -> list[Any]:
        """One place of the depth: a vector of weights of each block, times one number of each row."""
        b, fma = self._b, function_of(self._b, "llvm.fma.v16f32", ir.FunctionType(VECTOR, [VECTOR] * 3))
        here = b.mul(place, ir.Constant(I64, LANES))
        starts = [here, *(b.add(here, b.mul(block_stride, ir.Constant(I64, block))) for block in range(1, self._blocks))]
        weights = [self._weights(b.gep(w, [start])) for start in starts]
        given = b.gep(x, [b.mul(place, ir.Constant(I64, self._rows))])
        numbers = [self._everywhere(b.load(b.gep(given, [ir.Constant(I64, row)]))) for row in range(self._rows)]
        return [
            b.call(fma, [numbers[row], weights[block], chain]) for (row, block), chain in zip(self._chains, chains, strict=True)
        ]

    def _everywhere(self, number: Any) -> Any:
        first = self._b.insert_element(UNDEFINED, number, ir.Constant(I32, 0))
        return self._b.shuffle_vector(first, UNDEFINED, ir.Constant(WORDS, [0] * LANES))

    def _weights(self, at: Any) -> Any:
        b = self._b
        if self._width == 32:
            return b.load(b.bitcast(at, VECTOR.as_pointer()), align=4)
        halves = b.load(b.bitcast(at, HALVES.as_pointer()), align=2)
        return b.bitcast(b.shl(b.zext(halves, WORDS), ir.Constant(WORDS, [16] * LANES)), VECTOR)


def _tile(blocks_by_rows: Mapping[int, int], width: int, onward: bool = False) -> Any:
    """A tile of as many rows as it is told, the last of ``blocks_by_rows`` if of none of these, and of the blocks they take."""

    @intrinsic
    def tile(_: Any, rows: Any, x: Any, w: Any, out: Any, stride: Any, depth: Any, chunk: Any, block_stride: Any) -> Any:
        def build(context: Any, b: Any, signature: Any, given: Any) -> Any:
            number, *rest = given
            cases = {rows: b.append_basic_block(f"rows{rows}") for rows in blocks_by_rows}
            done, *_, last = b.append_basic_block("tiled"), *cases.values()
            switch = b.switch(number, last)
            for rows, case in cases.items():
                if case is not last:
                    switch.add_case(ir.Constant(I64, rows), case)
                b.position_at_end(case)
                _Loop(b, rows, blocks_by_rows[rows], width, onward).build(*rest)
                b.branch(done)
            b.position_at_end(done)
            return context.get_dummy_value()

        return types.void(*[types.int64] * 8), build

    return tile


_ONE_BLOCK = dict.fromkeys(range(1, ROWS + 1), 1)
_onward, _onward_of_halves = _tile(_ONE_BLOCK, 32, onward=True), _tile(_ONE_BLOCK, 16, onward=True)


def _tile_blocks(width: int) -> Any:
    """Several blocks side by side where rows are few, as often as there are so many, and one by one the rest."""
    one, several, nbytes = _tile(_ONE_BLOCK, width), _tile(dict(enumerate(WIDE[1:], 1)), width), width // 8

    @inlined
    def blocks(
        rows: int, x: int, w: int, out: int, stride: int, depth: int, chunk: int, number: int, block_stride: int
    ) -> None:
        block = 0
        if rows < len(WIDE):
            while block + WIDE[rows] <= number:
                at, to = w + block * block_stride * nbytes, out + block * LANES * 4
                several(rows, x, at, to, stride, depth, chunk, block_stride)
                block += WIDE[rows]
        while block < number:
            one(rows, x, w + block * block_stride * nbytes, out + block * LANES * 4, stride, depth, chunk, 0)
            block += 1

    return blocks


_blocks, _blocks_of_halves = _tile_blocks(32), _tile_blocks(16)


@inlined
def multiply(
    halves: int, rows: int, x: int, w: int, out: int, stride: int, depth: int, chunk: int, number: int, block_stride: int
) -> None:
    """At ``out`` ``rows`` times ``number`` blocks of `LANES` float32, rows ``stride`` numbers apart.

    ``x`` is the address of ``[depth, rows]`` float32, ``rows`` at most `ROWS`; ``w`` that of a block ``[depth, 16]``, float32
    or, of ``halves``, bfloat16, which is widened on the way; blocks begin ``block_stride`` numbers apart; ``chunk`` is the
    length of a chain.
    """
    if halves:
        _blocks_of_halves(rows, x, w, out, stride, depth, chunk, number, block_stride)
    else:
        _blocks(rows, x, w, out, stride, depth, chunk, number, block_stride)


@inlined
def multiply_onward(halves: int, rows: int, x: int, w: int, out: int, stride: int, depth: int) -> None:
    """`multiply` with one block in a chain that goes on from what is at ``out``: two of parts of the depth are one of all."""
    if halves:
        _onward_of_halves(rows, x, w, out, stride, depth, depth, 0)
    else:
        _onward(rows, x, w, out, stride, depth, depth, 0)
