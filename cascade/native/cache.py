"""Keys and values of sessions in the blocks that the kernel for attention reads; see `cascade.native.attention`."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from cascade.native.attention import FIELDS, Spans, blocks_of
from cascade.native.tile import LANES
from cascade.scorer import TILE, room, tiled


class Shape(NamedTuple):
    """Heads of keys and of values of a layer, and the sizes of both."""

    kv_heads: int
    key_size: int
    value_size: int


class BlockedCache:
    """Keys and values of one session, float32, finite everywhere.

    Room is made ahead of a pass by `reserve`, or as it is needed.
    """

    __slots__ = ("_keys", "_shapes", "_values", "addresses", "capacity")
    block = TILE

    def __init__(self, shapes: Mapping[int, Shape]) -> None:
        """``shapes`` are those of the layers, in their order."""
        self._shapes = shapes
        self.capacity = 0  # positions
        self._keys: list[Tensor] = []  # by layer [kv_heads, capacity / 16, key_size, 16]
        self._values: list[Tensor] = []  # by layer [kv_heads, blocks, capacity, 16]
        self.addresses = torch.zeros(len(shapes), 2, dtype=torch.int64)  # of both

    def prepare(self, positions: int) -> None:
        """Make room for ``positions``, and for some more if there is none."""
        if positions > self.capacity:
            self.reserve(room(positions, self.capacity))

    @torch.inference_mode()
    def reserve(self, positions: int) -> None:
        """Make room for ``positions``, in whole tiles; what is written stays."""
        positions = tiled(positions)
        if positions <= self.capacity:
            return
        keys, values, held = self._keys, self._values, self.capacity
        self._keys, self._values, self.capacity = [], [], positions
        for layer, shape in enumerate(self._shapes.values()):
            self._keys.append(torch.zeros(shape.kv_heads, positions // LANES, shape.key_size, LANES, dtype=torch.float32))
            self._values.append(torch.zeros(shape.kv_heads, blocks_of(shape.value_size), positions, LANES, dtype=torch.float32))
            if held:
                self._keys[layer][:, : held // LANES] = keys[layer]
                self._values[layer][:, :, :held] = values[layer]
        self.addresses = torch.tensor([[k.data_ptr(), v.data_ptr()] for k, v in zip(self._keys, self._values, strict=True)])

    @torch.inference_mode()
    def take(self, source: "BlockedCache", positions: int) -> None:
        """Copy the first ``positions`` of ``source``, bit by bit; there must be room for them."""
        blocks = blocks_of(positions)
        for mine, other in zip(self._keys, source._keys, strict=True):
            mine[:, :blocks] = other[:, :blocks]
        for mine, other in zip(self._values, source._values, strict=True):
            mine[:, :, :positions] = other[:, :, :positions]

    @property
    def nbytes(self) -> int:
        """Memory held."""
        return sum(tensor.nbytes for tensor in (*self._keys, *self._values))

    def free(self) -> None:
        """Give the memory back."""
        self._keys, self._values, self.capacity = [], [], 0


def tables(rows: Sequence[tuple[BlockedCache, int, int, int]], shapes: Mapping[int, Shape]) -> dict[int, Spans]:
    """What the kernel is told of the rows of a pass, by layer: each row's cache, first token, tokens and first position."""
    table = torch.empty(len(shapes), len(rows), FIELDS, dtype=torch.int64)
    for number, (cache, begin, tokens, start) in enumerate(rows):
        cache.prepare(start + tokens)
        table[:, number, :3] = torch.tensor((begin, tokens, start))
        table[:, number, 3:5] = cache.addresses
        table[:, number, 5] = cache.capacity
    longest = max(start + tokens for _, _, tokens, start in rows)
    return {layer: Spans(part, longest) for layer, part in zip(shapes, table, strict=True)}
