"""Attention over keys and values of sessions. Knows nothing of tokens, sampling or sessions.

A row of a pass writes its keys and values at its positions and attends to everything before: rolling back is starting a row
at an earlier position, and needs no code.

What a query attends to is summed up in an order that depends on its position alone, never on what else is in the pass: each
looks at all keys up to the end of its *tile* of positions, those after it hidden. So passes give the same bits, whatever
shares them; see ``docs/explanation/shared-noise.md``.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface

from cascade.engine.contiguous_cache import Fork
from cascade.scorer import TILE

ATTENTION = "cascade"  # our attention function's name at Transformers
MIN_ROWS = 4  # of queries: PyTorch takes the last one to three of many in another order
SCORES = 2**26  # of queries with keys that are held at once
SHARED = 2**22  # numbers in a mask that is kept from layer to layer


class Writable(Protocol):
    """Keys and values of one session that `attend` can use; such as a contiguous `Cache`.

    `write` stores ``[kv_heads, n, head_dim]`` and returns ``[1, kv_heads, m, head_dim]``: whole tiles, with any finite numbers
    after the text.
    """

    def write(self, layer: int, start: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]: ...


class Tile(NamedTuple):
    """Queries ``begin`` to ``end`` of a row, which all lie in one tile and look at its keys, ``first`` to ``last``."""

    begin: int
    end: int
    first: int
    last: int


@dataclass(slots=True)
class Span:
    """Where a row lies in the packed input ``[1, total_tokens]``: tokens ``begin`` to ``end`` are positions ``start`` on."""

    cache: Writable | Fork
    begin: int
    end: int
    start: int
    _tiles: dict[int | None, list[Tile]] = field(default_factory=dict)  # by window, shared by all layers of a pass
    _masks: dict[tuple[Tile, int | None, int], Tensor] = field(default_factory=dict)

    def tiles(self, window: int | None) -> list[Tile]:
        """The row, cut where tiles of positions begin."""
        tiles = self._tiles.get(window)
        if tiles is None:
            tiles = self._tiles[window] = []
            position, end = self.start, self.start + self.end - self.begin
            while position < end:
                floor = position - position % TILE
                upto = min(end, floor + TILE)
                first = 0 if window is None else max(0, floor - window + 1)
                tiles.append(Tile(position - self.start, upto - self.start, first, floor + TILE))
                position = upto
        return tiles

    def mask(self, tile: Tile, window: int | None, group: int, like: Tensor) -> Tensor:
        """What is added to scores, ``[n * group, last - first]`` in the dtype of ``like``: 0, or -inf for what is hidden.

        Heads of a query lie one after another. One row for one query, whatever its group.
        """
        key = (tile, window, group)
        mask = self._masks.get(key)
        if mask is None:
            n, at = tile.end - tile.begin, self.start + tile.begin - tile.first
            mask = like.new_full((n, tile.last - tile.first), -torch.inf)
            hidden = mask.triu(at + 1)
            mask = hidden if window is None else hidden + mask.tril(at - window)
            if n > 1:
                mask = F.pad(mask.repeat_interleave(group, dim=0), (0, 0, 0, -n * group % MIN_ROWS))
            if mask.numel() <= SHARED:
                self._masks[key] = mask
        return mask


@dataclass(slots=True)
class Pass:
    """The rows of one forward, on their way through the model to the attention function."""

    spans: Sequence[Span]
    windows: dict[int, int | None]  # by layer: positions a query sees, itself included; see `Survey`
    in_order: Sequence[tuple[int, Span]] = field(init=False)  # with their numbers: forks see what is written to their bases

    def __post_init__(self) -> None:
        self.in_order = sorted(enumerate(self.spans), key=lambda one: isinstance(one[1].cache, Fork))


class Scoring(NamedTuple):
    """How a layer makes weights of its scores; ``window`` is how many positions a query sees, itself included."""

    group: int  # heads of queries that share one of keys
    window: int | None
    scaling: float | None
    softcap: float | None
    sinks: Tensor | None  # [heads]


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
    queries = query[0].transpose(0, 1).unflatten(1, (key.shape[1], -1))
    scoring = Scoring(queries.shape[2], cascade_pass.windows[layer], scaling, softcap, s_aux)
    sizes = [span.end - span.begin for span in cascade_pass.spans]
    # a wrong draft that overflows must not reach those that do not see it: what is hidden from them counts 0 times
    parts = (finite(part[0]).split(sizes, dim=1) for part in (key, value))
    rows = list(zip(_by_row(queries, sizes), *parts, strict=True))
    found = {number: _row(span, layer, rows[number], scoring) for number, span in cascade_pass.in_order}
    out = [found[number] for number in range(len(found))]
    whole = torch.cat(out) if len(out) > 1 else out[0]
    return whole.flatten(1, 2).contiguous()[None], None  # some models view it as it is


def finite(part: Tensor) -> Tensor:
    """The same, and 0 where a number has overflowed."""
    return part.nan_to_num(0.0, 0.0, 0.0)


def _by_row(queries: Tensor, sizes: list[int]) -> list[Tensor]:
    """``[total_tokens, kv_heads, group, head_dim]``, cut. Groups of rows of one token are filled up, see `_tile`."""
    rows = list(queries.split(sizes))
    missing = -queries.shape[2] % MIN_ROWS
    if missing and 1 in sizes:
        single = F.pad(queries, (0, 0, 0, missing)).split(sizes)  # all at once
        rows = [one if len(one) == 1 else row for one, row in zip(single, rows, strict=True)]
    return rows


def _row(span: Span, layer: int, row: Sequence[Tensor], scoring: Scoring) -> Tensor:
    """Write one row's keys and values and attend over its session's, ``[n, kv_heads, group, head_dim]``.

    ``row`` are its query ``[n, kv_heads, group, head_dim]``, key and value ``[kv_heads, n, head_dim]``.
    """
    query, key, value = row
    if not isinstance(span.cache, Fork):
        return _over(span, query, *span.cache.write(layer, span.start, key, value), scoring)
    span.cache.write(layer, span.start, key, value)
    with span.cache.in_place(layer) as (keys, values):
        return _over(span, query, keys, values, scoring)


def _over(span: Span, query: Tensor, keys: Tensor, values: Tensor, scoring: Scoring) -> Tensor:
    """``[n, kv_heads, group, head_dim]`` against ``[1, kv_heads, capacity, head_dim]``, tile by tile."""
    tiles = span.tiles(scoring.window)
    if len(tiles) == 1:
        return _tile(span, tiles[0], query, keys, values, scoring)
    pieces = [_tile(span, tile, query[tile.begin : tile.end], keys, values, scoring) for tile in tiles]
    return torch.cat(pieces)


def _tile(span: Span, tile: Tile, query: Tensor, keys: Tensor, values: Tensor, scoring: Scoring) -> Tensor:
    """``[n, kv_heads, group, head_dim]`` against ``[1, kv_heads, capacity, head_dim]``."""
    n, group = len(query), scoring.group
    # heads that share keys become queries of one head: nothing is copied for them
    folded = query if n == 1 else query.transpose(0, 1).flatten(1, 2)[None]
    if missing := -folded.shape[2] % MIN_ROWS:
        folded = F.pad(folded, (0, 0, 0, missing))
    key, value = (part.narrow(2, tile.first, tile.last - tile.first) for part in (keys, values))
    mask = span.mask(tile, scoring.window, group, query)
    if scoring.softcap is None and scoring.sinks is None:
        out = F.scaled_dot_product_attention(folded, key, value, attn_mask=mask, scale=scoring.scaling)
    else:
        out = _written_out(folded, key, value, mask, scoring, n)
    if n == 1:
        return out[:, :, :group]
    return out[0, :, : n * group].view(len(out[0]), n, group, -1).transpose(0, 1)


def _written_out(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scoring: Scoring, n: int) -> Tensor:
    """The same for models that cap scores (Gemma 2) or let heads attend to nothing (GPT-OSS)."""
    _, kv_heads, rows, head_dim = query.shape
    if kv_heads > 1 and kv_heads * rows * key.shape[2] > SCORES:
        heads = zip(*(part.split(1, dim=1) for part in (query, key, value)), _by_head(scoring, kv_heads), strict=True)
        return torch.cat([_written_out(q, k, v, mask, own, n) for q, k, v, own in heads], dim=1)
    scores = query @ key.transpose(2, 3) * (head_dim**-0.5 if scoring.scaling is None else scoring.scaling)
    if scoring.softcap is not None:
        scores = torch.tanh(scores / scoring.softcap) * scoring.softcap
    scores = scores + mask
    if scoring.sinks is not None:
        sinks = scoring.sinks.to(scores.dtype).view(kv_heads, 1, -1).expand(-1, n, -1).reshape(1, kv_heads, -1, 1)
        scores = torch.cat([scores, F.pad(sinks, (0, 0, 0, rows - sinks.shape[2]))], dim=-1)
    weights = scores.softmax(-1, dtype=torch.float32).to(value.dtype)[..., : key.shape[2]]
    return weights @ value


def _by_head(scoring: Scoring, kv_heads: int) -> list[Scoring]:
    """The same for the queries of each head of keys."""
    if scoring.sinks is None:
        return [scoring] * kv_heads
    return [scoring._replace(sinks=sinks) for sinks in scoring.sinks.chunk(kv_heads)]


# No mask function is registered for ATTENTION: for a name without one Transformers builds no masks, and none are wanted.
AttentionInterface.register(ATTENTION, attend)
