"""The tile: a few rows times one or several blocks of sixteen columns, the inner loop of products and attention.

Each result is one chain of fused multiply-adds over the depth, in order. So its bits do not depend on the number of rows, of
blocks side by side or of threads, nor on the width of registers. Each step of a chain waits four cycles for the one before on
most processors, so a tile should have eight chains or more. Blocks side by side share each number of a row that is loaded, as
rows share weights.

A step of the depth takes one word of each column and row. A word is a float32, or a pair of bfloat16 at two
places of the depth that follow each other.
"""

from collections.abc import Callable, Mapping
from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from cascade.cpu.jit import F32, I8, I16, I32, I64, function_of, inlined, integer, num_threads, round_bits, thread_num
from cascade.cpu.processor import has_avx512

LANES = 16  # columns of a block
STEP = 32  # places of the depth that one instruction of matrix tiles takes
_MANY_REGISTERS = has_avx512()
ROWS = 12 if _MANY_REGISTERS else 6  # the most rows of a tile: their sums stay in registers
# blocks side by side in a tile of 1, 2, 3, ... rows, so that all its sums stay in registers; a tile of more rows has one block
WIDE = (4, 4, 4, 4, 4, 4, 2, 2, 2, 2, 2, 2) if _MANY_REGISTERS else (4, 2, 2)
AHEAD = 1024  # words of a block between what is read and what is prefetched
AT_ONCE = max(WIDE)  # blocks that are multiplied with all rows before the next ones are read
WORD = 4  # bytes

VECTOR, WORDS, HALVES = (ir.VectorType(kind, LANES) for kind in (F32, I32, I16))
UNDEFINED = ir.Constant(VECTOR, ir.Undefined)


def _everywhere(b: Any, number: Any) -> Any:
    """A vector with the same number in each lane."""
    first = b.insert_element(UNDEFINED, number, ir.Constant(I32, 0))
    return b.shuffle_vector(first, UNDEFINED, ir.Constant(WORDS, [0] * LANES))


class Loop:
    """Builds the code of a tile of ``rows`` by ``blocks`` of float32.

    ``onward`` adds to the output. ``ahead`` prefetches: for blocks in runs too short for the processor's own prefetching.
    """

    def __init__(self, b: Any, rows: int, blocks: int, onward: bool, ahead: bool) -> None:
        self._b, self._rows, self._blocks, self._onward, self._ahead = b, rows, blocks, onward, ahead
        self._chains = [(row, block) for row in range(rows) for block in range(blocks)]

    def build(self, x: Any, x_stride: Any, w: Any, block_stride: Any, out: Any, stride: Any, depth: Any, chunk: Any) -> None:
        """Chains have the length ``chunk``, and chunks are summed; strides are between rows and between blocks, in words."""
        b, begin, zero, nil = self._b, self._b.block, ir.Constant(VECTOR, [0.0] * LANES), ir.Constant(I64, 0)
        outer, inner, after, done = (b.append_basic_block(name) for name in ("outer", "inner", "after", "done"))
        x, w, out = (b.inttoptr(address, F32.as_pointer()) for address in (x, w, out))
        given = [b.gep(x, [b.mul(x_stride, ir.Constant(I64, row))]) for row in range(self._rows)]
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
        columns = self._columns(w, block_stride, place)
        longer, following = self._step(given, columns, place, chains), b.add(place, ir.Constant(I64, 1))
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

    def _step(self, given: list[Any], columns: list[Any], place: Any, chains: list[Any]) -> list[Any]:
        """One step of the depth: the words at a place of the rows ``given`` times ``columns``, the words of each block."""
        return self._added(self._numbers(given, place), columns, chains)

    def _added(self, numbers: list[Any], columns: list[Any], chains: list[Any]) -> list[Any]:
        b, fma = self._b, function_of(self._b, "llvm.fma.v16f32", ir.FunctionType(VECTOR, [VECTOR] * 3))
        return [
            b.call(fma, [numbers[row], columns[block], chain]) for (row, block), chain in zip(self._chains, chains, strict=True)
        ]

    def _numbers(self, given: list[Any], place: Any) -> list[Any]:
        """A vector of the word of each row at a place."""
        return [_everywhere(self._b, self._b.load(self._b.gep(row, [place]))) for row in given]

    def _columns(self, w: Any, block_stride: Any, place: Any) -> list[Any]:
        """The words of each block at a place of the depth."""
        b = self._b
        here = b.mul(place, ir.Constant(I64, LANES))
        starts = [here, *(b.add(here, b.mul(block_stride, ir.Constant(I64, block))) for block in range(1, self._blocks))]
        addresses = [b.gep(w, [start]) for start in starts]
        if self._ahead:
            self._prefetch(addresses, block_stride)
        return [b.load(b.bitcast(at, VECTOR.as_pointer()), align=4) for at in addresses]

    def _prefetch(self, addresses: list[Any], block_stride: Any) -> None:
        """Prefetch words into the second cache: the next blocks where blocks are short, else `AHEAD` words further on."""
        b, next_ones, distance = self._b, ir.Constant(I64, self._blocks), ir.Constant(I64, AHEAD)
        is_short = b.icmp_unsigned("<=", block_stride, distance)
        ahead = b.select(is_short, b.mul(block_stride, next_ones), distance)
        prefetch = function_of(b, "llvm.prefetch.p0", ir.FunctionType(ir.VoidType(), [I8.as_pointer(), I32, I32, I32]))
        for address in addresses:
            at = b.bitcast(b.gep(address, [ahead]), I8.as_pointer())
            b.call(prefetch, [at, *(ir.Constant(I32, number) for number in (0, 2, 1))])  # to read, second cache, data


class Widened(Loop):
    """A loop over columns of bfloat16, which are widened to float32; a word of theirs meets two numbers of a row."""

    def _step(self, given: list[Any], columns: list[Any], place: Any, chains: list[Any]) -> list[Any]:
        b, words = self._b, [self._b.bitcast(column, WORDS) for column in columns]
        first = [b.bitcast(b.shl(word, ir.Constant(WORDS, [16] * LANES)), VECTOR) for word in words]
        second = [b.bitcast(b.and_(word, ir.Constant(WORDS, [0xFFFF0000] * LANES)), VECTOR) for word in words]
        here = b.mul(place, ir.Constant(I64, 2))
        chains = self._added(self._numbers(given, here), first, chains)
        return self._added(self._numbers(given, b.add(here, ir.Constant(I64, 1))), second, chains)


def _tile(blocks_by_rows: Mapping[int, int], loop: type[Loop], *, onward: bool = False, ahead: bool = False) -> Any:
    """A tile that dispatches on its number of rows, each with its blocks side by side; other numbers take the last entry.

    It takes the number of rows, and then what `Loop.build` takes.
    """

    @intrinsic
    def tile(
        _: Any, rows: Any, x: Any, x_stride: Any, w: Any, block_stride: Any, out: Any, stride: Any, depth: Any, chunk: Any
    ) -> Any:
        def build(context: Any, b: Any, signature: Any, given: Any) -> Any:
            number, *rest = given
            cases = {rows: b.append_basic_block(f"rows{rows}") for rows in blocks_by_rows}
            done, *_, last = b.append_basic_block("tiled"), *cases.values()
            switch = b.switch(number, last)
            for rows, case in cases.items():
                if case is not last:
                    switch.add_case(ir.Constant(I64, rows), case)
                b.position_at_end(case)
                loop(b, rows, blocks_by_rows[rows], onward, ahead).build(*rest)
                b.branch(done)
            b.position_at_end(done)
            return context.get_dummy_value()

        return types.void(*[types.int64] * 9), build

    return tile


_ONE_BLOCK = dict.fromkeys(range(1, ROWS + 1), 1)


def multiplier(loop: type[Loop] = Loop, *, ahead: bool = False) -> Any:
    """A function that multiplies at most `ROWS` rows with blocks: `WIDE` of them side by side, and single ones for the rest.

    ``x`` is the address of rows that are ``x_stride`` words apart, ``w`` that of ``number`` blocks ``[depth, 16]`` that are
    ``block_stride`` words apart. Products come to rows of float32 at ``out``, ``stride`` apart. ``chunk`` is a chain's length.
    """
    single, several = _tile(_ONE_BLOCK, loop), _tile(dict(enumerate(WIDE, 1)), loop, ahead=ahead)

    @inlined
    def multiply(
        rows: int, x: int, x_stride: int, w: int, block_stride: int, number: int, out: int, stride: int, depth: int, chunk: int
    ) -> None:
        block = 0
        if rows <= len(WIDE):
            while block + WIDE[rows - 1] <= number:
                at, to = w + block * block_stride * WORD, out + block * LANES * 4
                several(rows, x, x_stride, at, block_stride, to, stride, depth, chunk)
                block += WIDE[rows - 1]
        while block < number:
            at, to = w + block * block_stride * WORD, out + block * LANES * 4
            single(rows, x, x_stride, at, 0, to, stride, depth, chunk)
            block += 1

    return multiply


def continuer(loop: type[Loop] = Loop) -> Any:
    """A tile of one block in chains that continue from ``out``: two calls over parts of the depth equal one over all."""
    return _tile(_ONE_BLOCK, loop, onward=True)


def group_of(rows: int) -> int:
    """Rows of every tile but the last, so that ``rows`` are spread evenly over tiles."""
    return -(-rows // -(-rows // ROWS))


def product(multiply: Any) -> Any:
    """A kernel's function: rows times a matrix in blocks that lie one after another, with ``multiply`` of `multiplier`.

    Arguments: addresses of rows, blocks and output; the number of rows, the depth in words, the words between rows of the input
    and of the output, the numbers of blocks and of rows in a tile, and the length of a chain in words.
    """

    @inlined
    def function(given: int) -> None:
        x, w, out, rows, depth = integer(given, 0), integer(given, 1), integer(given, 2), integer(given, 3), integer(given, 4)
        x_stride, stride, blocks, group, chain = (
            integer(given, 5),
            integer(given, 6),
            integer(given, 7),
            integer(given, 8),
            integer(given, 9),
        )
        here, threads, size = thread_num(), num_threads(), depth * LANES
        first, last = blocks * here // threads, blocks * (here + 1) // threads
        at_once = last - first if rows <= group else AT_ONCE  # blocks are read once from memory, then from a cache
        for block in range(first, last, max(1, at_once)):
            number, weights = min(at_once, last - block), w + block * size * WORD
            for row in range(0, rows, group):
                taken, to = min(group, rows - row), out + (row * stride + block * LANES) * 4
                multiply(taken, x + row * x_stride * WORD, x_stride, weights, size, number, to, stride, depth, chain)

    return function


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


@intrinsic
def round_all(_: Any, source: Any, to: Any, length: Any) -> Any:
    """Round ``length`` float32, a positive multiple of `LANES`, to bfloat16: LLVM makes no vectors of a loop over them."""

    def build(context: Any, b: Any, signature: Any, given: Any) -> Any:
        source, to = (b.inttoptr(address, kind.as_pointer()) for address, kind in zip(given, (F32, I16), strict=False))
        begin, loop, done = b.block, b.append_basic_block("loop"), b.append_basic_block("done")
        b.branch(loop)
        b.position_at_end(loop)
        place = b.phi(I64)
        numbers = b.load(b.bitcast(b.gep(source, [place]), VECTOR.as_pointer()), align=4)
        rounded = round_bits(b, numbers, WORDS, HALVES, LANES)
        b.store(rounded, b.bitcast(b.gep(to, [place]), HALVES.as_pointer()), align=2)
        following = b.add(place, ir.Constant(I64, LANES))
        place.add_incoming(ir.Constant(I64, 0), begin)
        place.add_incoming(following, loop)
        b.cbranch(b.icmp_unsigned("<", following, given[2]), loop, done)
        b.position_at_end(done)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64), build
