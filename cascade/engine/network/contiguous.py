"""Keys and values of a session in one piece, and PyTorch's attention over them: for devices other than CPUs."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

from cascade.engine.network.attention import Scoring, Span, Windows
from cascade.scorer import BLOCK, TILE, grown_capacity

SCORES = 2**26  # of queries with keys that are held at once
SHARED = 2**22  # numbers in a mask that is kept from layer to layer


class Cache:
    """Keys and values of one session, per layer ``[1, kv_heads, capacity, head_dim]``; K and V may differ in size.

    Storage is contiguous, so that attention reads it in place. Room is made ahead of a pass by `reserve`, or as it is needed.
    """

    __slots__ = ("_layers", "capacity")
    block = TILE
    position = 0  # from which on it holds the text

    def __init__(self) -> None:
        self.capacity = 0  # positions
        self._layers: dict[int, tuple[Tensor, Tensor]] = {}

    def write(self, layer: int, start: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Store ``[kv_heads, n, head_dim]`` at ``start`` and return all there is, ``[1, kv_heads, capacity, head_dim]``."""
        length = key.shape[1]
        keys, values = pair = self.hold(layer, start + length, key, value)
        keys.narrow(2, start, length).copy_(key)
        values.narrow(2, start, length).copy_(value)
        return pair

    def hold(self, layer: int, positions: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """All there is, and room for ``positions``; the layer's heads are like those of ``[kv_heads, n, head_dim]``."""
        if positions > self.capacity:
            self.reserve(grown_capacity(positions, self.capacity))
        pair = self._layers.get(layer)
        if pair is None:
            pair = self._layers[layer] = _resized(key[None, :, :0], self.capacity), _resized(value[None, :, :0], self.capacity)
        return pair

    @torch.inference_mode()
    def reserve(self, positions: int) -> None:
        """Make room for ``positions``, in whole blocks; what is written stays."""
        positions = -(-positions // self.block) * self.block
        if positions > self.capacity:
            for layer, (keys, values) in self._layers.items():  # one at a time: memory peaks by a layer, not by a cache
                self._layers[layer] = _resized(keys, positions), _resized(values, positions)
            self.capacity = positions

    def put(self, layer: int, start: int, states: Tensor) -> None:
        """Keep ``[n, width]`` from ``start`` on in a layer of its own, which nobody attends to."""
        self.write(layer, start, states[None], states[None, :, :0])

    def get(self, layer: int, start: int, end: int) -> Tensor:
        """What was kept there, ``[end - start, width]``."""
        return self._layers[layer][0][0, 0, start:end]

    @torch.inference_mode()
    def reuse(self, source: "Cache", positions: int) -> None:
        """Copy the first ``positions`` of ``source``, bit by bit; there must be room for them."""
        for layer, (keys, values) in source._layers.items():
            self.write(layer, 0, keys[0, :, :positions], values[0, :, :positions])

    def fork(self, position: int) -> "Fork":
        """Another end of this text, from ``position`` on; it takes memory as it is written."""
        return Fork(self, position)

    @torch.inference_mode()
    def join(self, fork: "Fork") -> None:
        """Copy what ``fork`` holds, bit by bit, and free it."""
        for layer in fork.layers:
            self.write(layer, fork.position, *fork.held(layer))
        fork.free()

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for pair in self._layers.values() for tensor in pair)

    def free(self) -> None:
        self._layers.clear()
        self.capacity = 0


class Fork(Cache):
    """Keys and values of one session from ``position`` on; those before it are its base's.

    What they are attended with lies in the base's storage for as long as that takes, see `in_place`: so attention over a fork
    is that over a cache, with the same bits.
    """

    __slots__ = ("_base", "_end", "position")
    block = BLOCK

    def __init__(self, base: Cache, position: int) -> None:
        super().__init__()
        self._base = base
        self.position = self._end = position

    def write(self, layer: int, start: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Store ``[kv_heads, n, head_dim]`` at ``start``, after which nothing is held then."""
        self._end = start + key.shape[1]
        return super().write(layer, start - self.position, key, value)

    def get(self, layer: int, start: int, end: int) -> Tensor:
        """The same, what is before its position from its base."""
        own = super().get(layer, max(0, start - self.position), max(0, end - self.position))
        if start >= self.position:
            return own
        return torch.cat([self._base.get(layer, start, min(end, self.position)), own])

    @property
    def layers(self) -> Sequence[int]:
        return tuple(self._layers)

    def held(self, layer: int) -> tuple[Tensor, Tensor]:
        """What was written, each ``[kv_heads, n, head_dim]``."""
        keys, values = self._layers[layer]
        size = self._end - self.position
        return keys[0, :, :size], values[0, :, :size]

    @contextmanager
    def in_place(self, layer: int) -> Iterator[tuple[Tensor, Tensor]]:
        """The whole text, ``[1, kv_heads, capacity, head_dim]``, while the base lends its storage."""
        own = self.held(layer)
        whole = self._base.hold(layer, self._end, *own)
        places = [part[0].narrow(1, self.position, self._end - self.position) for part in whole]
        lent = [place.clone() for place in places]
        try:
            for place, part in zip(places, own, strict=True):
                place.copy_(part)
            yield whole
        finally:
            for place, part in zip(places, lent, strict=True):
                place.copy_(part)


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
        self.spans = sorted(self.spans, key=lambda span: isinstance(span.cache, Fork))  # which see what their bases write

    def write(self, layer: int, key: Tensor, value: Tensor) -> None:
        """See `cascade.engine.network.attention.Planned`."""
        # a wrong draft that overflows must not reach those that do not see it: what is hidden from them counts 0 times
        keys, values = _finite(key[0]), _finite(value[0])
        for span in self.spans:
            span.cache.write(layer, span.start, keys[:, span.begin : span.end], values[:, span.begin : span.end])

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scoring: Scoring) -> Tensor:
        """See `cascade.engine.network.attention.Planned`."""
        keys, values, window = _finite(key[0]), _finite(value[0]), self.windows[layer]
        out = value.new_zeros(query.shape[2], query.shape[1], value.shape[3])
        for span in self.spans:
            part = slice(span.begin, span.end)
            held = span.cache.write(layer, span.start, keys[:, part], values[:, part])
            if isinstance(span.cache, Fork):
                with span.cache.in_place(layer) as whole:
                    out[part] = _row(span, query[0, :, part], whole, window, scoring, self)
            else:
                out[part] = _row(span, query[0, :, part], held, window, scoring, self)
        return out[None]


class Contiguous:
    """Each session by itself, with PyTorch's attention for each row."""

    same_bits = False

    def new_cache(self) -> Cache:
        return Cache()

    def plan(self, spans: Sequence[Span], windows: Windows) -> Pass:
        return Pass(spans, windows)


def _finite(part: Tensor) -> Tensor:
    """The same, and 0 where a number has overflowed."""
    return part.nan_to_num(0.0, 0.0, 0.0)


def _row(span: Span, query: Tensor, held: tuple[Tensor, Tensor], window: int | None, scoring: Scoring, planned: Pass) -> Tensor:
    """``[n, heads, value_size]`` of a query ``[heads, n, head_dim]`` over what is held, ``[1, kv_heads, capacity, ...]``."""
    heads, n, _ = query.shape
    kv_heads, pieces = held[0].shape[1], []
    most = max(1, SCORES // (heads * (span.start + n)))
    for begin in range(0, n, most):
        end = min(n, begin + most)
        first = 0 if window is None else max(0, span.start + begin - window + 1)
        key, value = (part[:, :, first : span.start + end] for part in held)
        # heads that share keys become queries of one head: nothing is copied for them
        folded = query[:, begin:end].reshape(1, kv_heads, -1, query.shape[2])
        mask = None if end - begin == 1 else _mask(span, (begin, end), first, window, heads // kv_heads, query, planned)
        if scoring.softcap is None and scoring.sinks is None:
            out = F.scaled_dot_product_attention(folded, key, value, attn_mask=mask, scale=scoring.scaling)
        else:
            out = _written_out(folded, key, value, mask, scoring)
        pieces.append(out.view(heads, end - begin, -1).transpose(0, 1))
    return torch.cat(pieces)


def _mask(
    span: Span, queries: tuple[int, int], first: int, window: int | None, group: int, like: Tensor, planned: Pass
) -> Tensor:
    """What is added to scores of a row's ``queries`` with keys from position ``first`` on: 0, or -inf for what is hidden.

    ``[group * n, keys]`` in the dtype of ``like``, for the queries of all heads that share keys.
    """
    begin, end = queries
    name = (span.begin, begin, window, group)
    if name in planned.masks:
        return planned.masks[name]
    at = span.start + begin - first
    mask = like.new_full((end - begin, span.start + end - first), -torch.inf)
    mask = mask.triu(at + 1) if window is None else mask.triu(at + 1) + mask.tril(at - window)
    mask = mask.repeat(group, 1)
    if mask.numel() <= SHARED:
        planned.masks[name] = mask
    return mask


def _written_out(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scoring: Scoring) -> Tensor:
    """The same for models that cap scores (Gemma 2) or let heads attend to nothing (GPT-OSS)."""
    _, kv_heads, rows, head_dim = query.shape
    scores = query @ key.transpose(2, 3) * (head_dim**-0.5 if scoring.scaling is None else scoring.scaling)
    if scoring.softcap is not None:
        scores = torch.tanh(scores / scoring.softcap) * scoring.softcap
    if mask is not None:
        scores = scores + mask
    if scoring.sinks is not None:
        sinks = scoring.sinks.to(scores.dtype).view(kv_heads, -1, 1)
        sinks = sinks.expand(-1, -1, rows // sinks.shape[1]).reshape(1, kv_heads, rows, 1)
        scores = torch.cat([scores, sinks], dim=-1)
    weights = scores.softmax(-1, dtype=torch.float32).to(value.dtype)[..., : key.shape[2]]
    return weights @ value
