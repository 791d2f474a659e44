"""Keys and values of a session in contiguous tensors, and PyTorch's attention over them, for devices other than CPUs."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

from cascade.cpu.attention import Kind
from cascade.cpu.cache import Span
from cascade.engine.network.survey import Survey
from cascade.scorer import BLOCK, TILE, grown_capacity


class Cache:
    """Keys and values of one session, per layer ``[kv_heads, capacity, size]`` each.

    A fork has those from ``position`` on; the earlier ones belong to its base, and are copied when they are read.
    """

    def __init__(self, base: "Cache | None" = None, position: int = 0) -> None:
        self.base, self.position = base, position
        self.block = TILE if base is None else BLOCK
        self.capacity = 0  # positions
        self._end = position  # the position after the last one of a fork
        self._layers: dict[int, list[Tensor]] = {}

    def write(self, layer: int, start: int, parts: Sequence[Tensor]) -> None:
        """Store keys and values ``[kv_heads, n, size]`` at ``start``; later positions become invalid."""
        begin, self._end = start - self.position, start + parts[0].shape[1]
        if (end := self._end - self.position) > self.capacity:
            self.reserve(grown_capacity(end, self.capacity))
        if layer not in self._layers:
            self._layers[layer] = [_resized(part[:, :0], self.capacity) for part in parts]
        for held, part in zip(self._layers[layer], parts, strict=True):
            held[:, begin:end] = part

    def read(self, layer: int, end: int) -> list[Tensor]:
        """Keys and values of the positions before ``end``, ``[kv_heads, end, size]``."""
        own = [part[:, : max(0, end - self.position)] for part in self._layers[layer]]
        if self.base is None:
            return own
        before = self.base.read(layer, min(end, self.position))
        return [torch.cat(pair, 1) for pair in zip(before, own, strict=True)]

    @torch.inference_mode()
    def reserve(self, positions: int) -> None:
        """Make room for ``positions``, in whole blocks, without changing what is written."""
        positions = -(-positions // self.block) * self.block
        if positions > self.capacity:
            for layer, parts in self._layers.items():  # one at a time: memory peaks by a layer, not by a cache
                self._layers[layer] = [_resized(part, positions) for part in parts]
            self.capacity = positions

    @torch.inference_mode()
    def reuse(self, source: "Cache", positions: int) -> None:
        """Copy the first ``positions`` of ``source``, bit by bit; there must be room for them."""
        for layer in source._layers:
            self.write(layer, 0, source.read(layer, positions))

    def fork(self, position: int) -> "Cache":
        """A continuation of this text from ``position`` on, which takes memory only for what is written."""
        return Cache(self, position)

    @torch.inference_mode()
    def join(self, fork: "Cache") -> None:
        """Copy the contents of ``fork``, bit by bit, and free it."""
        for layer, parts in fork._layers.items():
            self.write(layer, fork.position, [part[:, : fork._end - fork.position] for part in parts])
        fork.free()

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for parts in self._layers.values() for part in parts)

    def free(self) -> None:
        self._layers.clear()
        self.capacity = 0


def _resized(old: Tensor, capacity: int) -> Tensor:
    new = old.new_zeros(len(old), capacity, old.shape[2])
    new[:, : old.shape[1]] = old
    return new


@dataclass(slots=True)
class Pass:
    """The rows of one forward pass, which the model hands to the attention function."""

    spans: Sequence[Span]
    windows: dict[int, int | None]  # by layer
    masks: dict[tuple[int, int | None], Tensor] = field(default_factory=dict)  # by a row's first token and a window

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, kind: Kind) -> Tensor:
        """Write, then attend: ``[1, heads, total_tokens, head_dim]`` to ``[1, total_tokens, heads, head_dim]``."""
        # A wrong draft may overflow. Attention multiplies masked positions by 0, and 0 times infinity is not 0.
        new = [part[0].nan_to_num(0.0, 0.0, 0.0) for part in (key, value)]
        out = value.new_zeros(query.shape[2], query.shape[1], value.shape[3])
        for span in sorted(self.spans, key=lambda span: span.cache.base is not None):  # forks see what their bases write
            part, end = slice(span.begin, span.end), span.start + span.end - span.begin
            span.cache.write(layer, span.start, [each[:, part] for each in new])
            keys, values = span.cache.read(layer, end)
            out[part] = _attend(query[0, :, part], keys, values, self._seen(span, end, self.windows[layer]), kind)
        return out[None]

    def _seen(self, span: Span, end: int, window: int | None) -> Tensor:
        """The mask of a row's tokens over the positions before ``end``, bool ``[n, end]``."""
        name = (span.begin, window)
        if name not in self.masks:
            device = next(iter(span.cache._layers.values()))[0].device
            back = torch.arange(span.start, end, device=device)[:, None] - torch.arange(end, device=device)
            self.masks[name] = back >= 0 if window is None else (back >= 0) & (back < window)
        return self.masks[name]


class Contiguous:
    """Stores each session separately, and runs PyTorch's attention for each row."""

    same_bits = False

    def __init__(self, survey: Survey, dtype: torch.dtype) -> None:
        self._windows = survey.windows

    def new_cache(self) -> Cache:
        return Cache()

    def plan(self, spans: Sequence[Span]) -> Pass:
        return Pass(spans, self._windows)


def _attend(query: Tensor, key: Tensor, value: Tensor, seen: Tensor, kind: Kind) -> Tensor:
    """``[n, heads, value_size]`` of queries ``[heads, n, key_size]`` over ``[kv_heads, positions, ...]``."""
    if kind.softcap is None and kind.sinks is None:
        given = (query[None], key[None], value[None])
        out = F.scaled_dot_product_attention(*given, attn_mask=seen, scale=kind.scaling, enable_gqa=True)[0]
        return out.transpose(0, 1)
    # models that cap scores (Gemma 2) or let heads attend to nothing (GPT-OSS)
    folded = query.reshape(len(key), -1, query.shape[2])  # heads that share keys become queries of one head
    scores = (folded @ key.transpose(1, 2) * kind.scaling).view(*query.shape[:2], -1)
    if kind.softcap is not None:
        scores = torch.tanh(scores / kind.softcap) * kind.softcap
    scores = scores.masked_fill(~seen, -torch.inf)
    if kind.sinks is not None:
        sinks = kind.sinks.to(scores.dtype)[:, None, None].expand(-1, scores.shape[1], 1)
        scores = torch.cat([scores, sinks], -1)
    weights = scores.softmax(-1, dtype=torch.float32).to(value.dtype)[..., : key.shape[1]]
    out = weights.reshape(len(key), -1, key.shape[1]) @ value
    return out.view(*query.shape[:2], -1).transpose(0, 1)
