"""Keys and values of a session in one piece, and of branches of it in pieces of their own."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from cascade.scorer import BLOCK, TILE, grown_capacity, num_blocks, tiled


class Cache:
    """Keys and values of one session, per layer ``[1, kv_heads, capacity, head_dim]``; K and V may differ in size.

    Storage is contiguous, so that attention reads it in place, and finite everywhere: what is after the text is hidden from
    queries, and not left out. Room is made ahead of a pass by `reserve`, or as it is needed.
    """

    __slots__ = ("_layers", "capacity")
    block = TILE

    def __init__(self) -> None:
        self.capacity = 0  # positions
        self._layers: dict[int, tuple[Tensor, Tensor]] = {}

    def write(self, layer: int, start: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Store ``[kv_heads, n, head_dim]`` at ``start`` and return all there is, ``[1, kv_heads, capacity, head_dim]``."""
        length = key.shape[1]
        keys, values = pair = self.hold(layer, start + length, key, value)
        keys.narrow(2, start, length).copy_(key)
        values.narrow(2, start, length).copy_(value)
        return pair

    def hold(self, layer: int, positions: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """All there is, and room for ``positions``; the layer's heads are like those of ``[kv_heads, n, head_dim]``."""
        if positions > self.capacity:
            self.reserve(grown_capacity(positions, self.capacity))
        pair = self._layers.get(layer)
        if pair is None:
            pair = self._layers[layer] = _resized(key[None, :, :0], self.capacity), _resized(value[None, :, :0], self.capacity)
        return pair

    @torch.inference_mode()
    def reserve(self, positions: int) -> None:
        """Make room for ``positions``, in whole tiles; what is written stays."""
        positions = tiled(positions)
        if positions > self.capacity:
            for layer, (keys, values) in self._layers.items():  # one at a time: memory peaks by a layer, not by a cache
                self._layers[layer] = _resized(keys, positions), _resized(values, positions)
            self.capacity = positions

    def put(self, layer: int, start: int, states: Tensor) -> None:
        """Keep ``[n, width]`` from ``start`` on in a layer of its own, which nobody attends to."""
        self.write(layer, start, states[None], states[None, :, :0])

    def get(self, layer: int, start: int, end: int) -> Tensor:
        """What was kept there, ``[end - start, width]``."""
        return self._layers[layer][0][0, 0, start:end]

    def writable(self, position: int) -> bool:
        """Whether what is held there is this session's alone."""
        return True

    @torch.inference_mode()
    def reuse(self, source: "Cache", positions: int) -> None:
        """Copy the first ``positions`` of ``source``, bit by bit; there must be room for them."""
        for layer, (keys, values) in source._layers.items():
            self.write(layer, 0, keys[0, :, :positions], values[0, :, :positions])

    def fork(self, position: int) -> "Fork":
        """Another end of this text, from ``position`` on; it takes memory as it is written."""
        return Fork(self, position)

    @torch.inference_mode()
    def join(self, fork: "Fork") -> None:
        """Copy what ``fork`` holds, bit by bit, and free it."""
        for layer in fork.layers:
            self.write(layer, fork.position, *fork.held(layer))
        fork.free()

    @property
    def nbytes(self) -> int:
        """Memory held."""
        return sum(tensor.nbytes for pair in self._layers.values() for tensor in pair)

    def free(self) -> None:
        """Give the memory back."""
        self._layers.clear()
        self.capacity = 0


class Fork:
    """Keys and values of one session from ``position`` on; those before it are its base's.

    What they are attended with lies in the base's storage for as long as that takes, see `in_place`: so attention over a fork
    is that over a cache, with the same bits.
    """

    __slots__ = ("_base", "_end", "_layers", "position")

    def __init__(self, base: Cache, position: int) -> None:
        self._base = base
        self.position = self._end = position
        self._layers: dict[int, tuple[Tensor, Tensor]] = {}  # as a cache's, but from ``position`` on

    def write(self, layer: int, start: int, key: Tensor, value: Tensor) -> None:
        """Store ``[kv_heads, n, head_dim]`` at ``start``, after which nothing is held then."""
        at, length = start - self.position, key.shape[1]
        self._end = start + length
        keys, values = self._layers.get(layer, (key[None, :, :0], value[None, :, :0]))
        if at + length > keys.shape[2]:
            capacity = BLOCK * num_blocks(at + length)
            keys, values = self._layers[layer] = _resized(keys, capacity), _resized(values, capacity)
        keys.narrow(2, at, length).copy_(key)
        values.narrow(2, at, length).copy_(value)

    def put(self, layer: int, start: int, states: Tensor) -> None:
        """As a cache does."""
        self.write(layer, start, states[None], states[None, :, :0])

    def get(self, layer: int, start: int, end: int) -> Tensor:
        """The same, what is before its position from its base."""
        own = self._layers[layer][0][0, 0, max(0, start - self.position) : max(0, end - self.position)]
        if start >= self.position:
            return own
        return torch.cat([self._base.get(layer, start, min(end, self.position)), own])

    def writable(self, position: int) -> bool:
        """Its own positions are."""
        return position >= self.position

    @property
    def layers(self) -> Sequence[int]:
        """Those that were written."""
        return tuple(self._layers)

    def held(self, layer: int) -> tuple[Tensor, Tensor]:
        """What was written, each ``[kv_heads, n, head_dim]``."""
        keys, values = self._layers[layer]
        size = self._end - self.position
        return keys[0, :, :size], values[0, :, :size]

    @contextmanager
    def in_place(self, layer: int) -> Iterator[tuple[Tensor, Tensor]]:
        """The whole text, ``[1, kv_heads, capacity, head_dim]``, while the base lends its storage."""
        own = self.held(layer)
        whole = self._base.hold(layer, self._end, *own)
        places = [part[0].narrow(1, self.position, self._end - self.position) for part in whole]
        lent = [place.clone() for place in places]
        try:
            for place, part in zip(places, own, strict=True):
                place.copy_(part)
            yield whole
        finally:
            for place, part in zip(places, lent, strict=True):
                place.copy_(part)

    @property
    def nbytes(self) -> int:
        """Memory held."""
        return sum(tensor.nbytes for pair in self._layers.values() for tensor in pair)

    def free(self) -> None:
        """Give the memory back."""
        self._layers.clear()


def _resized(old: Tensor, capacity: int) -> Tensor:
    new = old.new_zeros(*old.shape[:2], capacity, old.shape[3])
    new[:, :, : old.shape[2]] = old
    return new
