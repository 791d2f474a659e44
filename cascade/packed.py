"""Linear layers that take a few rows at once, for CPUs in float32.

PyTorch multiplies one row with a matrix as fast as memory hands the matrix over. Two rows or more take a general product, which
puts the matrix into an order of its own first, in every pass: with weights larger than the caches two rows cost nearly two
passes. oneDNN takes matrices that were put in its order once; one row is faster with the plain ones, so both are kept where
there is memory for it.
"""

from typing import TypeGuard

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cascade.devices import host_memory

LARGE = 2**24  # weights of a network; fewer stay in the caches, and have nothing to gain
SMALL = 2**16  # weights of a layer that is left as it is
EXPECTED_ROWS = 8  # for which the order is chosen
SPARE = 4  # times the copies' size that must be free


class PackedLinear(nn.Linear):
    """A linear layer with a copy of its weight in oneDNN's order."""

    packed: Tensor

    def forward(self, input: Tensor) -> Tensor:
        rows = input.numel() // self.in_features
        if rows < 2:
            return F.linear(input, self.weight, self.bias)
        if rows == 2:  # takes oneDNN longer than three
            flat = input.reshape(2, -1)
            return self._product(torch.cat((flat, flat[:1])))[:2].reshape(*input.shape[:-1], -1)
        return self._product(input)

    def _product(self, input: Tensor) -> Tensor:
        out: Tensor = torch.ops.mkldnn._linear_pointwise(input, self.packed, self.bias, "none", [], "")
        return out


def pack(network: nn.Module) -> int:
    """Pack the linear layers of ``network``, where that is of use and there is memory for the copies; how many."""
    if not (torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")):
        return 0
    layers = [module for module in network.modules() if _gains(module)]
    size = sum(layer.weight.numel() for layer in layers)
    if size < LARGE or host_memory() < SPARE * 4 * size:
        return 0
    for layer in layers:
        packed = torch.ops.mkldnn._reorder_linear_weight(layer.weight.data, EXPECTED_ROWS)
        layer.__class__ = PackedLinear
        layer.packed = packed
    return len(layers)


def _gains(module: nn.Module) -> TypeGuard[nn.Linear]:
    if type(module) is not nn.Linear:  # not of a quantised or an adapted layer
        return False
    weight = module.weight.data
    plain = type(weight) is Tensor and weight.device.type == "cpu" and weight.dtype is torch.float32
    return plain and weight.numel() >= SMALL
