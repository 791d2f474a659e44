"""Linear layers on a CPU at the speed of memory; the bits of a row do not depend on other rows of the pass.

A matrix is stored in blocks of sixteen columns, each read from beginning to end. Weights that bfloat16 represents exactly, as
in checkpoints saved in bfloat16, are stored in it and widened in registers: the same result with half the memory traffic.

A pass reads every weight; with huge pages it misses the TLB less often. Linux gives huge pages to few programs by default:
replicas request them from the C library before they start (`GLIBC_TUNABLES`). For a program that only imports cascade,
``madvise(MADV_COLLAPSE)`` (Linux 6.1) turns pages that are in use into huge ones.
"""

import ctypes
import sys
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from cascade.cpu.jit import Step, Worker, floats, halves, integer, kernel, num_threads, rounded, run_step, thread_num
from cascade.cpu.layers import Rows, shift_step
from cascade.cpu.processor import has_matrix_tiles, has_pairs
from cascade.cpu.tile import LANES, STEP, Widened, group_of, multiplier, product

MADV_COLLAPSE = 25
PAGE_SIZE = Path("/sys/kernel/mm/transparent_hugepage/hpage_pmd_size")  # the size of huge pages
CHAIN = 512  # terms that are summed in one chain: rounding errors grow with its length


_product, _product_widened = product(multiplier()), product(multiplier(Widened))


@kernel
def _multiply(given: int) -> None:
    _product(given)


@kernel
def _multiply_widened(given: int) -> None:
    _product_widened(given)


@kernel
def _round(given: int) -> None:
    """Round rows to bfloat16, and pad them with zeros."""
    x, out, rows, size, depth = integer(given, 0), integer(given, 1), integer(given, 2), integer(given, 3), integer(given, 4)
    here, threads = thread_num(), num_threads()
    for row in range(rows * here // threads, rows * (here + 1) // threads):
        numbers, to = floats(x + row * size * 4), halves(out + row * depth * 2)
        for place in range(size):
            to[place] = rounded(numbers[place])
        for place in range(size, depth):
            to[place] = 0


@lru_cache
def _multiply_pairs() -> Worker:
    """The kernel for rows and weights in bfloat16 on this processor, which is compiled when first imported."""
    if has_matrix_tiles():
        from cascade.cpu.matrix_tiles import multiply
    else:
        from cascade.cpu.dots import multiply
    return multiply


class Linear:
    """``x W^T + b``.

    With weights in bfloat16 rows are rounded to it on processors with instructions for that, which multiply a pair of places of
    the depth at once: matrix tiles (AMX), or AVX-512. Sums are float32.
    """

    __slots__ = ("_multiply", "_rounds", "bias", "blocks", "in_features", "out_features")

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        """Copy ``weight`` ``[out_features, in_features]``, float32 or bfloat16, in the order of the kernels."""
        weight = weight.detach()
        self.out_features, self.in_features = weight.shape
        self._rounds, half = weight.dtype is torch.bfloat16 and has_pairs(), weight.to(torch.bfloat16)
        in_half = self._rounds or (self.in_features % 2 == 0 and torch.equal(half.to(weight.dtype), weight))
        held, per_word = (half, 2) if in_half else (weight.float(), 1)
        filled = F.pad(held, (0, -self.in_features % STEP if self._rounds else 0, 0, -self.out_features % LANES))
        self.blocks = filled.view(-1, LANES, filled.shape[1] // per_word, per_word).transpose(1, 2).contiguous()
        self._multiply = _multiply_pairs() if self._rounds else _multiply_widened if in_half else _multiply
        collapse(self.blocks.data_ptr(), self.blocks.nbytes)
        self.bias = None if bias is None else bias.detach().float()

    @property
    def width(self) -> int:
        """Columns of the product, with the padding of its last block."""
        return len(self.blocks) * LANES

    @property
    def numbers(self) -> int:
        """Elements of the matrix."""
        return self.blocks.numel()

    def steps(self, x: Rows, room: Rows, rows: int, out: Rows) -> Iterator[Step]:
        """Multiply contiguous rows ``x``; ``room`` is memory for as many rows in bfloat16."""
        count, words, _, per_word = self.blocks.shape
        if self._rounds:
            yield Step(_round, (x.address, room.address, rows, self.in_features, words * per_word))
        given, between = (room.address, words) if self._rounds else (x.address, self.in_features)
        addresses, chain = (given, self.blocks.data_ptr(), out.address), CHAIN // per_word
        yield Step(self._multiply, (*addresses, rows, words, between, self.width, count, group_of(rows), chain))
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
        return out[:, : self.out_features].to(input.dtype).view(*input.shape[:-1], self.out_features)


def collapse(address: int, nbytes: int) -> int:
    """Move memory of this process, and anything that shares its pages, into huge pages; returns how many succeeded.

    Keeps the contents. It is no error if the system has no huge pages, or none free.
    """
    size = _page_size()
    if not size:
        return 0
    pages = range(address // size, -(-(address + nbytes) // size))
    return sum(_libc().madvise(page * size, size, MADV_COLLAPSE) == 0 for page in pages)


@lru_cache
def _page_size() -> int:
    """Bytes of a huge page, 0 if the system has none."""
    try:
        return int(PAGE_SIZE.read_text()) if sys.platform == "linux" else 0
    except (OSError, ValueError):
        return 0


@lru_cache
def _libc() -> ctypes.CDLL:
    libc = ctypes.CDLL(None)
    libc.madvise.argtypes = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
    return libc
