"""Products of a few rows: the numbers, and bits that depend on nothing but the row."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cascade.cpu.linear import Linear
from cascade.cpu.product import Blocks

SIZES = [(16, 1), (1, 16), (100, 37), (384, 513), (33, 1400)]  # of matrices: chains end within, at and after the depth


@pytest.mark.parametrize("saved", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_products_are_those_of_the_matrix(size: tuple[int, int], saved: torch.dtype) -> None:
    """Guards blocks that are filled up, chains, and weights that are widened on the way."""
    noise = torch.Generator().manual_seed(0)
    weight, bias = torch.randn(size, generator=noise).to(saved).float(), torch.randn(size[0], generator=noise)
    layer, x = Linear(weight, bias), torch.randn(3, 7, size[1], generator=noise)
    expected = (x.double() @ weight.double().t() + bias).float()
    torch.testing.assert_close(layer(x), expected, rtol=1e-4, atol=1e-4)
    assert layer(x.bfloat16()).dtype is torch.bfloat16
    assert layer(x[:0]).shape == (0, 7, size[0])


@given(rows=st.integers(1, 40), at=st.integers(0, 39), size=st.sampled_from(SIZES))
def test_a_row_has_its_bits_whatever_the_others_are(rows: int, at: int, size: tuple[int, int]) -> None:
    """Guards the law of bits: rows are grouped, and groups of each size have a loop of their own."""
    noise = torch.Generator().manual_seed(rows)
    layer, x = Linear(torch.randn(size, generator=noise)), torch.randn(rows, size[1], generator=noise)
    assert torch.equal(layer(x)[at % rows], layer(x[at % rows]))


@pytest.mark.parametrize("exact", [True, False])
def test_weights_are_held_in_half_where_that_is_exact(exact: bool) -> None:
    """Guards the weights: a single one that would be rounded keeps all as they are."""
    weight = torch.ones(32, 32)
    weight[7, 3] = 2.0 if exact else 1 + 2**-12
    assert Blocks(weight).blocks.nbytes == weight.nbytes // (2 if exact else 1)
    assert torch.equal(Linear(weight)(torch.eye(32)), weight.t())
