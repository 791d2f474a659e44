"""Keys and values of a session in one piece, and PyTorch's attention over them: for devices other than CPUs."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

from cascade.cpu.attention import Kind
from cascade.cpu.cache import Span
from cascade.engine.network.attention import Native, Windows
from cascade.scorer import BLOCK, TILE, grown_capacity

SCORES = 2**26  # scores held at once, of queries with keys
SHARED = 2**22  # numbers in a mask that is kept from layer to layer


class Cache:
    """Keys and values of one session, per layer ``[1, kv_heads, capacity, head_dim]``; K and V may differ in size.

    Storage is contiguous, so that attention reads it in place. Room is made ahead of a pass by `reserve`, or as it is needed.
    """

    __slots__ = ("_layers", "capacity")
    block = TILE
    position = 0  # the first position that it holds

    def __init__(self) -> None:
        self.capacity = 0  # positions
        self._layers: dict[int, tuple[Tensor, Tensor]] = {}

    def write(self, layer: int, start: int, key: Tensor, value: Tensor) -> None:
        """Store ``[kv_heads, n, head_dim]`` at ``start``."""
        end = start + key.shape[1]
        if end > self.capacity:
            self.reserve(grown_capacity(end, self.capacity))
        if layer not in self._layers:
            self._layers[layer] = _resized(key[None, :, :0], self.capacity), _resized(value[None, :, :0], self.capacity)
        keys, values = self._layers[layer]
        keys[0, :, start:end] = key
        values[0, :, start:end] = value

    def read(self, layer: int, start: int, end: int) -> tuple[Tensor, Tensor]:
        """Keys and values of these positions of the text, ``[1, kv_heads, n, head_dim]``."""
        keys, values = self._layers[layer]
        return keys[:, :, start:end], values[:, :, start:end]

    @torch.inference_mode()
    def reserve(self, positions: int) -> None:
        """Make room for ``positions``, in whole blocks; what is written stays."""
        positions = -(-positions // self.block) * self.block
        if positions > self.capacity:
            for layer, (keys, values) in self._layers.items():  # one at a time: memory peaks by a layer, not by a cache
                self._layers[layer] = _resized(keys, positions), _resized(values, positions)
            self.capacity = positions

    @torch.inference_mode()
    def reuse(self, source: "Cache", positions: int) -> None:
        """Copy the first ``positions`` of ``source``, bit by bit; there must be room for them."""
        for layer in source._layers:
            keys, values = source.read(layer, 0, positions)
            self.write(layer, 0, keys[0], values[0])

    def fork(self, position: int) -> "Fork":
        """Another end of this text, from ``position`` on; it takes memory as it is written."""
        return Fork(self, position)

    @torch.inference_mode()
    def join(self, fork: "Fork") -> None:
        """Copy what ``fork`` holds, bit by bit, and free it."""
        for layer in fork._layers:
            keys, values = fork.read(layer, fork.position, fork.end)
            self.write(layer, fork.position, keys[0], values[0])
        fork.free()

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for pair in self._layers.values() for tensor in pair)

    def free(self) -> None:
        self._layers.clear()
        self.capacity = 0


class Fork(Cache):
    """Keys and values of one session from ``position`` on; those before it are its base's, and copied where they are read."""

    __slots__ = ("_base", "end", "position")
    block = BLOCK

    def __init__(self, base: Cache, position: int) -> None:
        super().__init__()
        self._base = base
        self.position = self.end = position  # the first one that it holds, and the one after its last

    def write(self, layer: int, start: int, key: Tensor, value: Tensor) -> None:
        """Store ``[kv_heads, n, head_dim]`` at ``start``; what was held after them is void."""
        self.end = start + key.shape[1]
        super().write(layer, start - self.position, key, value)

    def read(self, layer: int, start: int, end: int) -> tuple[Tensor, Tensor]:
        keys, values = super().read(layer, max(0, start - self.position), max(0, end - self.position))
        if start >= self.position:
            return keys, values
        base_keys, base_values = self._base.read(layer, start, min(end, self.position))
        return torch.cat([base_keys, keys], 2), torch.cat([base_values, values], 2)


def _resized(old: Tensor, capacity: int) -> Tensor:
    new = old.new_zeros(*old.shape[:2], capacity, old.shape[3])
    new[:, :, : old.shape[2]] = old
    return new


@dataclass(slots=True)
class Pass:
    """The rows of one forward, on their way through the model to the attention function."""

    spans: Sequence[Span]
    windows: Windows
    masks: dict[tuple[int, int, int | None, int], Tensor] = field(default_factory=dict)  # shared by layers, see `_mask`

    def __post_init__(self) -> None:
        self.spans = sorted(self.spans, key=lambda span: isinstance(span.cache, Fork))  # forks see what their bases write

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, kind: Kind) -> Tensor:
        """Write, and attend: ``[1, total_tokens, heads, head_dim]`` of ``[1, heads, total_tokens, head_dim]``."""
        # A wrong draft may overflow. Attention multiplies what a row does not see by 0, and 0 times infinity is not 0.
        keys, values = (part[0].nan_to_num(0.0, 0.0, 0.0) for part in (key, value))
        out = value.new_zeros(query.shape[2], query.shape[1], value.shape[3])
        for span in self.spans:
            part = slice(span.begin, span.end)
            span.cache.write(layer, span.start, keys[:, part], values[:, part])
            out[part] = self._row(span, layer, query[0, :, part], kind)
        return out[None]

    def _row(self, span: Span, layer: int, query: Tensor, kind: Kind) -> Tensor:
        """``[n, heads, value_size]`` of a query ``[heads, n, head_dim]`` over what the row's store holds."""
        (heads, n, _), window, pieces = query.shape, self.windows[layer], []
        most = max(1, SCORES // (heads * (span.start + n)))
        for begin in range(0, n, most):
            end = min(n, begin + most)
            first = 0 if window is None else max(0, span.start + begin - window + 1)
            key, value = span.cache.read(layer, first, span.start + end)
            # heads that share keys become queries of one head: nothing is copied for them
            folded = query[:, begin:end].reshape(1, key.shape[1], -1, query.shape[2])
            mask = None if end - begin == 1 else self._mask(span, (begin, end), first, window, heads // key.shape[1], query)
            if kind.softcap is None and kind.sinks is None:
                out = F.scaled_dot_product_attention(folded, key, value, attn_mask=mask, scale=kind.scaling)
            else:
                out = _written_out(folded, key, value, mask, kind)
            pieces.append(out.view(heads, end - begin, -1).transpose(0, 1))
        return torch.cat(pieces)

    def _mask(self, span: Span, queries: tuple[int, int], first: int, window: int | None, group: int, like: Tensor) -> Tensor:
        """What is added to scores of a row's ``queries`` with keys from position ``first`` on: 0, or -inf for what is hidden.

        ``[group * n, keys]`` in the dtype of ``like``, for the queries of all heads that share keys.
        """
        begin, end = queries
        name = (span.begin, begin, window, group)
        if name in self.masks:
            return self.masks[name]
        at = span.start + begin - first
        mask = like.new_full((end - begin, span.start + end - first), -torch.inf)
        mask = mask.triu(at + 1) if window is None else mask.triu(at + 1) + mask.tril(at - window)
        mask = mask.repeat(group, 1)
        if mask.numel() <= SHARED:
            self.masks[name] = mask
        return mask


class Contiguous:
    """Each session by itself, with PyTorch's attention for each row."""

    same_bits = False

    def new_cache(self) -> Cache:
        return Cache()

    def plan(self, spans: Sequence[Span], windows: Windows) -> Pass:
        return Pass(spans, windows)


Attention = Native | Contiguous  # ways to hold keys and values


def _written_out(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, kind: Kind) -> Tensor:
    """The same for models that cap scores (Gemma 2) or let heads attend to nothing (GPT-OSS)."""
    _, kv_heads, rows, _ = query.shape
    scores = query @ key.transpose(2, 3) * kind.scaling
    if kind.softcap is not None:
        scores = torch.tanh(scores / kind.softcap) * kind.softcap
    if mask is not None:
        scores = scores + mask
    if kind.sinks is not None:
        sinks = kind.sinks.to(scores.dtype).view(kv_heads, -1, 1)
        sinks = sinks.expand(-1, -1, rows // sinks.shape[1]).reshape(1, kv_heads, rows, 1)
        scores = torch.cat([scores, sinks], dim=-1)
    weights = scores.softmax(-1, dtype=torch.float32).to(value.dtype)[..., : key.shape[2]]
    return weights @ value
