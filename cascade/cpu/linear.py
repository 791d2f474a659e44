"""Linear layers in float32 on a CPU: a row's bits depend on no other row of a pass."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from cascade.cpu.huge_pages import collapse
from cascade.cpu.jit import Step, run_step
from cascade.cpu.layers import Rows, shift_step
from cascade.cpu.matrix_tile import STEP, has_matrix_tiles
from cascade.cpu.product import Blocks

if TYPE_CHECKING:
    from cascade.cpu.pairs import Pairs


class Linear:
    """``x W^T + b``. Where the processor has matrix tiles, weights in bfloat16 are multiplied with rows rounded to it."""

    __slots__ = ("bias", "matrix")

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        """``weight`` ``[out_features, in_features]`` in float32 or bfloat16, of which a copy is held."""
        self.matrix = _matrix(weight.detach())
        collapse(self.matrix.blocks.data_ptr(), self.matrix.blocks.nbytes)
        self.bias = None if bias is None else bias.detach().float()

    @property
    def width(self) -> int:
        """Numbers of a row of the product, those that fill its last block included."""
        return self.matrix.width

    @property
    def numbers(self) -> int:
        """Of the matrix."""
        return self.matrix.blocks.numel()

    def steps(self, x: Rows, room: Rows, rows: int, out: Rows) -> Iterator[Step]:
        """The product of rows that lie one after another; ``room`` is for as many, put into the order of the product."""
        yield from self.matrix.steps(x.address, room.address, rows, out.address)
        if self.bias is not None:
            yield shift_step(out, rows, self.bias)

    def __call__(self, input: Tensor) -> Tensor:
        """``[..., in_features]`` to ``[..., out_features]`` in the dtype of ``input``."""
        x = input.reshape(-1, input.shape[-1]).float().contiguous()
        rows, depth = x.shape
        out, room = x.new_empty(rows, self.width), x.new_empty(rows, depth + STEP)
        if rows:
            for step in self.steps(Rows.of(x), Rows.of(room), rows, Rows.of(out)):
                run_step(step, rows * self.numbers)
        size = self.matrix.out_features
        return out[:, :size].to(input.dtype).view(*input.shape[:-1], size)


def _matrix(weight: Tensor) -> "Blocks | Pairs":
    if weight.dtype is not torch.bfloat16 or not has_matrix_tiles():
        return Blocks(weight)
    from cascade.cpu.pairs import Pairs  # its kernels are compiled when it is imported, for processors that have tiles

    return Pairs(weight)
