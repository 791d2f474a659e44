"""Products of a few rows: the numbers, and bits that depend on nothing but the row."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cascade.native.product import Blocks

SIZES = [(16, 1), (1, 16), (100, 37), (384, 513), (33, 1400)]  # of matrices: chains end within, at and behind the depth


@pytest.mark.parametrize("saved", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_products_are_those_of_the_matrix(size: tuple[int, int], saved: torch.dtype) -> None:
    """Guards blocks that are filled up, chains, and weights that are widened on the way."""
    noise = torch.Generator().manual_seed(0)
    weight = torch.randn(size, generator=noise).to(saved).float()
    blocks, x = Blocks(weight), torch.randn(21, size[1], generator=noise)
    assert blocks.halves == (saved is torch.bfloat16)
    expected = (x.double() @ weight.double().t()).float()
    torch.testing.assert_close(blocks.times(x), expected, rtol=1e-4, atol=1e-4)
    assert blocks.times(x[:0]).shape == (0, size[0])


@settings(max_examples=30)
@given(rows=st.integers(1, 40), at=st.integers(0, 39), size=st.sampled_from(SIZES))
def test_a_row_has_its_bits_whatever_the_others_are(rows: int, at: int, size: tuple[int, int]) -> None:
    """Guards the law of bits: rows are grouped, and groups of each size have a loop of their own."""
    noise = torch.Generator().manual_seed(rows)
    blocks, x = Blocks(torch.randn(size, generator=noise)), torch.randn(rows, size[1], generator=noise)
    row = x[at % rows]
    assert torch.equal(blocks.times(x)[at % rows], blocks.times(row[None])[0])


def test_weights_that_bfloat16_cannot_hold_are_kept() -> None:
    """Guards the weights: a single one that would be rounded keeps all as they are."""
    weight = torch.ones(32, 32)
    weight[7, 3] = 1 + 2**-12
    blocks = Blocks(weight)
    assert not blocks.halves
    assert torch.equal(blocks.times(torch.eye(32)), weight.t())
