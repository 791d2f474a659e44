"""Norms, rotary positions and gated activations against PyTorch's."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from cascade.native.layers import GELU_TANH, SILU, gated, rms_norm, rotate

ROWS = [1, 3, 50, 200]  # the last ones are more than a brief worker does: several threads share them


def rows_of(rows: int, size: int, scale: float = 1.0) -> Tensor:
    return torch.randn(rows, size, generator=torch.Generator().manual_seed(rows)) * scale


@pytest.mark.parametrize("rows", ROWS)
def test_norms(rows: int) -> None:
    """Guards whole rows, and heads in a part of wider ones."""
    x, weight = rows_of(rows, 301), torch.linspace(-1, 2, 301)
    torch.testing.assert_close(rms_norm(x, weight, 1e-6), F.rms_norm(x, (301,), weight, 1e-6), rtol=1e-5, atol=1e-6)
    x, weight = rows_of(rows, 384), torch.linspace(-1, 2, 96)
    expected = F.rms_norm(x[:, :192].reshape(-1, 96), (96,), 1 + weight, 1e-5).view(rows, 192)
    torch.testing.assert_close(rms_norm(x[:, :192], weight, 1e-5, 1.0), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("turned", [64, 96])
@pytest.mark.parametrize("rows", ROWS)
def test_rotary_positions(rows: int, turned: int) -> None:
    """Guards which numbers are pairs, and those of a head that stay."""
    x, angles = rows_of(rows, 384), rows_of(rows, turned // 2).repeat(1, 2)
    heads, half = x.view(rows, 4, 96), turned // 2
    cos, sin = angles.cos()[:, None], angles.sin()[:, None]
    swapped = torch.cat([-heads[..., half:turned], heads[..., :half]], dim=-1)
    expected = torch.cat([heads[..., :turned] * cos + swapped * sin, heads[..., turned:]], dim=-1)
    found = x.clone()
    rotate(found, 96, angles.cos(), angles.sin())
    torch.testing.assert_close(found.view(rows, 4, 96), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("scale", [1.0, 100.0])
def test_gated_activations(rows: int, scale: float) -> None:
    """Guards the exponentials, far out too, where one that overflows would make what is not a number."""
    x = rows_of(rows, 602, scale)
    gate, up = x.split(301, dim=1)
    torch.testing.assert_close(gated(x, SILU), F.silu(gate) * up, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(gated(x, GELU_TANH), F.gelu(gate, approximate="tanh") * up, rtol=1e-5, atol=2e-5 * scale)
