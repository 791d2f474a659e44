"""Linear layers, packed: those with one input in one product, and on CPUs in an order that suits a few rows.

Layers of one module that are given the same input in turn, such as those of queries, keys and values, are one product: it has
less to begin and to end than three.

On a CPU PyTorch multiplies one row with a matrix in an order that is not the processor's best, and puts the matrix into
another order in every pass of several rows: with weights larger than the caches two rows in float32 cost nearly two passes.
oneDNN takes matrices that were put in its order once. Its kernels want four rows at least: for one, two or three there are
others, which take longer, and add up in another order. With four or more, a row's product has the same bits whatever the others
are.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TypeGuard

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cascade.engine.devices import host_memory
from cascade.engine.huge_pages import collapse

LARGE = 2**22  # weights of a network in float32; fewer stay in the caches, where one row is quickest as PyTorch does it
MIN_ROWS = 4  # of a product, at least; passes are filled up, see `cascade.engine.model.fill`
EXPECTED_ROWS = 8  # for which the order is chosen
FREE_FACTOR = 4  # times the copies' size that must be free


Times = Callable[[Tensor, Tensor, Tensor | None], Tensor]


class Product:
    """Layers with one input, their weights behind each other. Computed when the first of them asks.

    ``ordered`` has a copy of the weights in oneDNN's order; otherwise the layers' own become parts of one tensor.
    """

    __slots__ = ("_bias", "_input", "_left", "_out", "_parts", "_times", "_weight")

    def __init__(self, layers: Sequence[nn.Linear], ordered: bool) -> None:
        sizes = [layer.out_features for layer in layers]
        self._parts = [(sum(sizes[:place]), size) for place, size in enumerate(sizes)]  # begin, length
        biases = [layer.bias.data for layer in layers if layer.bias is not None]
        self._bias = torch.cat(biases) if biases else None
        self._weight = torch.cat([layer.weight.data for layer in layers]) if len(layers) > 1 else layers[0].weight.data
        self._times: Times = F.linear
        if ordered:
            self._weight = torch.ops.mkldnn._reorder_linear_weight(self._weight, EXPECTED_ROWS)
            collapse(torch.ops.mkldnn.data_ptr(self._weight), torch.ops.mkldnn._nbytes(self._weight))
            self._times = _ordered
        else:
            for layer, part in zip(layers, self._weight.split(sizes), strict=True):
                layer.weight.data = part
        self._input: Tensor | None = None
        self._out: Tensor | None = None
        self._left = 0  # layers that have not had their part

    def part(self, place: int, input: Tensor) -> Tensor:
        """What the layer at ``place`` makes of ``input``, ``[..., out_features]``; keeps no input once all have had theirs."""
        if not input.numel():  # oneDNN takes no empty ones
            return input.new_empty(*input.shape[:-1], self._parts[place][1])
        if len(self._parts) == 1:
            return self._times(input, self._weight, self._bias)
        if input is not self._input or self._out is None:
            self._out = self._times(input, self._weight, self._bias)
            self._input, self._left = input, len(self._parts)
        part = self._out.narrow(-1, *self._parts[place])
        self._left -= 1
        if not self._left:
            self._input = self._out = None
        return part


def _ordered(input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """`F.linear` for a weight in oneDNN's order."""
    rows = input.numel() // input.shape[-1]
    if rows >= MIN_ROWS:
        return _multiply(input, weight, bias)
    filled = F.pad(input.reshape(rows, -1), (0, 0, 0, MIN_ROWS - rows))
    return _multiply(filled, weight, bias)[:rows].view(*input.shape[:-1], -1)


def _multiply(input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    out: Tensor = torch.ops.mkldnn._linear_pointwise.default(input, weight, bias, "none", [], "")
    return out


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


@torch.inference_mode(False)  # the network stays one that others may use, too
@torch.no_grad()
def pack(network: nn.Module, groups: Sequence[Sequence[nn.Linear]] = ()) -> int:
    """Pack the linear layers of ``network``, ``groups`` of them into one product as far as they can be.

    Returns how many are in oneDNN's order: all where there is a kernel and memory for the copies, else none.
    """
    layers = [module for module in network.modules() if _plain(module)]
    if host_memory() < FREE_FACTOR * sum(layer.weight.nbytes for layer in layers if layer.weight.device.type == "cpu"):
        return 0
    ordered = dict.fromkeys(_orderly(layers))
    left = dict.fromkeys(layers)
    for group in groups:
        if len(group) > 1 and all(layer in left for layer in group) and _alike(group):
            _join(group, group[0] in ordered)
            for layer in group:
                del left[layer]
    for layer in ordered.keys() & left.keys():
        _join([layer], True)
    return len(ordered)


def mixes(network: nn.Module) -> bool:
    """Whether it is a mixture of experts: the weights of all experts of a layer are one tensor of three dimensions."""
    return any(weight.dim() > 2 for weight in network.parameters())


def keeps_bits(network: nn.Module, dtype: torch.dtype) -> bool:
    """Whether a row's logits can be expected to have the same bits in every pass on this processor, told without weights.

    In float32 kernels for one to three rows add up in another order. Experts are given as few, and small networks are not put
    in oneDNN's order, which passes are filled up for.
    """
    layers = [layer for layer in network.modules() if isinstance(layer, nn.Linear)]
    if dtype is torch.float32 and (mixes(network) or sum(layer.weight.numel() for layer in layers) < LARGE):
        return False
    noise = torch.Generator().manual_seed(0)
    layer = nn.Linear(384, 1024, bias=False, dtype=dtype)  # a size for which oneDNN is known to have had kernels of both kinds
    with torch.inference_mode():
        layer.weight.copy_(torch.randn(1024, 384, generator=noise))
        product = Product([layer], bool(_orderly([layer], small=0)))
        rows = torch.randn(16, 384, generator=noise).to(dtype)
        return all(torch.equal(product.part(0, rows[:n]), product.part(0, rows)[:n]) for n in (1, 4))


def _join(group: Sequence[nn.Linear], ordered: bool) -> None:
    product = Product(group, ordered)
    for place, layer in enumerate(group):
        # the layer stays what it is to all who look at it: hooks, adapters, plans of ranks, tied weights
        layer.forward = partial(product.part, place)  # type: ignore[method-assign]
    if group[0].weight.device.type == "cuda":
        torch.cuda.empty_cache()  # the weights that were there lie between others, of no use for larger ones


def _orderly(layers: Sequence[nn.Linear], small: int | None = None) -> list[nn.Linear]:
    """Those to be put in oneDNN's order; none of a network in float32 with fewer weights than ``small``, by default `LARGE`."""
    if not (torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")):
        return []
    found = [layer for layer in layers if _gains(layer)]
    weights = sum(layer.weight.numel() for layer in found if layer.weight.dtype is torch.float32)
    return [] if 0 < weights < (LARGE if small is None else small) else found


def _alike(group: Sequence[nn.Linear]) -> bool:
    """Whether these are different layers that may be one."""
    kinds = {(layer.weight.dtype, layer.weight.device, layer.in_features, layer.bias is None) for layer in group}
    return len(kinds) == 1 and len(set(group)) == len(group)


def _plain(module: nn.Module) -> TypeGuard[nn.Linear]:
    """Not a quantised, an adapted or a packed layer."""
    return type(module) is nn.Linear and type(module.weight.data) is Tensor and "forward" not in vars(module)


def _gains(layer: nn.Linear) -> bool:
    if layer.weight.device.type != "cpu":
        return False
    if layer.weight.dtype is torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return layer.weight.dtype is torch.float32
