"""Keys and values of sessions, and attention over them. Knows nothing of tokens, sampling or sessions.

A row of a pass writes its keys and values at its positions and attends to everything before: rolling back is starting a row
at an earlier position, and needs no code.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface

from cascade.pool import BLOCK, room

ATTENTION = "cascade"  # our attention function's name at Transformers
SURVEY = "cascade_survey"  # another, which only notes what each layer may see
SCORES = 2**26  # of queries with keys that are held at once; where there are more, the queries of a row take turns
FAR = 4096  # a position to ask a mask about that names no size of its own


class Cache:
    """Keys and values of one session, per layer ``[kv_heads, capacity, head_dim]``; K and V may differ in size.

    Storage is contiguous, so that attention reads it in place. Room is made ahead of a pass by `reserve`, or as it is needed.
    """

    __slots__ = ("_layers", "capacity")
    block = BLOCK

    def __init__(self) -> None:
        self.capacity = 0  # positions
        self._layers: dict[int, tuple[Tensor, Tensor]] = {}

    def write(self, layer: int, start: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Store ``[kv_heads, n, head_dim]`` at ``start`` and return views of all ``start + n`` positions."""
        length = key.shape[1]
        if start + length > self.capacity:
            self.reserve(room(start + length, self.capacity))
        pair = self._layers.get(layer)
        if pair is None:
            pair = self._layers[layer] = _resized(key[:, :0], self.capacity), _resized(value[:, :0], self.capacity)
        keys, values = pair
        keys.narrow(1, start, length).copy_(key)
        values.narrow(1, start, length).copy_(value)
        return keys.narrow(1, 0, start + length), values.narrow(1, 0, start + length)

    @torch.inference_mode()
    def reserve(self, positions: int) -> None:
        """Make room for ``positions``; what is written stays."""
        if positions > self.capacity:
            for layer, (keys, values) in self._layers.items():  # one at a time: memory peaks by a layer, not by a cache
                self._layers[layer] = _resized(keys, positions), _resized(values, positions)
            self.capacity = positions

    @torch.inference_mode()
    def take(self, source: "Cache", positions: int) -> None:
        """Copy the first ``positions`` of ``source``, bit by bit; there must be room for them."""
        for layer, (keys, values) in source._layers.items():
            self.write(layer, 0, keys[:, :positions], values[:, :positions])

    @property
    def nbytes(self) -> int:
        """Memory held."""
        return sum(tensor.nbytes for pair in self._layers.values() for tensor in pair)

    def free(self) -> None:
        """Give the memory back."""
        self._layers.clear()
        self.capacity = 0


def _resized(old: Tensor, capacity: int) -> Tensor:
    new = old.new_empty(old.shape[0], capacity, old.shape[2])
    new[:, : old.shape[1]] = old
    return new


class Writable(Protocol):
    """Keys and values of one session that `attend` can use; see `Cache` and `cascade.paged.PagedCache`."""

    def write(self, layer: int, start: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]: ...


@dataclass(slots=True)
class Span:
    """Where a row lies in the packed input ``[1, total_tokens]``: tokens ``begin`` to ``end`` are positions ``start`` on."""

    cache: Writable
    begin: int
    end: int
    start: int
    masks: dict[tuple[int, int, int | None, int], Tensor] = field(default_factory=dict)  # shared by all layers of a pass

    def mask(self, n: int, visible: int, window: int | None, group: int, device: torch.device) -> Tensor:
        """What each of ``n`` queries may see of the last ``visible`` positions, bool ``[group * n, visible]``.

        Queries of a group's heads lie behind each other.
        """
        key = (n, visible, window, group)
        if key not in self.masks:
            seen = torch.ones(n, visible, dtype=torch.bool, device=device).tril(visible - n)
            if window is not None:
                seen = seen.triu(visible - n - window + 1)
            self.masks[key] = seen.repeat(group, 1)
        return self.masks[key]


@dataclass(slots=True)
class Pass:
    """The rows of one forward, on their way through the model to the attention function."""

    spans: Sequence[Span]
    windows: dict[int, int | None]  # by layer: positions a query sees, itself included; see `Survey`


@dataclass(slots=True)
class Survey:
    """What a forward with the attention `SURVEY` found: the window of each layer, as by the mask the model makes for it."""

    windows: dict[int, int | None] = field(default_factory=dict)
    strange: bool = False  # some layer's mask is neither causal nor a sliding window
    heads: set[tuple[int, int, int, int]] = field(default_factory=set)  # of queries, of keys; sizes of keys, of values
    plain: bool = True  # no layer caps scores or lets heads attend to nothing


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    cascade_pass: Pass | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Attention of a packed pass, for `transformers.AttentionInterface`.

    ``query`` ``[1, heads, total_tokens, head_dim]``, ``key`` and ``value`` ``[1, kv_heads, total_tokens, head_dim]``; returns
    ``[1, total_tokens, heads, head_dim]``. Soft caps and attention sinks (``s_aux`` ``[heads]``) are honoured; windows are the
    pass's, for not every model that slides says so here.
    """
    if cascade_pass is None:
        raise RuntimeError(f"{type(module).__name__} does not hand the pass on to its attention function")
    layer: int = module.layer_idx  # type: ignore[assignment]
    window = cascade_pass.windows[layer]
    spans = cascade_pass.spans
    if len(spans) == 1:  # nothing to cut or to join
        out = _row(spans[0], layer, query[0], key[0], value[0], scaling, window, softcap, s_aux)
    else:
        sizes = [span.end - span.begin for span in spans]
        rows = zip(spans, *(part[0].split(sizes, dim=1) for part in (query, key, value)), strict=True)
        out = torch.cat([_row(span, layer, q, k, v, scaling, window, softcap, s_aux) for span, q, k, v in rows], dim=1)
    return out.transpose(0, 1).contiguous()[None], None  # some models view it as it is


def _row(
    span: Span,
    layer: int,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scaling: float | None,
    window: int | None,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """Write one row's keys and values and attend over its session's, ``[heads, n, head_dim]``."""
    keys, values = span.cache.write(layer, span.start, key, value)
    (heads, n, _), length = query.shape, keys.shape[1]
    step = SCORES // (heads * length) or 1
    # a whole prompt needs no mask, and its scores are never held
    if n <= step or (n == length and window is None and softcap is None and sinks is None):
        return _heads(span, query, keys, values, scaling, window, softcap, sinks)
    pieces = []
    for begin in range(0, n, step):
        end = span.start + min(n, begin + step)
        part = query[:, begin : begin + step], keys[:, :end], values[:, :end]
        pieces.append(_heads(span, *part, scaling, window, softcap, sinks))
    return torch.cat(pieces, dim=1)


def _heads(
    span: Span,
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    scaling: float | None,
    window: int | None,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    if softcap is None and sinks is None:
        return _attend(span, query, keys, values, scaling, window)
    return _attend_plainly(span, query, keys, values, scaling, window, softcap, sinks)


def _visible(n: int, length: int, window: int | None) -> tuple[int, int | None]:
    """How many last positions any of ``n`` queries sees, and the window if it hides any of those from some query."""
    if window is None or window >= length:
        return length, None
    return min(length, window + n - 1), window if n > 1 else None


def _attend(span: Span, query: Tensor, key: Tensor, value: Tensor, scaling: float | None, window: int | None) -> Tensor:
    """``[heads, n, head_dim]`` against ``[kv_heads, length, head_dim]`` by PyTorch's fused kernels."""
    (heads, n, _), (kv_heads, length, _) = query.shape, key.shape
    group = heads // kv_heads
    visible, window = _visible(n, length, window)
    if n == length and n > 1 and window is None:  # a whole prompt
        out = F.scaled_dot_product_attention(
            query[None], key[None], value[None], is_causal=True, scale=scaling, enable_gqa=group > 1
        )
        return out[0]
    if visible < length:
        key, value = key[:, length - visible :], value[:, length - visible :]
    # heads that share keys become queries of one head: nothing is copied for them
    mask = None if n == 1 else span.mask(n, visible, window, group, query.device)
    folded = query.reshape(1, kv_heads, group * n, -1)
    out = F.scaled_dot_product_attention(folded, key[None], value[None], attn_mask=mask, scale=scaling)
    return out.reshape(heads, n, -1)


def _attend_plainly(
    span: Span,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scaling: float | None,
    window: int | None,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """The same written out, for models that cap scores (Gemma 2) or let heads attend to nothing (GPT-OSS)."""
    (heads, n, head_dim), (kv_heads, length, _) = query.shape, key.shape
    group = heads // kv_heads
    visible, window = _visible(n, length, window)
    key, value = key[:, length - visible :], value[:, length - visible :]
    folded = query.reshape(kv_heads, group * n, head_dim)
    scores = folded @ key.transpose(1, 2) * (head_dim**-0.5 if scaling is None else scaling)
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    if n > 1:
        scores = scores.masked_fill(~span.mask(n, visible, window, group, query.device), -torch.inf)
    if sinks is not None:
        sink = sinks.reshape(kv_heads, group, 1).expand(-1, -1, n).reshape(kv_heads, group * n, 1)
        scores = torch.cat([scores, sink.to(scores.dtype)], dim=-1)
    weights = scores.softmax(-1, dtype=torch.float32).to(value.dtype)[..., :visible]
    return (weights @ value).reshape(heads, n, -1)


def survey(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    cascade_pass: Survey | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Note the window and the kind of a layer; the outcome of attention is of no interest."""
    if cascade_pass is None:
        raise RuntimeError(f"{type(module).__name__} does not hand the pass on to its attention function")
    window = -1 if attention_mask is None else int(attention_mask.flatten()[0])
    cascade_pass.strange |= window < 0
    cascade_pass.windows[module.layer_idx] = window or None  # type: ignore[index]
    cascade_pass.heads.add((query.shape[1], key.shape[1], key.shape[3], value.shape[3]))
    cascade_pass.plain &= softcap is None and s_aux is None
    return value.new_zeros(1, query.shape[2], query.shape[1], value.shape[3]), None


def sight(*, mask_function: Callable[..., Tensor], local_size: int | None = None, **_: Any) -> Tensor:
    """In place of a mask, ``[1, 1, 1, 1]``: the sliding window it is, 0 if it only hides what comes later, -1 if neither.

    Registered for `SURVEY`, so that models hand it to their layers as they would the mask.
    """
    far = 2 * local_size if local_size else FAR
    counts = set()
    for position in (far, far + far // 4):  # chunks, unlike windows, show less to one than to the other
        query, keys, first = torch.tensor(position), torch.arange(position + 2), torch.tensor(0)
        seen = mask_function(first, first, query, keys).expand_as(keys)
        count = int(seen.sum())
        regular = seen[position + 1 - count : position + 1].all() and not seen[position + 1]
        counts.add(-1 if not regular else 0 if count == position + 1 else count)
    return torch.tensor(counts.pop() if len(counts) == 1 else -1).reshape(1, 1, 1, 1)


# No mask function is registered for ATTENTION: for a name without one Transformers builds no masks, and none are wanted.
AttentionInterface.register(ATTENTION, attend)
AttentionInterface.register(SURVEY, survey)
AttentionMaskInterface.register(SURVEY, sight)
