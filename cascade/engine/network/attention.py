"""How a model holds keys and values and attends to them: by our own kernel on CPUs, by PyTorch's on other devices.

A row of a pass writes its keys and values at its positions and attends to everything before. A rollback starts a row at
an earlier position, and needs no code.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from cascade.cpu.attention import Kind, Spans
from cascade.cpu.attention import attend as attend_spans
from cascade.cpu.cache import BlockedCache, Span, tables
from cascade.engine.network.survey import Survey

ATTENTION = "cascade"  # the name under which Transformers has our attention function


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
    cascade_pass: Any = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Attention of a packed pass, for `transformers.AttentionInterface`; ``cascade_pass`` is a result of `Native.plan`.

    Soft caps and attention sinks (``s_aux`` ``[heads]``) are applied. Windows come from the pass, since not every model with a
    sliding window passes it here.
    """
    if cascade_pass is None:
        raise RuntimeError(f"{type(module).__name__} does not hand the pass on to its attention function")
    layer: int = module.layer_idx  # type: ignore[assignment]
    kind = Kind(query.shape[3] ** -0.5 if scaling is None else scaling, None, softcap, s_aux)
    return cascade_pass.attend(layer, query, key, value, kind), None


@cache
def register() -> None:
    """Register `attend` in Transformers, whose model code takes seconds to import.

    No mask function is registered, so Transformers builds no masks.
    """
    from transformers import AttentionInterface

    AttentionInterface.register(ATTENTION, attend)


@dataclass(slots=True)
class NativePass:
    """A pass of `Native`."""

    spans: dict[int, Spans]  # by layer
    windows: dict[int, int | None]

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, kind: Kind) -> Tensor:
        """Store and attend with the layer's window: ``[1, total_tokens, heads, ...]`` of ``[1, heads, total_tokens, ...]``."""
        sinks = None if kind.sinks is None else kind.sinks.float().contiguous()
        kind = Kind(kind.scaling, self.windows[layer], kind.softcap, sinks)
        out = attend_spans(_dense(query), _dense(key), _dense(value), self.spans[layer], kind)
        return out.view(1, query.shape[2], query.shape[1], value.shape[3]).to(query.dtype)


class Native:
    """Our own kernel for CPUs, which computes in float32 and stores keys and values of a session in its own layout."""

    same_bits = True

    def __init__(self, survey: Survey, dtype: torch.dtype) -> None:
        """Keys and values are held in bfloat16 if that is the network's ``dtype``, and in float32 otherwise."""
        self._dtype = torch.bfloat16 if dtype is torch.bfloat16 else torch.float32
        self._shapes, self._windows = survey.heads, survey.windows

    def new_cache(self) -> BlockedCache:
        return BlockedCache(self._shapes, self._dtype)

    def plan(self, spans: Sequence[Span]) -> NativePass:
        return NativePass(tables(spans, self._shapes), self._windows)


def _dense(part: Tensor) -> Tensor:
    """``[heads, total_tokens, head_dim]`` float32, contiguous within a head."""
    return (part[0] if part.stride(3) == 1 else part[0].contiguous()).float()
