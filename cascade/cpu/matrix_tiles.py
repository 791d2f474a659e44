"""Products of pairs of bfloat16 by the matrix tiles of processors with AMX.

A tile has up to sixteen rows times sixteen columns, and takes thirty-two places of the depth at a time. Each number of the
result is summed in the order of the depth, independently of the rows and columns computed beside it, so its bits depend on its
row alone. For up to sixteen rows a product takes little longer than reading the matrix.

Compiled on import, for processors that have such tiles.
"""

from collections.abc import Sequence
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from cascade.cpu.jit import I16, I64, function_of, integer, kernel, num_threads, thread_num
from cascade.cpu.tile import LANES, STEP

I8 = ir.IntType(8)
BYTES = I8.as_pointer()
TILE_ROWS = 16
_SECOND, _ROWS, _WEIGHTS = 2, (4, 5), (6, 7)  # tile registers: sums are 0 to 3
_LINE = 64  # bytes of a row of a tile register
_TILE = STEP * TILE_ROWS * 2  # bytes of the weights that one instruction takes


def _number(number: int) -> Any:
    return ir.Constant(I8, number)


def _place(b: Any, address: Any) -> Any:
    return b.inttoptr(address, BYTES)


def _call(b: Any, name: str, *given: Any) -> None:
    kind = ir.FunctionType(ir.VoidType(), [value.type for value in given])
    b.call(function_of(b, f"llvm.x86.{name}", kind), given)


@intrinsic
def configure(_: Any, first: Any, second: Any) -> Any:
    """Configure tiles for ``first`` rows (`one_tile`) and, unless it is 0, for ``second`` more (`two_tiles`)."""

    def build(context: Any, b: Any, signature: Any, given: Any) -> Any:
        first, second = (b.trunc(value, I8) for value in given)
        alone = b.icmp_unsigned("==", second, _number(0))
        more = b.select(alone, first, second)
        memory = cgutils.alloca_once(b, ir.ArrayType(I8, 64))
        b.store(ir.Constant(ir.ArrayType(I8, 64), None), memory)
        base = b.bitcast(memory, BYTES)

        def put(place: int, number: Any) -> None:
            at = b.gep(base, [ir.Constant(I64, place)])
            b.store(number, b.bitcast(at, number.type.as_pointer()), align=1)

        put(0, _number(1))
        rows = [first, first, more, more, first, more, _number(TILE_ROWS), _number(TILE_ROWS)]
        for register, count in enumerate(rows):
            put(16 + 2 * register, ir.Constant(I16, _LINE))
            put(48 + register, count)
        _call(b, "ldtilecfg", base)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), build


@intrinsic
def release(_: Any) -> Any:
    """Release the registers, so that the system need not save them."""

    def build(context: Any, b: Any, signature: Any, given: Any) -> Any:
        _call(b, "tilerelease")
        return context.get_dummy_value()

    return types.void(), build


class _Loop:
    """Builds the loop of one or two tiles of rows and a few blocks of columns side by side."""

    def __init__(self, b: Any, rows: int, blocks: int) -> None:
        self._b = b
        # sums by row and block; with two tiles of rows, those of the second are in registers configured for it
        self._sums = {(row, block): _SECOND * row + block for row in range(rows) for block in range(blocks)}
        self._rows, self._blocks = range(rows), range(blocks)

    def build(self, x: Any, w: Any, out: Any, stride: Any, depth: Any) -> None:
        b, begin, nil = self._b, self._b.block, ir.Constant(I64, 0)
        loop, done = b.append_basic_block("loop"), b.append_basic_block("done")
        for register in self._sums.values():
            _call(b, "tilezero", _number(register))
        apart = b.mul(depth, ir.Constant(I64, 2 * TILE_ROWS))  # bytes from one block to the next, and one tile of rows
        b.branch(loop)
        b.position_at_end(loop)
        place = b.phi(I64)
        self._step(x, w, place, depth, apart)
        following = b.add(place, ir.Constant(I64, STEP))
        b.cbranch(b.icmp_unsigned("<", following, depth), loop, done)
        place.add_incoming(nil, begin)
        place.add_incoming(following, b.block)
        b.position_at_end(done)
        line = b.mul(stride, ir.Constant(I64, 4))
        for (row, block), register in self._sums.items():
            at = b.add(b.add(out, b.mul(line, ir.Constant(I64, row * TILE_ROWS))), ir.Constant(I64, block * _LINE))
            _call(b, "tilestored64", _number(register), _place(b, at), line)

    def _step(self, x: Any, w: Any, place: Any, depth: Any, apart: Any) -> None:
        b = self._b
        here, line = b.add(x, b.mul(place, ir.Constant(I64, 2))), b.mul(depth, ir.Constant(I64, 2))
        for row in self._rows:
            at = b.add(here, b.mul(apart, ir.Constant(I64, row)))
            _call(b, "tileloadd64", _number(_ROWS[row]), _place(b, at), line)
        there = b.add(w, b.mul(place, ir.Constant(I64, _TILE // STEP)))
        for block in self._blocks:
            register = _WEIGHTS[block % len(_WEIGHTS)]
            at = b.add(there, b.mul(apart, ir.Constant(I64, block)))
            _call(b, "tileloadd64", _number(register), _place(b, at), ir.Constant(I64, _LINE))
            for row in self._rows:
                numbers: Sequence[int] = (self._sums[row, block], _ROWS[row], register)
                _call(b, "tdpbf16ps", *map(_number, numbers))


def _tiles(rows: int, blocks: int) -> Any:
    @intrinsic
    def tiles(_: Any, x: Any, w: Any, out: Any, stride: Any, depth: Any) -> Any:
        def build(context: Any, b: Any, signature: Any, given: Any) -> Any:
            _Loop(b, rows, blocks).build(*given)
            return context.get_dummy_value()

        return types.void(*[types.int64] * 5), build

    return tiles


four_blocks = _tiles(1, 4)
"""``four_blocks(x, w, out, stride, depth)``: up to sixteen rows ``[rows, depth]`` at ``x`` times four blocks at ``w``.

Rows and blocks, ``[depth / 2, 16, 2]`` each, are bfloat16, and lie one after another; ``depth`` is a multiple of `STEP`. What
comes to ``out`` is float32, rows ``stride`` numbers apart.
"""
one_block = _tiles(1, 1)
two_blocks = _tiles(1, 2)
twice_two_blocks = _tiles(2, 2)
"""The same for 17 to 32 rows and two blocks."""
twice_one_block = _tiles(2, 1)


@kernel
def multiply(given: int) -> None:
    x, w, out, rows, depth = integer(given, 0), integer(given, 1), integer(given, 2), integer(given, 3), 2 * integer(given, 4)
    stride, blocks = integer(given, 6), integer(given, 7)
    here, threads = thread_num(), num_threads()
    size, block, last = depth * LANES * 2, blocks * here // threads, blocks * (here + 1) // threads
    first, second, most = 0, 0, 4 if rows <= TILE_ROWS else 2
    while block < last:
        many = most if block + most <= last else 1
        for row in range(0, rows, 2 * TILE_ROWS):  # a block is read once from memory, then from a cache
            left = rows - row
            upper, lower = min(TILE_ROWS, left), max(0, min(TILE_ROWS, left - TILE_ROWS))
            if upper != first or lower != second:
                configure(upper, lower)
                first, second = upper, lower
            given_rows, weights, to = x + row * depth * 2, w + block * size, out + (row * stride + block * LANES) * 4
            if lower and many == 2:
                twice_two_blocks(given_rows, weights, to, stride, depth)
            elif lower:
                twice_one_block(given_rows, weights, to, stride, depth)
            elif many == 4:
                four_blocks(given_rows, weights, to, stride, depth)
            elif many == 2:
                two_blocks(given_rows, weights, to, stride, depth)
            else:
                one_block(given_rows, weights, to, stride, depth)
        block += many
    release()
