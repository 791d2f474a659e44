"""Keys and values of sessions in the blocks that the kernel for attention reads; see `cascade.cpu.attention`."""

from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate, count
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

from cascade.cpu.attention import FIELDS, Spans, blocks_of
from cascade.cpu.tile import LANES
from cascade.scorer import TILE, grown_capacity, tiled


class Shape(NamedTuple):
    """Heads of keys and of values of a layer, and the sizes of both."""

    kv_heads: int
    key_size: int
    value_size: int


class BlockedCache:
    """Keys and values of one session, float32 or bfloat16, finite everywhere.

    Room is made ahead of a pass by `reserve`, or as it is needed.
    """

    __slots__ = ("_keys", "_values", "addresses", "capacity", "dtype", "shapes")
    block = TILE

    def __init__(self, shapes: Mapping[int, Shape], dtype: torch.dtype = torch.float32) -> None:
        """``shapes`` are those of the layers, in their order."""
        self.shapes = shapes
        self.dtype = dtype
        self.capacity = 0  # positions
        self._keys: list[Tensor] = []  # by layer [kv_heads, capacity / 16, key_size, 16]
        self._values: list[Tensor] = []  # by layer [kv_heads, blocks, capacity, 16]
        self.addresses: npt.NDArray[np.int64] = np.zeros((len(shapes), 2), dtype=np.int64)  # of both

    def prepare(self, positions: int) -> None:
        """Make room for ``positions``, and for some more if there is none."""
        if positions > self.capacity:
            self.reserve(grown_capacity(positions, self.capacity))

    @torch.inference_mode()
    def reserve(self, positions: int) -> None:
        """Make room for ``positions``, in whole tiles; what is written stays."""
        positions = tiled(positions)
        if positions <= self.capacity:
            return
        keys, values, held = self._keys, self._values, self.capacity
        self._keys, self._values, self.capacity = [], [], positions
        for layer, shape in enumerate(self.shapes.values()):
            self._keys.append(torch.zeros(shape.kv_heads, positions // LANES, shape.key_size, LANES, dtype=self.dtype))
            self._values.append(torch.zeros(shape.kv_heads, blocks_of(shape.value_size), positions, LANES, dtype=self.dtype))
            if held:
                self._keys[layer][:, : held // LANES] = keys[layer]
                self._values[layer][:, :, :held] = values[layer]
        self.addresses = np.array([[k.data_ptr(), v.data_ptr()] for k, v in zip(self._keys, self._values, strict=True)])

    def put(self, layer: int, start: int, states: Tensor) -> None:
        """Keep ``[n, width]`` from ``start`` on as the values of a layer that nobody attends to; there is room."""
        _put(self._values[list(self.shapes).index(layer)], start, states)

    def get(self, layer: int, start: int, end: int) -> Tensor:
        """What was kept there, ``[end - start, width]``."""
        return _get(self._values[list(self.shapes).index(layer)], start, end, self.shapes[layer])

    def writable(self, position: int) -> bool:
        """Whether what is held there is this session's alone."""
        return True

    @torch.inference_mode()
    def reuse(self, source: "BlockedCache", positions: int) -> None:
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
        start, end, origin = fork.position, fork.end, fork.origin
        self.prepare(end)
        first, lane, last = start // LANES, start % LANES, blocks_of(end)
        for mine, my_values, (keys, values) in zip(self._keys, self._values, fork.layers(), strict=False):
            mine[:, first, :, lane:] = keys[:, 0, :, lane:]
            mine[:, first + 1 : last] = keys[:, 1 : last - first]
            my_values[:, :, start:end] = values[:, :, start - origin : end - origin]
        fork.free()

    @property
    def place(self) -> tuple[int, int, int, int]:
        """Fields of a span, see `cascade.cpu.attention.FIELDS`."""
        return self.capacity, 0, 0, 0

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in (*self._keys, *self._values))

    def free(self) -> None:
        self._keys, self._values, self.capacity = [], [], 0


class BlockedFork:
    """Keys and values of one session from ``position`` on, finite everywhere; those before it are its base's."""

    __slots__ = ("_memory", "addresses", "base", "capacity", "end", "origin", "position")

    def __init__(self, base: BlockedCache, position: int) -> None:
        self.base = base
        self.position = self.end = position  # of its first, and one after its last
        self.origin = position // LANES * LANES  # of its first block
        self.capacity = 0  # positions from there on
        self._memory = torch.zeros(0)  # of all layers: forks come and go with every pass
        self.addresses = np.zeros_like(base.addresses)

    def prepare(self, positions: int) -> None:
        """Make room for a text of ``positions``, which it holds after the pass."""
        self.end = positions
        if positions > self.origin + self.capacity:
            self._grow(blocks_of(positions - self.origin) * LANES)

    @torch.inference_mode()
    def _grow(self, capacity: int) -> None:
        before, self.capacity = self.layers(), capacity
        *begins, size = accumulate(self._sizes(), initial=0)
        self._memory = torch.zeros(size, dtype=self.base.dtype)
        self.addresses = self._memory.data_ptr() + self._memory.itemsize * np.array(begins).reshape(-1, 2)
        for old, new in zip(before, self.layers() if before else (), strict=True):
            new[0][:, : old[0].shape[1]] = old[0]
            new[1][:, :, : old[1].shape[2]] = old[1]

    def _sizes(self) -> Iterator[int]:
        """Of the keys of a layer and of its values, of the next one's, and so on, in numbers."""
        for heads, key_size, value_size in self.base.shapes.values():
            yield heads * self.capacity * key_size
            yield heads * self.capacity * blocks_of(value_size) * LANES

    def put(self, layer: int, start: int, states: Tensor) -> None:
        _put(self.layers()[list(self.base.shapes).index(layer)][1], start - self.origin, states)

    def get(self, layer: int, start: int, end: int) -> Tensor:
        """The same, what is before its position from its base."""
        values, shape = self.layers()[list(self.base.shapes).index(layer)][1], self.base.shapes[layer]
        own = _get(values, max(start, self.position) - self.origin, max(end, self.position) - self.origin, shape)
        return own if start >= self.position else torch.cat([self.base.get(layer, start, min(end, self.position)), own])

    def writable(self, position: int) -> bool:
        return position >= self.position

    def layers(self) -> list[tuple[Tensor, Tensor]]:
        """Keys and values as a cache's, from ``origin`` on; nothing if none were written."""
        if not self.capacity:
            return []
        parts = iter(self._memory.split(list(self._sizes())))
        return [
            (
                next(parts).view(shape.kv_heads, self.capacity // LANES, shape.key_size, LANES),
                next(parts).view(shape.kv_heads, blocks_of(shape.value_size), self.capacity, LANES),
            )
            for shape in self.base.shapes.values()
        ]

    @property
    def place(self) -> tuple[int, int, int, int]:
        """Fields of a span, see `cascade.cpu.attention.FIELDS`."""
        return self.capacity, self.origin, self.position, self.base.capacity

    @property
    def nbytes(self) -> int:
        return self._memory.nbytes

    def free(self) -> None:
        self._memory, self.capacity = torch.zeros(0), 0


def _put(values: Tensor, start: int, states: Tensor) -> None:
    """Into ``[1, blocks, capacity, 16]``."""
    values[0, :, start : start + len(states)] = (
        F.pad(states, (0, -states.shape[1] % LANES)).unflatten(1, (-1, LANES)).transpose(0, 1)
    )


def _get(values: Tensor, start: int, end: int, shape: Shape) -> Tensor:
    return values[0, :, start:end].transpose(0, 1).flatten(1)[:, : shape.value_size].float()


def tables(rows: Sequence[tuple[BlockedCache | BlockedFork, int, int, int]], shapes: Mapping[int, Shape]) -> dict[int, Spans]:
    """What the kernel is told of the rows of a pass, by layer: each row's cache, first token, tokens and first position."""
    for cache, _, tokens, start in rows:  # before any address is taken: forks have those of others, too
        cache.prepare(start + tokens)
    table = np.empty((len(shapes), len(rows), FIELDS), dtype=np.int64)
    table[:, :, :7] = [(begin, tokens, start, *cache.place) for cache, begin, tokens, start in rows]
    for number, (cache, *_) in enumerate(rows):
        table[:, number, 7:9] = cache.addresses
        if isinstance(cache, BlockedFork):
            table[:, number, 9:] = cache.base.addresses
    longest = max(start + tokens for _, _, tokens, start in rows)
    addresses = count(table.ctypes.data, table.strides[0])
    short = all(_dtype(cache) is torch.bfloat16 for cache, *_ in rows)
    return {layer: Spans(part, address, longest, short) for layer, part, address in zip(shapes, table, addresses, strict=False)}


def _dtype(cache: BlockedCache | BlockedFork) -> torch.dtype:
    return cache.dtype if isinstance(cache, BlockedCache) else cache.base.dtype
