"""Linear layers: the numbers, bits that depend on nothing but the row, and weights in huge pages."""

import ctypes
import platform
from collections.abc import Callable
from mmap import MAP_ANONYMOUS, MAP_PRIVATE, mmap
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from cascade.cpu import linear
from cascade.cpu.linear import Linear
from cascade.cpu.processor import has_pairs

SIZES = [(16, 1), (1, 16), (100, 37), (384, 513), (33, 1400)]  # of matrices: chains end within, at and after the depth
# rows are rounded for the last ones, where the processor multiplies bfloat16
WEIGHTS: dict[str, Callable[[Tensor], Tensor]] = {
    "float32": lambda weight: weight,
    "float32 that bfloat16 holds": lambda weight: weight.bfloat16().float(),
    "bfloat16": Tensor.bfloat16,
}


@pytest.mark.parametrize("kind", WEIGHTS)
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_products_are_those_of_the_matrix(size: tuple[int, int], kind: str) -> None:
    """Guards blocks that are filled up, chains, ends of tiles, and weights that are widened, or rows rounded, on the way."""
    noise = torch.Generator().manual_seed(0)
    weight, bias = WEIGHTS[kind](torch.randn(size, generator=noise)), torch.randn(size[0], generator=noise)
    layer, x = Linear(weight, bias), torch.randn(7, 11, size[1], generator=noise)
    rows = x.bfloat16() if kind == "bfloat16" and has_pairs() else x
    torch.testing.assert_close(layer(x), (rows.double() @ weight.double().t() + bias).float(), rtol=1e-4, atol=1e-4)
    assert layer(x.bfloat16()).dtype is torch.bfloat16
    assert layer(x[:0]).shape == (0, 11, size[0])


@given(rows=st.integers(1, 70), at=st.integers(0, 69), size=st.sampled_from(SIZES), kind=st.sampled_from(sorted(WEIGHTS)))
def test_a_row_has_its_bits_whatever_the_others_are(rows: int, at: int, size: tuple[int, int], kind: str) -> None:
    """Guards the law of bits: rows are grouped, and groups of each size have a loop of their own."""
    noise = torch.Generator().manual_seed(rows)
    layer, x = Linear(WEIGHTS[kind](torch.randn(size, generator=noise))), torch.randn(rows, size[1], generator=noise)
    assert torch.equal(layer(x)[at % rows], layer(x[at % rows]))
    assert torch.equal(layer(x)[: rows // 2], layer(x[: rows // 2]))


def test_numbers_that_are_none_stay_so() -> None:
    """Guards the check of logits at load: what overflows must not come out as a number."""
    x = torch.tensor([[torch.inf] * 32, [torch.nan] * 32, [1.0] * 32])
    finite = Linear(torch.ones(16, 32, dtype=torch.bfloat16))(x).isfinite().all(-1).tolist()
    assert finite == [False, False, True]


@pytest.mark.parametrize("exact", [True, False])
def test_weights_are_held_in_half_where_that_is_exact(exact: bool) -> None:
    """Guards the weights: a single one that would be rounded keeps all as they are."""
    weight = torch.ones(32, 32)
    weight[7, 3] = 2.0 if exact else 1 + 2**-12
    assert Linear(weight).blocks.nbytes == weight.nbytes // (2 if exact else 1)
    assert torch.equal(Linear(weight)(torch.eye(32)), weight.t())


def _large_pages() -> int:
    """Bytes of this process in large pages."""
    lines = Path("/proc/self/smaps").read_text().splitlines()
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("AnonHugePages:"))


@pytest.mark.skipif(
    not linear.PAGE_SIZE.exists() or tuple(map(int, platform.release().split(".")[:2])) < (6, 1),
    reason="this system makes no large pages of memory that is in use",
)
def test_memory_is_put_into_large_pages() -> None:
    """Guards against asking in vain: the system must count at least as many of them as we say there are."""
    size = int(linear.PAGE_SIZE.read_text())
    with mmap(-1, 8 * size, flags=MAP_PRIVATE | MAP_ANONYMOUS) as memory:
        memory.write(b"x" * len(memory))
        address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        before = _large_pages()
        assert 7 <= linear.collapse(address, len(memory)) <= 9
        assert _large_pages() - before >= 6 * size
        assert memory[:] == b"x" * len(memory)


def test_what_has_no_large_pages_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards addresses that are nobody's, and systems without large pages."""
    assert linear.collapse(0, 4096) == 0
    monkeypatch.setattr(linear, "PAGE_SIZE", Path("/nowhere"))
    linear._page_size.cache_clear()
    assert linear.collapse(torch.arange(3 * 2**20).data_ptr(), 2**24) == 0
    linear._page_size.cache_clear()
