"""Products of a few rows with a matrix, as fast as memory gives the matrix.

The matrix lies in blocks of sixteen columns, each read from its beginning to its end. Weights that bfloat16 holds exactly, as
those of a checkpoint saved in it, are kept in it, and widened on the way: the same numbers from half the memory traffic.
"""

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from cascade.cpu.jit import Step, floats, integer, kernel, num_threads, thread_num
from cascade.cpu.tile import LANES, ROWS, multiply

CHAIN = 512  # places of the depth that are added up in one chain: rounding errors grow with its length


@kernel
def _multiply(given: int) -> None:
    x, w, out, rows, depth = integer(given, 0), integer(given, 1), integer(given, 2), integer(given, 3), integer(given, 4)
    stride, blocks, group, halves = integer(given, 5), integer(given, 6), integer(given, 7), integer(given, 8)
    here, threads = thread_num(), num_threads()
    size = depth * LANES * (2 if halves else 4)
    first, last = blocks * here // threads, blocks * (here + 1) // threads
    if rows <= group:
        weights, to = w + first * size, out + first * LANES * 4
        multiply(halves, rows, x, weights, to, stride, depth, CHAIN, last - first, depth * LANES)
        return
    for block in range(first, last):
        for row in range(0, rows, group):  # a block is read once from memory, and again from a cache
            to = out + (row * stride + block * LANES) * 4
            multiply(halves, min(group, rows - row), x + row * depth * 4, w + block * size, to, stride, depth, CHAIN, 1, 0)


class Blocks:
    """A matrix ``[out_features, in_features]`` of float32 or bfloat16 in blocks, to multiply rows of float32 with."""

    def __init__(self, weight: Tensor) -> None:
        self.out_features, depth = weight.shape
        half = weight.to(torch.bfloat16)
        self.halves = bool(torch.equal(half.to(weight.dtype), weight))
        filled = F.pad(half if self.halves else weight, (0, 0, 0, -self.out_features % LANES))
        self.blocks = filled.view(-1, LANES, depth).transpose(1, 2).contiguous()

    @property
    def width(self) -> int:
        """Numbers of a row of the product, those that fill its last block included."""
        return int(self.blocks.shape[0]) * LANES

    def steps(self, x: int, room: int, rows: int, out: int) -> Iterator[Step]:
        """The product of rows that lie one after another, to ``[rows, width]`` at ``out``; ``room`` is for as many rows."""
        count, depth, _ = self.blocks.shape
        group = group_of(rows)
        if rows > 1:
            yield Step(_interleave, (x, room, rows, depth, group))
        given = room if rows > 1 else x
        yield Step(_multiply, (given, self.blocks.data_ptr(), out, rows, depth, self.width, count, group, self.halves))


def group_of(rows: int) -> int:
    """Rows of all tiles but the last."""
    return -(-rows // -(-rows // ROWS))


@kernel
def _interleave(given: int) -> None:
    """Groups of rows one after another, ``[depth, rows]`` each."""
    numbers, to = floats(integer(given, 0)), floats(integer(given, 1))
    rows, depth, group = integer(given, 2), integer(given, 3), integer(given, 4)
    here, threads = thread_num(), num_threads()
    for row in range(rows * here // threads, rows * (here + 1) // threads):
        first = row // group * group
        count = min(group, rows - first)
        for place in range(depth):
            to[first * depth + place * count + row - first] = numbers[row * depth + place]
