"""Linear layers that take a few rows at once, for CPUs.

PyTorch multiplies one row with a matrix in an order that is not the processor's best, and puts the matrix into another order
in every pass of several rows: with weights larger than the caches two rows in float32 cost nearly two passes. oneDNN takes
matrices that were put in its order once. Its kernels want four rows at least: for one, two or three there are others, which
take longer, and add up in another order. With four or more, a row's product has the same bits whatever the others are.
"""

from typing import TypeGuard

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cascade.devices import host_memory

LARGE = 2**22  # weights of a network in float32; fewer stay in the caches, where one row is quickest as PyTorch does it
ROWS = 4  # of a product, at least; passes are filled up, see `cascade.model.fill`
EXPECTED_ROWS = 8  # for which the order is chosen
SPARE = 4  # times the copies' size that must be free


class PackedLinear(nn.Linear):
    """A linear layer with a copy of its weight in oneDNN's order."""

    packed: Tensor

    def forward(self, input: Tensor) -> Tensor:
        rows = input.numel() // self.in_features
        if not rows:
            return F.linear(input, self.weight, self.bias)
        if rows >= ROWS:
            return self._product(input)
        filled = F.pad(input.reshape(rows, -1), (0, 0, 0, ROWS - rows))
        return self._product(filled)[:rows].view(*input.shape[:-1], -1)

    def _product(self, input: Tensor) -> Tensor:
        out: Tensor = torch.ops.mkldnn._linear_pointwise(input, self.packed, self.bias, "none", [], "")
        return out


def pack(network: nn.Module) -> int:
    """Pack the linear layers of ``network``, where there is a kernel and memory for the copies; how many."""
    if not (torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")):
        return 0
    layers = [module for module in network.modules() if _gains(module)]
    small = sum(layer.weight.numel() for layer in layers if layer.weight.dtype is torch.float32) in range(1, LARGE)
    if small or host_memory() < SPARE * sum(layer.weight.nbytes for layer in layers):
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
    if type(weight) is not Tensor or weight.device.type != "cpu":
        return False
    if weight.dtype is torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return weight.dtype is torch.float32
