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

from cascade.cpu.jit import Step, Worker, floats, integer, kernel, num_threads, run_step, thread_num
from cascade.cpu.layers import Rows, shift_step
from cascade.cpu.processor import has_matrix_tiles, has_pairs
from cascade.cpu.tile import AT_ONCE, LANES, STEP, group_of, multiply

MADV_COLLAPSE = 25
PAGE_SIZE = Path("/sys/kernel/mm/transparent_hugepage/hpage_pmd_size")  # the size of huge pages
CHAIN = 512  # terms that are summed in one chain: rounding errors grow with its length


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
    for block in range(first, last, AT_ONCE):
        number = min(AT_ONCE, last - block)
        for row in range(0, rows, group):  # blocks are read once from memory, then from a cache
            taken, to = min(group, rows - row), out + (row * stride + block * LANES) * 4
            source = x + row * depth * 4
            multiply(halves, taken, source, w + block * size, to, stride, depth, CHAIN, number, depth * LANES)


@kernel
def _interleave(given: int) -> None:
    """Transpose each group of rows to ``[depth, rows]``."""
    rows, numbers, to = integer(given, 0), floats(integer(given, 2)), floats(integer(given, 3))
    depth, group, here, threads = integer(given, 4), integer(given, 5), thread_num(), num_threads()
    for row in range(rows * here // threads, rows * (here + 1) // threads):
        first = row // group * group
        count = min(group, rows - first)
        for place in range(depth):
            to[first * depth + place * count + row - first] = numbers[row * depth + place]


@lru_cache
def _kernels(pairs: bool) -> tuple[Worker, Worker]:
    """The functions that prepare and multiply rows on this processor; kernels of ``pairs`` are compiled when first imported."""
    if not pairs:
        return _interleave, _multiply
    if has_matrix_tiles():
        from cascade.cpu.matrix_tiles import multiply, prepare
    else:
        from cascade.cpu.dots import multiply, prepare
    return prepare, multiply


class Linear:
    """``x W^T + b``.

    With weights in bfloat16 rows are rounded to it on processors with instructions for that, which multiply a pair of places of
    the depth at once: matrix tiles (AMX), or AVX-512. Sums are float32.
    """

    __slots__ = ("_kernels", "bias", "blocks", "in_features", "out_features")

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        """Copy ``weight`` ``[out_features, in_features]``, float32 or bfloat16, in the order of the kernels."""
        weight = weight.detach()
        self.out_features, self.in_features = weight.shape
        pairs, half = weight.dtype is torch.bfloat16 and has_pairs(), weight.to(torch.bfloat16)
        held = half if torch.equal(half.to(weight.dtype), weight) else weight
        filled = F.pad(held, (0, -self.in_features % STEP if pairs else 0, 0, -self.out_features % LANES))
        together = 2 if pairs else 1
        self.blocks = filled.view(-1, LANES, filled.shape[1] // together, together).transpose(1, 2).contiguous()
        self._kernels = _kernels(pairs)
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
        """Multiply contiguous rows ``x``; ``room`` is memory for as many rows in the order of the kernel."""
        count, places, _, together = self.blocks.shape
        depth, group, (prepare, multiply) = places * together, group_of(rows), self._kernels
        if ordered := rows > 1 or together > 1:
            yield Step(prepare, (rows, self.in_features, x.address, room.address, depth, group))
        given, halves = (room if ordered else x).address, self.blocks.dtype is torch.bfloat16
        yield Step(multiply, (given, self.blocks.data_ptr(), out.address, rows, depth, self.width, count, group, halves))
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
