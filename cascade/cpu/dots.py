"""Products of pairs of bfloat16 by AVX-512's instruction for bfloat16, in the loops of `cascade.cpu.tile`.

One instruction multiplies sixteen pairs of weights by a pair of a row, and adds both products to the chain of each column. So
eight rows take half the time that they take in float32. Compiled on import, for processors that have it.
"""

from typing import Any

from llvmlite import ir

from cascade.cpu.jit import floats, function_of, halves, integer, kernel, num_threads, rounded, thread_num
from cascade.cpu.tile import AT_ONCE, LANES, VECTOR, Loop, tile_blocks

PAIR = 4  # bytes
CHAIN = 256  # pairs that are summed in one chain


class _BFloat16(ir.Type):  # type: ignore[misc]
    """LLVM's type ``bfloat``, which llvmlite lacks."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _BFloat16)

    def __hash__(self) -> int:
        return hash(_BFloat16)

    def _to_string(self) -> str:
        return "bfloat"


PAIRS = ir.VectorType(_BFloat16(), 2 * LANES)


class _Dots(Loop):
    """A loop that takes a pair of each row at each step of the depth."""

    def _step(self, x: Any, w: Any, block_stride: Any, place: Any, chains: list[Any]) -> list[Any]:
        b = self._b
        dot = function_of(b, "llvm.x86.avx512bf16.dpbf16ps.512", ir.FunctionType(VECTOR, [VECTOR, PAIRS, PAIRS]))
        weights = [b.load(b.bitcast(at, PAIRS.as_pointer()), align=4) for at in self._starts(w, block_stride, place)]
        pairs = [b.bitcast(number, PAIRS) for number in self._numbers(x, place)]
        return [
            b.call(dot, [chain, pairs[row], weights[block]]) for (row, block), chain in zip(self._chains, chains, strict=True)
        ]


_blocks = tile_blocks(32, _Dots)


@kernel
def prepare(given: int) -> None:
    """Round rows to bfloat16, pad them with zeros, and transpose each group of them to ``[pairs, rows]``."""
    rows, size, x, out = integer(given, 0), integer(given, 1), integer(given, 2), integer(given, 3)
    pairs, group, here, threads = integer(given, 4) // 2, integer(given, 5), thread_num(), num_threads()
    for row in range(rows * here // threads, rows * (here + 1) // threads):
        first = row // group * group
        count, numbers = min(group, rows - first), floats(x + row * size * 4)
        to = halves(out + (first * pairs + row - first) * PAIR)
        for place in range(size):
            to[place // 2 * 2 * count + place % 2] = rounded(numbers[place])
        for place in range(size, 2 * pairs):
            to[place // 2 * 2 * count + place % 2] = 0


@kernel
def multiply(given: int) -> None:
    x, w, out, rows, pairs = integer(given, 0), integer(given, 1), integer(given, 2), integer(given, 3), integer(given, 4) // 2
    stride, blocks, group = integer(given, 5), integer(given, 6), integer(given, 7)
    here, threads = thread_num(), num_threads()
    size, first, last = pairs * LANES * PAIR, blocks * here // threads, blocks * (here + 1) // threads
    if rows <= group:
        _blocks(rows, x, w + first * size, out + first * LANES * 4, stride, pairs, CHAIN, last - first, pairs * LANES)
        return
    for block in range(first, last, AT_ONCE):
        number = min(AT_ONCE, last - block)
        for row in range(0, rows, group):  # blocks are read once from memory, then from a cache
            taken, to = min(group, rows - row), out + (row * stride + block * LANES) * 4
            source = x + row * pairs * PAIR
            _blocks(taken, source, w + block * size, to, stride, pairs, CHAIN, number, pairs * LANES)
