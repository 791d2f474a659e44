"""Products in bfloat16, added up in float32: rows are rounded, and weights lie in blocks of sixteen columns, by pairs.

A pass of up to sixteen rows takes little longer than to read the matrix.
"""

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from cascade.cpu.jit import Step, floats, halves, integer, kernel, num_threads, rounded, thread_num
from cascade.cpu.matrix_tile import (
    STEP,
    TILE_ROWS,
    configure,
    four_blocks,
    one_block,
    release,
    twice_one_block,
    twice_two_blocks,
    two_blocks,
)
from cascade.cpu.tile import LANES


@kernel
def _multiply(given: int) -> None:
    x, w, out, rows, depth = integer(given, 0), integer(given, 1), integer(given, 2), integer(given, 3), integer(given, 4)
    stride, blocks = integer(given, 5), integer(given, 6)
    here, threads = thread_num(), num_threads()
    size, block, last = depth * LANES * 2, blocks * here // threads, blocks * (here + 1) // threads
    first, second, most = 0, 0, 4 if rows <= TILE_ROWS else 2
    while block < last:
        many = most if block + most <= last else 1
        for row in range(0, rows, 2 * TILE_ROWS):  # blocks are read once from memory, and again from a cache
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


@kernel
def _round(given: int) -> None:
    rows, size, stride, depth = integer(given, 0), integer(given, 1), integer(given, 3), integer(given, 5)
    here, threads = thread_num(), num_threads()
    for row in range(rows * here // threads, rows * (here + 1) // threads):
        numbers, to = floats(integer(given, 2) + row * stride * 4), halves(integer(given, 4) + row * depth * 2)
        for place in range(size):
            to[place] = rounded(numbers[place])
        for place in range(size, depth):
            to[place] = 0


class Pairs:
    """A matrix ``[out_features, in_features]`` rounded to bfloat16, to multiply rows with."""

    def __init__(self, weight: Tensor) -> None:
        self.out_features, self.in_features = weight.shape
        filled = F.pad(weight.to(torch.bfloat16), (0, -self.in_features % STEP, 0, -self.out_features % LANES))
        pairs = filled.view(-1, LANES, filled.shape[1] // 2, 2)
        self.blocks = pairs.transpose(1, 2).contiguous()  # [blocks, depth / 2, 16, 2]

    @property
    def width(self) -> int:
        """Numbers of a row of the product, those that fill its last block included."""
        return int(self.blocks.shape[0]) * LANES

    @property
    def depth(self) -> int:
        """Numbers of a row that is multiplied, those that fill it up included."""
        return 2 * int(self.blocks.shape[1])

    def steps(self, x: int, room: int, rows: int, out: int) -> Iterator[Step]:
        """The product of rows that lie one after another, to ``[rows, width]`` at ``out``; ``room`` is for rounded rows."""
        yield Step(_round, (rows, self.in_features, x, self.in_features, room, self.depth))
        yield Step(_multiply, (room, self.blocks.data_ptr(), out, rows, self.depth, self.width, len(self.blocks)))
