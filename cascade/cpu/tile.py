"""The tile: a few rows times one or several blocks of sixteen columns, the inner loop of products and attention.

Each result is one chain of fused multiply-adds over the depth, in order. So its bits do not depend on the number of rows, of
blocks side by side or of threads, nor on the width of registers. Each step of a chain waits four cycles for the one before on
most processors, so a tile should have eight chains or more. Blocks side by side share each number of a row that is loaded, as
rows share weights.
"""

from collections.abc import Callable, Mapping
from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from cascade.cpu.jit import F32, I8, I16, I32, I64, function_of, inlined
from cascade.cpu.processor import has_avx512

LANES = 16  # columns of a block
STEP = 32  # places of the depth that one instruction of matrix tiles takes
_MANY_REGISTERS = has_avx512()
ROWS = 12 if _MANY_REGISTERS else 6  # the most rows of a tile: their sums stay in registers
# blocks side by side in a tile of 1, 2, 3, ... rows, so that all its sums stay in registers; a tile of more rows has one block
WIDE = (4, 4, 4, 4, 4, 4, 2, 2, 2, 2, 2, 2) if _MANY_REGISTERS else (4, 2, 2)
AHEAD = 2048  # elements of a block between what is read and what is prefetched
AT_ONCE = max(WIDE)  # blocks that are multiplied with all rows before the next ones are read

VECTOR = ir.VectorType(F32, LANES)
HALVES, WORDS = ir.VectorType(I16, LANES), ir.VectorType(I32, LANES)
UNDEFINED = ir.Constant(VECTOR, ir.Undefined)


def _everywhere(b: Any, number: Any) -> Any:
    """A vector with the same number in each lane."""
    first = b.insert_element(UNDEFINED, number, ir.Constant(I32, 0))
    return b.shuffle_vector(first, UNDEFINED, ir.Constant(WORDS, [0] * LANES))


class Loop:
    """Builds the code of a tile of ``rows`` by ``blocks``, with weights of 32 or 16 bits; ``onward`` adds to the output."""

    def __init__(self, b: Any, rows: int, blocks: int, width: int, onward: bool) -> None:
        self._b, self._rows, self._blocks, self._width, self._onward = b, rows, blocks, width, onward
        self._chains = [(row, block) for row in range(rows) for block in range(blocks)]

    def build(self, x: Any, w: Any, out: Any, stride: Any, depth: Any, chunk: Any, block_stride: Any) -> None:
        """Chains have the length ``chunk``, and chunks are summed; blocks begin ``block_stride`` elements apart."""
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
        """One step of the depth: a vector of weights of each block times one number of each row."""
        b, fma = self._b, function_of(self._b, "llvm.fma.v16f32", ir.FunctionType(VECTOR, [VECTOR] * 3))
        starts = self._starts(w, block_stride, place)
        if self._blocks > 1:
            self._prefetch(starts, block_stride)
        weights = [self._weights(at) for at in starts]
        numbers = self._numbers(x, place)
        return [
            b.call(fma, [numbers[row], weights[block], chain]) for (row, block), chain in zip(self._chains, chains, strict=True)
        ]

    def _numbers(self, x: Any, place: Any) -> list[Any]:
        """A vector of the number of each row at a place of the depth."""
        b = self._b
        given = b.gep(x, [b.mul(place, ir.Constant(I64, self._rows))])
        return [_everywhere(b, b.load(b.gep(given, [ir.Constant(I64, row)]))) for row in range(self._rows)]

    def _starts(self, w: Any, block_stride: Any, place: Any) -> list[Any]:
        """Addresses of the weights of each block at a place of the depth."""
        b = self._b
        here = b.mul(place, ir.Constant(I64, LANES))
        starts = [here, *(b.add(here, b.mul(block_stride, ir.Constant(I64, block))) for block in range(1, self._blocks))]
        return [b.gep(w, [start]) for start in starts]

    def _prefetch(self, starts: list[Any], block_stride: Any) -> None:
        """Prefetch weights into the second cache: the next blocks where blocks are short, else `AHEAD` elements further on.

        A pass reads keys and values from memory, in runs too short for the processor's own prefetching. Without prefetches,
        attention of many rows takes 1.4 times as long (docs/log.md).
        """
        b, next_ones, distance = self._b, ir.Constant(I64, self._blocks), ir.Constant(I64, AHEAD)
        is_short = b.icmp_unsigned("<=", block_stride, distance)
        ahead = b.select(is_short, b.mul(block_stride, next_ones), distance)
        prefetch = function_of(b, "llvm.prefetch.p0", ir.FunctionType(ir.VoidType(), [I8.as_pointer(), I32, I32, I32]))
        for start in starts:
            at = b.bitcast(b.gep(start, [ahead]), I8.as_pointer())
            b.call(prefetch, [at, *(ir.Constant(I32, number) for number in (0, 2, 1))])  # to read, second cache, data

    def _weights(self, at: Any) -> Any:
        b = self._b
        if self._width == 32:
            return b.load(b.bitcast(at, VECTOR.as_pointer()), align=4)
        halves = b.load(b.bitcast(at, HALVES.as_pointer()), align=2)
        return b.bitcast(b.shl(b.zext(halves, WORDS), ir.Constant(WORDS, [16] * LANES)), VECTOR)


def _tile(blocks_by_rows: Mapping[int, int], width: int, onward: bool = False, loop: type[Loop] = Loop) -> Any:
    """A tile that dispatches on its number of rows, each with its blocks side by side; other numbers take the last entry."""

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
                loop(b, rows, blocks_by_rows[rows], width, onward).build(*rest)
                b.branch(done)
            b.position_at_end(done)
            return context.get_dummy_value()

        return types.void(*[types.int64] * 8), build

    return tile


_ONE_BLOCK = dict.fromkeys(range(1, ROWS + 1), 1)
_onward, _onward_of_halves = _tile(_ONE_BLOCK, 32, onward=True), _tile(_ONE_BLOCK, 16, onward=True)


def tile_blocks(width: int, loop: type[Loop] = Loop) -> Any:
    """Multiply with `WIDE` blocks side by side, and with single blocks for the rest."""
    single, several = (_tile(blocks, width, loop=loop) for blocks in (_ONE_BLOCK, dict(enumerate(WIDE, 1))))
    nbytes = width // 8

    @inlined
    def blocks(
        rows: int, x: int, w: int, out: int, stride: int, depth: int, chunk: int, number: int, block_stride: int
    ) -> None:
        block = 0
        if rows <= len(WIDE):
            while block + WIDE[rows - 1] <= number:
                at, to = w + block * block_stride * nbytes, out + block * LANES * 4
                several(rows, x, at, to, stride, depth, chunk, block_stride)
                block += WIDE[rows - 1]
        while block < number:
            single(rows, x, w + block * block_stride * nbytes, out + block * LANES * 4, stride, depth, chunk, 0)
            block += 1

    return blocks


_blocks, _blocks_of_halves = tile_blocks(32), tile_blocks(16)


def group_of(rows: int) -> int:
    """Rows of every tile but the last, so that ``rows`` are spread evenly over tiles."""
    return -(-rows // -(-rows // ROWS))


@inlined
def multiply(
    halves: int, rows: int, x: int, w: int, out: int, stride: int, depth: int, chunk: int, number: int, block_stride: int
) -> None:
    """Multiply ``rows`` rows with ``number`` blocks, to rows of float32 at ``out`` that are ``stride`` elements apart.

    ``x`` is the address of ``[depth, rows]`` float32, ``rows`` at most `ROWS`. ``w`` is the address of blocks ``[depth, 16]``,
    ``block_stride`` elements apart, of float32 or, with ``halves``, bfloat16. ``chunk`` is the length of a chain.
    """
    if halves:
        _blocks_of_halves(rows, x, w, out, stride, depth, chunk, number, block_stride)
    else:
        _blocks(rows, x, w, out, stride, depth, chunk, number, block_stride)


@inlined
def multiply_onward(halves: int, rows: int, x: int, w: int, out: int, stride: int, depth: int) -> None:
    """`multiply` one block in chains that continue from ``out``: two calls over parts of the depth equal one over all."""
    if halves:
        _onward_of_halves(rows, x, w, out, stride, depth, depth, 0)
    else:
        _onward(rows, x, w, out, stride, depth, depth, 0)


def _fold(join: Callable[[Any, Any, Any], Any]) -> Any:
    """A fold by ``join`` over ``length`` float32, a multiple of `LANES`; every lane begins with ``start``.

    It folds sixteen lanes in registers, then the lanes in order: LLVM vectorises a fold only if it may choose the order,
    which then differs between processors.
    """

    @intrinsic
    def fold(_: Any, address: Any, length: Any, start: Any) -> Any:
        def build(context: Any, b: Any, signature: Any, given: Any) -> Any:
            address, length, start = given
            numbers = b.inttoptr(address, F32.as_pointer())
            everywhere = _everywhere(b, start)
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


largest = _fold(lambda b, first, second: b.select(b.fcmp_ordered(">", second, first), second, first))
"""``largest(address, length, start)``: the maximum of ``start`` and ``length`` float32, a positive multiple of `LANES`."""
total = _fold(lambda b, first, second: b.fadd(first, second))
"""``total(address, length, 0)``: the sum, lane by lane, then over the lanes in order."""
