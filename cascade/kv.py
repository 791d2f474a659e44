"""Keys and values of sessions, and attention over them. Knows nothing of tokens, sampling or sessions.

A row of a pass writes its keys and values at its positions and attends to everything before: rolling back is starting a row
at an earlier position, and needs no code.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface

FIRST_CAPACITY = 64  # positions; storage doubles when it is full


class Cache:
    """Keys and values of one session, per layer ``[kv_heads, capacity, head_dim]``, growing; K and V may differ in size."""

    def __init__(self) -> None:
        self._layers: dict[int, tuple[Tensor, Tensor]] = {}

    def write(self, layer: int, start: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Store ``[kv_heads, n, head_dim]`` at ``start`` and return views of all ``start + n`` positions."""
        end = start + key.shape[1]
        keys, values = self._layers.get(layer) or (key[:, :0], value[:, :0])
        if end > keys.shape[1]:
            capacity = max(FIRST_CAPACITY, 2 * keys.shape[1], end)
            keys, values = _grown(keys, start, capacity), _grown(values, start, capacity)
            self._layers[layer] = keys, values
        keys[:, start:end] = key
        values[:, start:end] = value
        return keys[:, :end], values[:, :end]

    @property
    def nbytes(self) -> int:
        """Memory held."""
        return sum(tensor.nbytes for pair in self._layers.values() for tensor in pair)

    def free(self) -> None:
        """Give the memory back."""
        self._layers.clear()


def _grown(old: Tensor, kept: int, capacity: int) -> Tensor:
    new = old.new_empty(old.shape[0], capacity, old.shape[2])
    new[:, :kept] = old[:, :kept]
    return new


@dataclass(slots=True)
class Span:
    """Where a row lies in the packed input ``[1, total_tokens]``: tokens ``begin`` to ``end`` are positions ``start`` on."""

    cache: Cache
    begin: int
    end: int
    start: int
    masks: dict[tuple[int | None, int], Tensor] = field(default_factory=dict)  # shared by all layers of a pass

    def mask(self, window: int | None, group: int, device: torch.device) -> Tensor:
        """What each query may see, bool ``[group * n, start + n]``; queries of a group's heads lie behind each other."""
        key = (window, group)
        if key not in self.masks:
            queries = torch.arange(self.start, self.start + self.end - self.begin, device=device)[:, None]
            keys = torch.arange(self.start + self.end - self.begin, device=device)[None]
            seen = keys <= queries
            if window is not None:
                seen &= keys > queries - window
            self.masks[key] = seen.repeat(group, 1)
        return self.masks[key]


@dataclass(slots=True)
class Pass:
    """The rows of one forward, on their way through the model to the attention function."""

    spans: Sequence[Span]
    layers: set[int] = field(default_factory=set)  # layers that asked; a model is refused unless all do


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    cascade_pass: Pass | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Attention of a packed pass, for `transformers.AttentionInterface`.

    ``query`` ``[1, heads, total_tokens, head_dim]``, ``key`` and ``value`` ``[1, kv_heads, total_tokens, head_dim]``; returns
    ``[1, total_tokens, heads, head_dim]``. Sliding windows, soft caps and attention sinks (``s_aux`` ``[heads]``) are honoured.
    """
    if cascade_pass is None:
        raise RuntimeError(f"{type(module).__name__} does not hand the pass on to its attention function")
    layer = int(module.layer_idx)  # type: ignore[arg-type]
    cascade_pass.layers.add(layer)
    pieces = []
    for span in cascade_pass.spans:
        rows = slice(span.begin, span.end)
        keys, values = span.cache.write(layer, span.start, key[0, :, rows], value[0, :, rows])
        queries = query[0, :, rows]
        if softcap is None and s_aux is None:
            pieces.append(_attend(span, queries, keys, values, scaling, sliding_window))
        else:
            pieces.append(_attend_plainly(span, queries, keys, values, scaling, sliding_window, softcap, s_aux))
    out = pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim=1)
    return out.transpose(0, 1)[None], None


def _attend(
    span: Span, query: Tensor, key: Tensor, value: Tensor, scaling: float | None, window: int | None
) -> Tensor:
    """``[heads, n, head_dim]`` against ``[kv_heads, length, head_dim]`` by PyTorch's fused kernels."""
    (heads, n, _), (kv_heads, length, _) = query.shape, key.shape
    group = heads // kv_heads
    if window is not None and window >= length:
        window = None
    if n == length and window is None:  # a whole prompt
        out = F.scaled_dot_product_attention(
            query[None], key[None], value[None], is_causal=n > 1, scale=scaling, enable_gqa=group > 1
        )
        return out[0]
    # heads that share keys become queries of one head: nothing is copied for them
    mask = None if n == 1 and window is None else span.mask(window, group, query.device)
    folded = query.reshape(kv_heads, group * n, -1)
    out = F.scaled_dot_product_attention(folded[None], key[None], value[None], attn_mask=mask, scale=scaling)
    return out[0].reshape(heads, n, -1)


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
    folded = query.reshape(kv_heads, group * n, head_dim)
    scores = folded @ key.transpose(1, 2) * (head_dim**-0.5 if scaling is None else scaling)
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    scores = scores.masked_fill(~span.mask(window, group, query.device), -torch.inf)
    if sinks is not None:
        sink = sinks.reshape(kv_heads, group, 1).expand(-1, -1, n).reshape(kv_heads, group * n, 1)
        scores = torch.cat([scores, sink.to(scores.dtype)], dim=-1)
    weights = scores.softmax(-1, dtype=torch.float32).to(value.dtype)[..., :length]
    return (weights @ value).reshape(heads, n, -1)


# No mask function is registered beside it: for a name without one Transformers builds no masks, and none are wanted here.
AttentionInterface.register("cascade", attend)
