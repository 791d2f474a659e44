"""How a model holds keys and values and attends to them: by our own kernel on CPUs, by PyTorch's on other devices.

A row of a pass writes its keys and values at its positions and attends to everything before. Rolling back is starting a row at
an earlier position, and needs no code.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from transformers import AttentionInterface

from cascade.cpu.attention import Kind, Spans
from cascade.cpu.attention import attend as attend_spans
from cascade.cpu.attention import store as store_spans
from cascade.cpu.cache import BlockedCache, Shape, tables
from cascade.engine.network.survey import Survey

NATIVE = "cascade_native"  # our attention function's name at Transformers

Windows = dict[int, int | None]  # by layer, see `cascade.engine.network.survey.Survey`


class Span(NamedTuple):
    """Where a row lies in the packed input ``[1, total_tokens]``: tokens ``begin`` to ``end`` are positions ``start`` on."""

    cache: Any  # a store of the model, or a fork of one
    begin: int
    end: int
    start: int


class Attention(Protocol):
    """A way to hold keys and values, as `cascade.engine.model.Model` uses it."""

    name: str  # of its attention function, at Transformers
    same_bits: bool  # what a query gets does not depend on what shares the pass, to the bit

    def new_cache(self) -> Any:
        """Keys and values of a new session: a `cascade.scorer.Store`."""

    def plan(self, spans: Sequence[Span], windows: Windows) -> Any:
        """What the layers of a pass are given."""

    def write(self, layer: int, key: Tensor, value: Tensor, planned: Any) -> None:
        """Put keys and values ``[1, kv_heads, total_tokens, head_dim]`` where the pass has its rows, for later ones to see."""


@dataclass(slots=True)
class NativePass:
    """What `attend_native` needs, for all layers of a pass."""

    spans: dict[int, Spans]  # by layer
    windows: Windows


class Native:
    """Our own kernel for CPUs, which computes in float32: a session's keys and values lie in the order that suits it."""

    name = NATIVE
    same_bits = True

    def __init__(self, found: Survey, dtype: torch.dtype) -> None:
        """Keys and values are held in bfloat16 if that is the network's ``dtype``, and in float32 otherwise."""
        self._dtype = torch.bfloat16 if dtype is torch.bfloat16 else torch.float32
        self._shapes = {layer: Shape(*heads[1:]) for layer, heads in found.heads.items()}
        self._shapes |= {layer: Shape(1, 0, width) for layer, width in found.kept.items()}

    def new_cache(self) -> BlockedCache:
        return BlockedCache(self._shapes, self._dtype)

    def plan(self, spans: Sequence[Span], windows: Windows) -> NativePass:
        rows = [(span.cache, span.begin, span.end - span.begin, span.start) for span in spans]
        return NativePass(tables(rows, self._shapes), windows)

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
    """Attention of a packed pass on a CPU; shapes as of `cascade.engine.network.contiguous.attend`."""
    if cascade_pass is None:
        raise RuntimeError(f"{type(module).__name__} does not hand the pass on to its attention function")
    layer: int = module.layer_idx  # type: ignore[assignment]
    scale = query.shape[3] ** -0.5 if scaling is None else scaling
    kind = Kind(scale, cascade_pass.windows[layer], softcap, None if s_aux is None else s_aux.float().contiguous())
    out = attend_spans(_dense(query), _dense(key), _dense(value), cascade_pass.spans[layer], kind)
    return out.view(1, query.shape[2], query.shape[1], value.shape[3]).to(query.dtype), None


def _dense(part: Tensor) -> Tensor:
    """``[heads, total_tokens, head_dim]`` float32 with the numbers of a head one after another."""
    return (part[0] if part.stride(3) == 1 else part[0].contiguous()).float()


AttentionInterface.register(NATIVE, attend_native)
