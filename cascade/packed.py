"""Linear layers that take a few rows at once, for CPUs.

PyTorch multiplies one row with a matrix in an order that is not the processor's best, and puts the matrix into another order
in every pass of several rows: with weights larger than the caches two rows in float32 cost nearly two passes. oneDNN takes
matrices that were put in its order once. Its kernels want four rows at least: for one, two or three there are others, which
take longer, and add up in another order. With four or more, a row's product has the same bits whatever the others are.

Layers of one module that are given the same input in turn, such as those of queries, keys and values, are one product.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TypeGuard

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cascade.devices import host_memory
from cascade.pages import collapse

LARGE = 2**22  # weights of a network in float32; fewer stay in the caches, where one row is quickest as PyTorch does it
ROWS = 4  # of a product, at least; passes are filled up, see `cascade.model.fill`
EXPECTED_ROWS = 8  # for which the order is chosen
SPARE = 4  # times the copies' size that must be free


class Product:
    """Layers with one input, their weights in oneDNN's order behind each other. Computed when the first of them asks."""

    __slots__ = ("_bias", "_input", "_left", "_packed", "_parts", "_sizes")

    def __init__(self, layers: Sequence[nn.Linear]) -> None:
        weight = torch.cat([layer.weight.data for layer in layers]) if len(layers) > 1 else layers[0].weight.data
        self._packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight, EXPECTED_ROWS)
        collapse(torch.ops.mkldnn.data_ptr(self._packed), torch.ops.mkldnn._nbytes(self._packed))
        biases = [layer.bias.data for layer in layers if layer.bias is not None]
        self._bias = torch.cat(biases) if biases else None
        self._sizes = [layer.out_features for layer in layers]
        self._input: Tensor | None = None
        self._parts: Sequence[Tensor] = ()
        self._left = 0  # layers that have not had their part

    def part(self, place: int, input: Tensor) -> Tensor:
        """What the layer at ``place`` makes of ``input``, ``[..., out_features]``; keeps no input once all have had theirs."""
        if len(self._sizes) == 1:
            return self._times(input)
        if input is not self._input:
            self._input, self._parts, self._left = input, self._times(input).split(self._sizes, -1), len(self._sizes)
        part = self._parts[place]
        self._left -= 1
        if not self._left:
            self._input, self._parts = None, ()
        return part

    def _times(self, input: Tensor) -> Tensor:
        rows = input.numel() // input.shape[-1]
        if rows >= ROWS:
            return _linear(input, self._packed, self._bias)
        filled = F.pad(input.reshape(rows, -1), (0, 0, 0, ROWS - rows))
        return _linear(filled, self._packed, self._bias)[:rows].view(*input.shape[:-1], -1)


def _linear(input: Tensor, packed: Tensor, bias: Tensor | None) -> Tensor:
    out: Tensor = torch.ops.mkldnn._linear_pointwise.default(input, packed, bias, "none", [], "")
    return out


class PackedLinear(nn.Linear):
    """A linear layer that is at ``place`` of a product."""

    product: Product
    place: int

    def forward(self, input: Tensor) -> Tensor:
        if not input.numel():
            return F.linear(input, self.weight, self.bias)
        return self.product.part(self.place, input)


@contextmanager
def watch(network: nn.Module) -> Iterator[list[list[nn.Linear]]]:
    """The linear layers that ``network`` uses meanwhile; those of one module that get the same input in turn are together."""
    groups: list[list[nn.Linear]] = []
    parents = {layer: module for module in network.modules() for layer in module.children() if isinstance(layer, nn.Linear)}
    last: Tensor | None = None

    def note(layer: nn.Linear, inputs: tuple[Tensor, ...]) -> None:
        nonlocal last
        given = inputs[0] if inputs else None  # by name, then
        if given is not None and given is last and parents[layer] is parents[groups[-1][-1]]:
            groups[-1].append(layer)
        else:
            groups.append([layer])
        last = given

    hooks = [layer.register_forward_pre_hook(note) for layer in parents]
    try:
        yield groups
    finally:
        for hook in hooks:
            hook.remove()


def pack(network: nn.Module, groups: Sequence[Sequence[nn.Linear]] = ()) -> int:
    """Pack the linear layers of ``network``, where there is a kernel and memory for the copies; how many.

    ``groups`` of layers are one product each, as far as they can be.
    """
    if not (torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")):
        return 0
    layers = [module for module in network.modules() if _gains(module)]
    small = sum(layer.weight.numel() for layer in layers if layer.weight.dtype is torch.float32) in range(1, LARGE)
    if small or host_memory() < SPARE * sum(layer.weight.nbytes for layer in layers):
        return 0
    left = dict.fromkeys(layers)
    for group in [*groups, *([layer] for layer in layers)]:
        if all(layer in left for layer in group) and _alike(group):
            product = Product(group)
            for place, layer in enumerate(group):
                del left[layer]
                layer.__class__ = PackedLinear
                layer.product, layer.place = product, place  # type: ignore[assignment]
    return len(layers)


def _alike(group: Sequence[nn.Linear]) -> bool:
    """Whether these are different layers that may be one."""
    kinds = {(layer.weight.dtype, layer.in_features, layer.bias is None) for layer in group}
    return len(kinds) == 1 and len(set(group)) == len(group)


def _gains(module: nn.Module) -> TypeGuard[nn.Linear]:
    if type(module) is not nn.Linear:  # not of a quantised or an adapted layer
        return False
    weight = module.weight.data
    if type(weight) is not Tensor or weight.device.type != "cpu":
        return False
    if weight.dtype is torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return weight.dtype is torch.float32
