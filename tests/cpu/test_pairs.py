"""Products in bfloat16 by matrix tiles: the numbers, and bits that depend on nothing but the row."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cascade.cpu.linear import Linear
from cascade.cpu.matrix_tile import has_matrix_tiles
from tests.cpu.test_product import SIZES

if not has_matrix_tiles():
    pytest.skip("this processor has no tiles for bfloat16", allow_module_level=True)


@pytest.mark.parametrize("size", SIZES, ids=str)
def test_products_are_those_of_rounded_numbers(size: tuple[int, int]) -> None:
    """Guards matrices that are filled up, ends of tiles, and rounding to the nearest."""
    noise = torch.Generator().manual_seed(0)
    weight, x = torch.randn(size, generator=noise), torch.randn(77, size[1], generator=noise)
    expected = (x.bfloat16().double() @ weight.bfloat16().double().t()).float()
    layer = Linear(weight.bfloat16())
    torch.testing.assert_close(layer(x), expected, rtol=1e-4, atol=1e-4)
    assert layer(x[:0]).shape == (0, size[0])


@given(rows=st.integers(1, 70), at=st.integers(0, 69), size=st.sampled_from(SIZES))
def test_a_row_has_its_bits_whatever_the_others_are(rows: int, at: int, size: tuple[int, int]) -> None:
    """Guards the law of bits: passes of each size are cut into tiles in another way."""
    noise = torch.Generator().manual_seed(rows)
    layer, x = Linear(torch.randn(size, generator=noise).bfloat16()), torch.randn(rows, size[1], generator=noise)
    assert torch.equal(layer(x)[at % rows], layer(x[at % rows][None])[0])
    assert torch.equal(layer(x)[: rows // 2], layer(x[: rows // 2]))


def test_numbers_that_are_none_stay_so() -> None:
    """Guards the check of logits at load: what overflows must not come out as a number."""
    x = torch.tensor([[torch.inf] * 32, [torch.nan] * 32, [1.0] * 32])
    finite = Linear(torch.ones(16, 32, dtype=torch.bfloat16))(x).isfinite().all(-1).tolist()
    assert finite == [False, False, True]
