"""Keys and values of sessions in the blocks that the kernel for attention reads; see `cascade.cpu.attention`."""

from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate, count
from typing import Any, NamedTuple, Self

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from cascade.cpu.attention import FIELDS, Sizes, Spans, blocks_of
from cascade.cpu.tile import LANES
from cascade.scorer import TILE, Row, grown_capacity, tiled


class BlockedCache:
    """Keys and values of one session, float32 or bfloat16, finite everywhere.

    `reserve` allocates memory ahead of a pass; otherwise it is allocated as needed.
    """

    __slots__ = ("_layers", "_memory", "addresses", "capacity", "dtype", "shapes")
    block = TILE
    position = 0  # its first position
    origin = 0  # position of its first block

    def __init__(self, shapes: Mapping[int, Sizes], dtype: torch.dtype = torch.float32) -> None:
        """``shapes`` has the sizes of each layer, in the order of layers."""
        self.shapes = shapes
        self.dtype = dtype
        self.capacity = 0  # positions from the origin on
        self._memory = torch.zeros(0)  # one buffer for all layers
        self._layers: list[tuple[Tensor, Tensor]] = []  # views of it, see `layers`
        self.addresses: npt.NDArray[np.int64] = np.zeros((len(shapes), 2), dtype=np.int64)  # by layer: keys, values

    def prepare(self, positions: int) -> None:
        """Make room for ``positions``, with some to spare."""
        if positions > self.capacity:
            self.reserve(grown_capacity(positions, self.capacity))

    def reserve(self, positions: int) -> None:
        """Make room for exactly ``positions``, rounded up to whole tiles; keeps the contents."""
        if positions > self.capacity:
            self._grow(tiled(positions))

    @torch.inference_mode()
    def _grow(self, capacity: int) -> None:
        before = self.layers()
        *begins, size = accumulate(self._sizes(capacity), initial=0)
        self._memory = torch.zeros(size, dtype=self.dtype)  # if this raises, nothing has changed
        self._layers, self.capacity = [], capacity
        self.addresses = self._memory.data_ptr() + self._memory.itemsize * np.array(begins).reshape(-1, 2)
        for (old_keys, old_values), (keys, values) in zip(before, self.layers() if before else (), strict=True):
            keys[:, : old_keys.shape[1]] = old_keys
            values[:, :, : old_values.shape[2]] = old_values

    @property
    def _per_word(self) -> int:
        """Places of the depth in a word, see `cascade.cpu.attention`."""
        return 2 if self.dtype is torch.bfloat16 else 1

    def _sizes(self, capacity: int) -> Iterator[int]:
        """Elements of the keys of a layer, of its values, of the keys of the next layer, and so on."""
        for _, heads, key_size, value_size in self.shapes.values():
            yield heads * capacity * -(-key_size // self._per_word) * self._per_word
            yield heads * capacity * blocks_of(value_size) * LANES

    def layers(self) -> list[tuple[Tensor, Tensor]]:
        """By layer: keys ``[kv_heads, capacity / 16, words, 16, p]`` and values ``[kv_heads, blocks, capacity / p, 16, p]``.

        ``p`` is the number of places in a word. They begin at the origin. Empty if nothing was written.
        """
        if self.capacity and not self._layers:
            parts, per_word = iter(self._memory.split(list(self._sizes(self.capacity)))), self._per_word
            for shape in self.shapes.values():
                keys = next(parts).view(shape.kv_heads, self.capacity // LANES, -1, LANES, per_word)
                values = next(parts).view(shape.kv_heads, blocks_of(shape.value_size), -1, LANES, per_word)
                self._layers.append((keys, values))
        return self._layers

    @torch.inference_mode()
    def reuse(self, source: "BlockedCache", positions: int) -> None:
        """Copy the first ``positions`` of ``source``, bit by bit; there must be room for them."""
        blocks, words = blocks_of(positions), -(-positions // self._per_word)
        for (keys, values), (other_keys, other_values) in zip(self.layers(), source.layers(), strict=True):
            keys[:, :blocks] = other_keys[:, :blocks]
            values[:, :, :words] = other_values[:, :, :words]

    def fork(self, position: int) -> "BlockedFork":
        """A continuation of this text from ``position`` on, which takes memory as it grows."""
        return BlockedFork(self, position)

    @torch.inference_mode()
    def join(self, fork: "BlockedFork") -> None:
        """Copy the contents of ``fork`` bit by bit, and free it."""
        start, end, origin, per_word = fork.position, fork.end, fork.origin, self._per_word
        self.prepare(end)
        first, lane, last = start // LANES, start % LANES, blocks_of(end)
        for (mine, my_values), (keys, values) in zip(self.layers(), fork.layers(), strict=False):
            mine[:, first, :, lane:] = keys[:, 0, :, lane:]
            mine[:, first + 1 : last] = keys[:, 1 : last - first]
            for place in range(per_word):  # of a pair in which the fork begins, this text keeps the first position
                begin, after = (-(-(position - place) // per_word) for position in (start, end))
                skipped = origin // per_word
                my_values[:, :, begin:after, :, place] = values[:, :, begin - skipped : after - skipped, :, place]
        fork.free()

    @property
    def place(self) -> tuple[int, int, int, int]:
        """Capacity, origin, position, capacity of the base: fields of a span in `cascade.cpu.attention`."""
        return self.capacity, 0, 0, 0

    @property
    def nbytes(self) -> int:
        return self._memory.nbytes

    def free(self) -> None:
        self._memory, self._layers, self.capacity = torch.zeros(0), [], 0


class BlockedFork(BlockedCache):
    """Keys and values of one session from ``position`` on; the earlier ones belong to its base."""

    __slots__ = ("base", "end", "origin", "position")

    def __init__(self, base: BlockedCache, position: int) -> None:
        super().__init__(base.shapes, base.dtype)
        self.base = base
        self.position = self.end = position  # the first position that it holds, and the one after its last
        self.origin = position // LANES * LANES

    def prepare(self, positions: int) -> None:
        """Make room for a text of ``positions``, its length after the pass."""
        self.end = positions
        if positions > self.origin + self.capacity:
            self._grow(blocks_of(positions - self.origin) * LANES)

    @property
    def place(self) -> tuple[int, int, int, int]:
        return self.capacity, self.origin, self.position, self.base.capacity


class Span(NamedTuple):
    """Where a row lies in the packed input ``[1, total_tokens]``: tokens ``begin`` to ``end`` are positions ``start`` on."""

    cache: Any  # a store of the model, or a fork of one
    begin: int
    end: int
    start: int


class Packed(NamedTuple):
    """The rows of a pass one after another, as one input of a network."""

    tokens: list[int]
    positions: list[int]
    keep: list[int]  # indices whose logits are wanted
    spans: list[Span]  # one for each row

    @classmethod
    def of(cls, rows: Sequence[Row]) -> Self:
        packed = cls([], [], [], [])
        tokens, positions, keep, spans = packed
        for row in rows:
            begin, start = len(tokens), row.start
            tokens += row.input_ids
            end = len(tokens)
            spans.append(Span(row.cache, begin, end, start))
            positions += range(start, start + end - begin)
            keep += range(end - row.num_scored, end)
        return packed


def tables(rows: Sequence[Span], shapes: Mapping[int, Sizes]) -> dict[int, Spans]:
    """The `Spans` of a pass by layer."""
    ends = [start + end - begin for _, begin, end, start in rows]
    for row, end in zip(rows, ends, strict=True):  # before any address is read: spans of forks contain addresses of their bases
        row.cache.prepare(end)
    table = np.empty((len(shapes), len(rows), FIELDS), dtype=np.int64)
    table[:, :, :7] = [(begin, end - begin, start, *cache.place) for cache, begin, end, start in rows]
    for number, (cache, *_) in enumerate(rows):
        table[:, number, 7:9] = cache.addresses
        if isinstance(cache, BlockedFork):
            table[:, number, 9:] = cache.base.addresses
    longest, addresses = max(ends), count(table.ctypes.data, table.strides[0])
    short = all(cache.dtype is torch.bfloat16 for cache, *_ in rows)
    return {layer: Spans(part, address, longest, short) for layer, part, address in zip(shapes, table, addresses, strict=False)}
