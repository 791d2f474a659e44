"""Products in bfloat16 with sums in float32, on processors with instructions for them: matrix tiles (AMX), or AVX-512.

Rows are rounded to bfloat16. A matrix lies in blocks of sixteen columns, in pairs of places of the depth, which one instruction
multiplies and adds up.
"""

from collections.abc import Iterator
from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor

from cascade.cpu.jit import Step, Worker
from cascade.cpu.processor import has_matrix_tiles
from cascade.cpu.tile import LANES, STEP, group_of


class Pairs:
    """A matrix ``[out_features, in_features]`` rounded to bfloat16."""

    def __init__(self, weight: Tensor) -> None:
        self.out_features, self.in_features = weight.shape
        filled = F.pad(weight.to(torch.bfloat16), (0, -self.in_features % STEP, 0, -self.out_features % LANES))
        pairs = filled.view(-1, LANES, filled.shape[1] // 2, 2)
        self.blocks = pairs.transpose(1, 2).contiguous()  # [blocks, depth / 2, 16, 2]

    @property
    def depth(self) -> int:
        """Elements of a row to multiply, with padding."""
        return 2 * int(self.blocks.shape[1])

    def steps(self, x: int, room: int, rows: int, out: int) -> Iterator[Step]:
        """Multiply contiguous rows at ``x`` to ``[rows, width]`` at ``out``; ``room`` is memory for the rounded rows."""
        (prepare, multiply), group = _kernels(), group_of(rows)
        yield Step(prepare, (rows, self.in_features, x, room, self.depth, group))
        width, count = len(self.blocks) * LANES, len(self.blocks)
        yield Step(multiply, (room, self.blocks.data_ptr(), out, rows, self.depth, width, count, group))


@lru_cache
def _kernels() -> tuple[Worker, Worker]:
    """What rounds rows and what multiplies them on this processor, compiled when it is imported."""
    if has_matrix_tiles():
        from cascade.cpu.matrix_tiles import multiply, prepare
    else:
        from cascade.cpu.dots import multiply, prepare
    return prepare, multiply
