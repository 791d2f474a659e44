"""How networks of Transformers attend, and how a model holds keys and values: in our own kernel's layout on CPUs, in contiguous
tensors with PyTorch's attention on other devices.

A row of a pass writes its keys and values at its positions and attends to everything before. A rollback starts a row at
an earlier position, and needs no code. A *survey* is a forward pass that records what each layer attends to.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING, Any, Self, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cascade.cpu.attention import Kind, Sizes, Spans
from cascade.cpu.attention import attend as attend_spans
from cascade.cpu.cache import BlockedCache, Span, tables
from cascade.errors import ModelError
from cascade.scorer import BLOCK, TILE, grown_capacity

if TYPE_CHECKING:
    from transformers import PreTrainedModel  # takes seconds

# names in Transformers of our attention function, of `survey`, and of the same for passes without a mask
ATTENTION, SURVEY, SIZES = "cascade", "cascade_survey", "cascade_sizes"
FAR = 4096  # the position at which a mask is examined if it names no size of its own


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
    """Register these functions in Transformers, whose model code takes seconds to import.

    `ATTENTION` has no mask function, so Transformers builds no masks for it.
    """
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(ATTENTION, attend)
    AttentionInterface.register(SURVEY, survey)
    AttentionInterface.register(SIZES, survey)
    AttentionMaskInterface.register(SURVEY, window_of_mask)


@dataclass(slots=True)
class Survey:
    """Results of a forward pass with the attention `SURVEY`; a layer's window is derived from its mask."""

    windows: dict[int, int | None] = field(default_factory=dict)
    strange: bool = False  # some layer's mask is neither causal nor a sliding window
    heads: dict[int, Sizes] = field(default_factory=dict)

    @classmethod
    def of(cls, network: "PreTrainedModel") -> Self:
        """Survey a loaded network, which keeps this attention; raises `ModelError` if it cannot be served with ours."""
        register()
        network.set_attn_implementation(SURVEY)
        ids = torch.zeros(1, 2, dtype=torch.long, device=network.device)
        survey = cls()
        network(input_ids=ids, use_cache=False, cascade_pass=survey)
        layers = network.config.get_text_config().num_hidden_layers
        if len(survey.windows) != layers:
            raise ModelError(f"{len(survey.windows)} of its {layers} layers use the attention interface of Transformers")
        if survey.strange:
            raise ModelError("it has layers that are neither full nor sliding attention")
        return survey

    def cut(self, layers: Sequence[int]) -> "Survey":
        """The survey of a network that has only these ``layers``."""
        places = dict(enumerate(layers))
        heads = {place: self.heads[layer] for place, layer in places.items()}
        return Survey({place: self.windows[layer] for place, layer in places.items()}, self.strange, heads)


def survey(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    cascade_pass: Survey | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Record the window and the heads of a layer; the result of attention does not matter."""
    if cascade_pass is None:
        raise TypeError(f"{type(module).__name__} does not hand the pass on to its attention function")
    window = -1 if attention_mask is None else int(attention_mask.flatten()[0])
    cascade_pass.strange |= window < 0
    cascade_pass.windows[module.layer_idx] = window or None  # type: ignore[index]
    sizes = Sizes(query.shape[1], key.shape[1], key.shape[3], value.shape[3])
    cascade_pass.heads[module.layer_idx] = sizes  # type: ignore[index]
    return value.new_zeros(1, query.shape[2], query.shape[1], value.shape[3]), None


def window_of_mask(*, mask_function: Callable[..., Tensor], local_size: int | None = None, **_: Any) -> Tensor:
    """A mask's sliding window, 0 if it is only causal, -1 for any other mask; ``[1, 1, 1, 1]``.

    Registered for `SURVEY`, so that models pass it to their layers instead of a mask.
    """
    far = 2 * local_size if local_size else FAR
    counts = set()
    for position in (far, far + far // 4):  # unlike windows, chunks show different numbers of positions to the two
        query, keys, first = torch.tensor(position), torch.arange(position + 2), torch.tensor(0)
        seen = mask_function(first, first, query, keys).expand_as(keys)
        count = int(seen.sum())
        regular = seen[position + 1 - count : position + 1].all() and not seen[position + 1]
        counts.add(-1 if not regular else 0 if count == position + 1 else count)
    return torch.tensor(counts.pop() if len(counts) == 1 else -1).reshape(1, 1, 1, 1)


@dataclass(slots=True)
class NativePass:
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


# PyTorch's attention


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

    def __init__(self, survey: Survey, dtype: torch.dtype) -> None:
        self._windows = survey.windows

    def new_cache(self) -> Cache:
        return Cache()

    def plan(self, spans: Sequence[Span]) -> Pass:
        return Pass(spans, self._windows)


Attention: TypeAlias = type[Native] | type[Contiguous]


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
