"""How a model holds keys and values and attends to them: one strategy for each kind of device, chosen when it is loaded.

A session's keys and values are its own: on a CPU our kernel reads them in float32, elsewhere PyTorch's.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from transformers import AttentionInterface

from cascade.cpu.attention import Kind, Spans
from cascade.cpu.attention import attend as attend_spans
from cascade.cpu.attention import store as store_spans
from cascade.cpu.cache import BlockedCache, Shape, tables
from cascade.engine import kv
from cascade.engine.contiguous_cache import Cache
from cascade.engine.kv import ATTENTION, Pass, Span
from cascade.engine.survey import Survey

NATIVE = "cascade_native"  # our attention function's name at Transformers

Windows = dict[int, int | None]  # by layer, see `cascade.engine.survey.Survey`


class Attention(Protocol):
    """A way to hold keys and values, as `cascade.engine.model.Model` uses it."""

    name: str  # of its attention function, at Transformers

    def new_cache(self) -> Any:
        """Keys and values of a new session: a `cascade.scorer.Store`."""

    def plan(self, spans: Sequence[Span], windows: Windows) -> Any:
        """What the layers of a pass are given."""

    def write(self, layer: int, key: Tensor, value: Tensor, planned: Any) -> None:
        """Put keys and values ``[1, kv_heads, total_tokens, head_dim]`` where the pass has its rows, for later ones to see."""


class Contiguous:
    """Each session by itself, see `cascade.engine.kv`."""

    name = ATTENTION

    def new_cache(self) -> Cache:
        return Cache()

    def plan(self, spans: Sequence[Span], windows: Windows) -> Pass:
        return Pass(spans, windows)

    def write(self, layer: int, key: Tensor, value: Tensor, planned: Pass) -> None:
        for _, span in planned.in_order:
            span.cache.write(layer, span.start, *(kv.finite(part[0, :, span.begin : span.end]) for part in (key, value)))


@dataclass(slots=True)
class NativePass:
    """What `attend_native` needs, for all layers of a pass."""

    spans: dict[int, Spans]  # by layer
    windows: Windows


class Native:
    """Each session by itself, in the order that suits our own kernel, which takes float32 on a CPU."""

    name = NATIVE

    def __init__(self, found: Survey, dtype: torch.dtype) -> None:
        """``dtype`` is that of keys and values as they are held, float32 or bfloat16."""
        self._dtype = dtype
        self._shapes = {layer: Shape(*heads[1:]) for layer, heads in found.heads.items()}
        self._shapes |= {layer: Shape(1, 0, width) for layer, width in found.kept.items()}

    def new_cache(self) -> BlockedCache:
        return BlockedCache(self._shapes, self._dtype)

    def plan(self, spans: Sequence[Span], windows: Windows) -> NativePass:
        rows = [(span.cache, span.begin, span.end - span.begin, span.start) for span in spans]
        return NativePass(tables(rows, self._shapes), windows)  # type: ignore[arg-type]

    def write(self, layer: int, key: Tensor, value: Tensor, planned: NativePass) -> None:
        store_spans(_dense(key), _dense(value), planned.spans[layer])


def attend_native(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    cascade_pass: NativePass | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Attention of a packed pass in float32 on a CPU; shapes as of `kv.attend`."""
    if cascade_pass is None:
        raise RuntimeError(f"{type(module).__name__} does not hand the pass on to its attention function")
    layer: int = module.layer_idx  # type: ignore[assignment]
    scale = query.shape[3] ** -0.5 if scaling is None else scaling
    kind = Kind(scale, cascade_pass.windows[layer], softcap, None if s_aux is None else s_aux.contiguous())
    out = attend_spans(_dense(query), _dense(key), _dense(value), cascade_pass.spans[layer], kind)
    return out.view(1, query.shape[2], query.shape[1], value.shape[3]), None


def _dense(part: Tensor) -> Tensor:
    """``[heads, total_tokens, head_dim]`` with the numbers of a head one after another."""
    return part[0] if part.stride(3) == 1 else part[0].contiguous()


AttentionInterface.register(NATIVE, attend_native)


def choose_attention(device: torch.device, between: torch.dtype, dtype: torch.dtype, found: Survey) -> Attention:
    """The best strategy on ``device`` for a model with the layers that were found.

    ``between`` is the dtype of what lies between its products, ``dtype`` that of its weights, and of keys and values.
    """
    return Native(found, dtype) if device.type == "cpu" and between is torch.float32 else Contiguous()
