"""Linear layers, packed: those with one input in one product, and on CPUs in an order that suits a few rows.

Layers of one module that are given the same input in turn, such as those of queries, keys and values, are one product: it has
less to begin and to end than three.

On a CPU PyTorch multiplies one row with a matrix in an order that is not the processor's best, and puts the matrix into
another order in every pass of several rows. In float32 our own products take it in blocks, see `cascade.native.product`: a
row has the same bits whatever the others are. In bfloat16, where the processor has it, oneDNN takes matrices that were put in
its order once. Its kernels want four rows at least: for one, two or three there are others, which take longer, and add up in
another order.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, TypeAlias, TypeGuard

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from cascade.engine.huge_pages import collapse
from cascade.engine.memory import host_memory
from cascade.native.product import Blocks

if TYPE_CHECKING:
    from cascade.native.pairs import Pairs

MIN_ROWS = 4  # of a product by oneDNN, at least; passes are filled up, see `cascade.engine.model.fill`
EXPECTED_ROWS = 8  # for which its order is chosen
FREE_FACTOR = 4  # times the copies' size that must be free

Linear: TypeAlias = nn.Linear | Conv1D  # of GPT-2 and its kin, which is one with its matrix transposed
Times: TypeAlias = Callable[[Tensor], Tensor]  # [..., in_features] to [..., out_features]


class InBlocks:
    """Our own product of float32 on a CPU, with weights in float32, or in bfloat16 where there are tiles for it."""

    __slots__ = ("bias", "blocks")

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self.blocks = _blocks(weight)
        self.bias = None if bias is None else bias.float()
        collapse(self.blocks.blocks.data_ptr(), self.blocks.blocks.nbytes)

    def __call__(self, input: Tensor) -> Tensor:
        out = self.blocks.times(input.reshape(-1, input.shape[-1]).float())
        if self.bias is not None:
            out += self.bias
        return out.view(*input.shape[:-1], out.shape[1])


def _blocks(weight: Tensor) -> "Blocks | Pairs":
    if weight.dtype is torch.float32:
        return Blocks(weight)
    from cascade.native.pairs import Pairs  # its kernels are compiled when it is imported, for processors that have tiles

    return Pairs(weight)


def in_onednns_order(weight: Tensor, bias: Tensor | None) -> Times:
    """The product of oneDNN."""
    ordered = torch.ops.mkldnn._reorder_linear_weight(weight, EXPECTED_ROWS)
    collapse(torch.ops.mkldnn.data_ptr(ordered), torch.ops.mkldnn._nbytes(ordered))

    def times(input: Tensor) -> Tensor:
        rows = input.numel() // input.shape[-1]
        if not rows:  # it takes none
            return input.new_empty(*input.shape[:-1], weight.shape[0])
        if rows >= MIN_ROWS:
            return _multiply(input, ordered, bias)
        filled = F.pad(input.reshape(rows, -1), (0, 0, 0, MIN_ROWS - rows))
        return _multiply(filled, ordered, bias)[:rows].view(*input.shape[:-1], -1)

    return times


def _multiply(input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    out: Tensor = torch.ops.mkldnn._linear_pointwise.default(input, weight, bias, "none", [], "")
    return out


class Product:
    """Layers with one input, their weights behind each other. Computed when the first of them asks."""

    __slots__ = ("_input", "_left", "_out", "_parts", "sizes", "whole")

    def __init__(self, layers: Sequence[Linear], pack: Callable[[Tensor, Tensor | None], Times] | None) -> None:
        """``pack`` makes a copy of the weights in an order of its own; without it the layers' become parts of one tensor."""
        weights = [_matrix(layer) for layer in layers]
        sizes = [len(weight) for weight in weights]
        self._parts = [(sum(sizes[:place]), size) for place, size in enumerate(sizes)]  # begin, length
        biases = [layer.bias.data for layer in layers if layer.bias is not None]
        bias = torch.cat(biases) if biases else None
        weight = torch.cat(weights) if len(layers) > 1 else weights[0]
        if pack is not None:
            self.whole = pack(weight, bias)
        else:
            for layer, part in zip(layers, weight.split(sizes), strict=True):
                layer.weight.data = part
            self.whole = partial(F.linear, weight=weight, bias=bias)
        self.sizes = sizes  # out_features of the layers
        self._input: Tensor | None = None
        self._out: Tensor | None = None
        self._left = 0  # layers that have not had their part

    def part(self, place: int, input: Tensor) -> Tensor:
        """What the layer at ``place`` makes of ``input``, ``[..., out_features]``; keeps no input once all have had theirs."""
        if len(self._parts) == 1:
            return self.whole(input)
        if input is not self._input or self._out is None:
            self._out = self.whole(input)
            self._input, self._left = input, len(self._parts)
        part = self._out.narrow(-1, *self._parts[place])
        self._left -= 1
        if not self._left:
            self._input = self._out = None
        return part


def product_of(layers: Sequence[object]) -> Product | None:
    """The product that is made of just these layers, in their order."""
    forwards = [vars(layer).get("forward") for layer in layers]
    products = {getattr(getattr(forward, "func", None), "__self__", None) for forward in forwards}
    product = products.pop()
    if products or not isinstance(product, Product) or len(product._parts) != len(layers):
        return None
    in_order = all(getattr(forward, "args", None) == (place,) for place, forward in enumerate(forwards))
    return product if in_order else None


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
def pack(network: nn.Module, groups: Sequence[Sequence[nn.Linear]] = (), *, wide: bool = False) -> int:
    """Pack the linear layers of ``network``, ``groups`` of them into one product as far as they can be.

    A ``wide`` one, see `cascade.engine.wide`, is packed by our own products. Returns how many rows passes must have so that
    a row has the same bits in all of them, as far as products go.
    """
    layers = [module for module in network.modules() if is_plain(module)]
    if not wide and host_memory() < FREE_FACTOR * sum(
        layer.weight.nbytes for layer in layers if layer.weight.device.type == "cpu"
    ):
        return 1
    left = dict.fromkeys(layers)
    for group in groups:
        if len(group) > 1 and all(layer in left for layer in group) and _alike(group):
            _join(group, wide)
            for layer in group:
                del left[layer]
    for layer in left:
        if _packer(layer, wide) is not None:
            _join([layer], wide)
    others = [parameter for parameter in network.parameters() if parameter.dtype is not torch.float32]
    return MIN_ROWS if (others and not wide) or mixes(network) else 1


def mixes(network: nn.Module) -> bool:
    """Whether it is a mixture of experts: the weights of all experts of a layer are one tensor of three dimensions."""
    return any(weight.dim() > 2 for weight in network.parameters())


def keeps_bits(network: nn.Module, dtype: torch.dtype) -> bool:
    """Whether a row's logits can be expected to have the same bits in every pass on this processor, told without weights.

    Experts, which are not packed, are given as few rows as they get; in float32 their kernels for few add up in another order.
    """
    if dtype is torch.float32:
        return not mixes(network)
    noise = torch.Generator().manual_seed(0)
    layer = nn.Linear(384, 1024, bias=False, dtype=dtype)  # a size for which oneDNN is known to have had kernels of both kinds
    with torch.inference_mode():
        layer.weight.copy_(torch.randn(1024, 384, generator=noise))
        product = Product([layer], _packer(layer))
        rows = torch.randn(16, 384, generator=noise).to(dtype)
        return all(torch.equal(product.part(0, rows[:n]), product.part(0, rows)[:n]) for n in (1, 4))


def _join(group: Sequence[Linear], wide: bool) -> None:
    product = Product(group, _packer(group[0], wide))
    for place, layer in enumerate(group):
        # the layer stays what it is to all who look at it: hooks, adapters, plans of ranks, tied weights
        layer.forward = partial(product.part, place)  # type: ignore[method-assign]
    if group[0].weight.device.type == "cuda":
        torch.cuda.empty_cache()  # the weights that were there lie between others, of no use for larger ones


def _packer(layer: Linear, wide: bool = False) -> Callable[[Tensor, Tensor | None], Times] | None:
    """The best order for the weights of a layer, if there is a better one than PyTorch's."""
    if layer.weight.device.type != "cpu":
        return None
    if layer.weight.dtype is torch.float32 or wide:
        return InBlocks
    ordered = torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")
    if ordered and layer.weight.dtype is torch.bfloat16 and torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return in_onednns_order
    return None


def _alike(group: Sequence[Linear]) -> bool:
    """Whether these are different layers that may be one."""
    kinds = {(layer.weight.dtype, layer.weight.device, _matrix(layer).shape[1], layer.bias is None) for layer in group}
    return len(kinds) == 1 and len(set(group)) == len(group)


def _matrix(layer: Linear) -> Tensor:
    """``[out_features, in_features]``."""
    return layer.weight.data.t() if isinstance(layer, Conv1D) else layer.weight.data


def is_plain(module: nn.Module) -> TypeGuard[Linear]:
    """Not a quantised, an adapted or a packed layer."""
    return type(module) in (nn.Linear, Conv1D) and type(module.weight.data) is Tensor and "forward" not in vars(module)
