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


class Blocks:
    """Keys and values of some positions in a row, float32, finite everywhere."""

    __slots__ = ("_keys", "_shapes", "_values", "addresses", "capacity")

    def __init__(self, shapes: Mapping[int, Shape]) -> None:
        """``shapes`` are those of the layers, in their order."""
        self._shapes = shapes
        self.capacity = 0  # positions
        self._keys: list[Tensor] = []  # by layer [kv_heads, capacity / 16, key_size, 16]
        self._values: list[Tensor] = []  # by layer [kv_heads, blocks, capacity, 16]
        self.addresses = torch.zeros(len(shapes), 2, dtype=torch.int64)  # of both

    @torch.inference_mode()
    def _grow(self, positions: int) -> None:
        """Make room for ``positions``, in whole blocks; what is written stays."""
        keys, values, held = self._keys, self._values, self.capacity
        self._keys, self._values, self.capacity = [], [], positions
        for layer, shape in enumerate(self._shapes.values()):
            self._keys.append(torch.zeros(shape.kv_heads, positions // LANES, shape.key_size, LANES, dtype=torch.float32))
            self._values.append(torch.zeros(shape.kv_heads, blocks_of(shape.value_size), positions, LANES, dtype=torch.float32))
            if held:
                self._keys[layer][:, : held // LANES] = keys[layer]
                self._values[layer][:, :, :held] = values[layer]
        self.addresses = torch.tensor([[k.data_ptr(), v.data_ptr()] for k, v in zip(self._keys, self._values, strict=True)])

    @property
    def nbytes(self) -> int:
        """Memory held."""
        return sum(tensor.nbytes for tensor in (*self._keys, *self._values))

    def free(self) -> None:
        """Give the memory back."""
        self._keys, self._values, self.capacity = [], [], 0


class BlockedCache(Blocks):
    """Keys and values of one session.

    Room is made ahead of a pass by `reserve`, or as it is needed.
    """

    __slots__ = ()
    block = TILE

    def prepare(self, positions: int) -> None:
        """Make room for ``positions``, and for some more if there is none."""
        if positions > self.capacity:
            self.reserve(room(positions, self.capacity))

    def reserve(self, positions: int) -> None:
        """Make room for ``positions``, in whole tiles; what is written stays."""
        if (positions := tiled(positions)) > self.capacity:
            self._grow(positions)

    @torch.inference_mode()
    def take(self, source: "BlockedCache", positions: int) -> None:
        """Copy the first ``positions`` of ``source``, bit by bit; there must be room for them."""
        blocks = blocks_of(positions)
        for mine, other in zip(self._keys, source._keys, strict=True):
            mine[:, :blocks] = other[:, :blocks]
        for mine, other in zip(self._values, source._values, strict=True):
            mine[:, :, :positions] = other[:, :, :positions]

    def fork(self, position: int) -> "BlockedFork":
        """Another end of this text, from ``position`` on; it takes memory as it is written."""
        return BlockedFork(self, position)

    @torch.inference_mode()
    def join(self, fork: "BlockedFork") -> None:
        """Copy what ``fork`` holds, bit by bit, and free it."""
        self.prepare(fork.end)
        start, end, origin = fork.position, fork.end, fork.origin
        first, lane, last = start // LANES, start % LANES, blocks_of(end)
        for mine, other in zip(self._keys, fork._keys, strict=False):  # one that was never written holds nothing
            mine[:, first, :, lane:] = other[:, 0, :, lane:]
            mine[:, first + 1 : last] = other[:, 1 : last - first]
        for mine, other in zip(self._values, fork._values, strict=False):
            mine[:, :, start:end] = other[:, :, start - origin : end - origin]
        fork.free()

    @property
    def place(self) -> tuple[int, int, int, int]:
        """Fields of a span, see `cascade.native.attention.FIELDS`."""
        return self.capacity, 0, 0, 0


class BlockedFork(Blocks):
    """Keys and values of one session from a position on; those before it are its base's."""

    __slots__ = ("_base", "end", "origin", "position")

    def __init__(self, base: BlockedCache, position: int) -> None:
        super().__init__(base._shapes)
        self._base = base
        self.position = self.end = position  # first of its own, and behind the last
        self.origin = position // LANES * LANES  # of its first block

    def prepare(self, positions: int) -> None:
        """Make room for a text of ``positions``, which it holds after the pass."""
        self.end = positions
        if positions > self.origin + self.capacity:
            self._grow(blocks_of(positions - self.origin) * LANES)

    @property
    def place(self) -> tuple[int, int, int, int]:
        """Fields of a span, see `cascade.native.attention.FIELDS`."""
        return self.capacity, self.origin, self.position, self._base.capacity

    @property
    def sources(self) -> Tensor:
        """Addresses of its own keys and values and of its base's, int64 ``[layers, 4]``."""
        return torch.cat([self.addresses, self._base.addresses], dim=1)


def tables(rows: Sequence[tuple[BlockedCache | BlockedFork, int, int, int]], shapes: Mapping[int, Shape]) -> dict[int, Spans]:
    """What the kernel is told of the rows of a pass, by layer: each row's cache, first token, tokens and first position."""
    for cache, _, tokens, start in rows:  # before any address is taken: forks have those of others, too
        cache.prepare(start + tokens)
    table = torch.empty(len(shapes), len(rows), FIELDS, dtype=torch.int64)
    for number, (cache, begin, tokens, start) in enumerate(rows):
        table[:, number, :7] = torch.tensor((begin, tokens, start, *cache.place))
        if isinstance(cache, BlockedFork):
            table[:, number, 7:] = cache.sources
        else:
            table[:, number, 7:9] = cache.addresses
    longest = max(start + tokens for _, _, tokens, start in rows)
    return {layer: Spans(part, longest) for layer, part in zip(shapes, table, strict=True)}
