"""Keys and values in blocks that sessions share: reference counts, block tables, copy on write. Knows nothing of tokens.

A session's positions lie in the blocks of its table, in that order, wherever these are. What two sessions have in common they
hold together, block by block; who writes into a shared block gets a copy of it first. Rolling back needs no code, as in
`cascade.engine.kv`.
"""

from collections.abc import Collection, Sequence
from itertools import count

import torch
from torch import Tensor

from cascade.errors import ModelError
from cascade.scorer import tiled

SCRATCH = 0  # the block that tokens without a session write to
RESERVED = 2  # blocks that no session of a tier can have: the scratch one, and one for the probe of a model that failed
_versions = count(1)


class Blocks:
    """Memory for ``num_blocks`` blocks of ``block`` positions, per layer ``[num_blocks, block, kv_heads, head_dim]``."""

    def __init__(self, num_blocks: int, block: int) -> None:
        self.block = block
        self.total = num_blocks
        self._free = list(range(num_blocks - 1, SCRATCH, -1))
        self._users = [0] * num_blocks
        self._layers: dict[int, tuple[Tensor, Tensor]] = {}

    @torch.inference_mode()
    def resized(self, num_blocks: int) -> "Blocks":
        """Empty memory for the same layers; this one's is given back first, and must not be used again."""
        sizes = {layer: (keys[0, :0], values[0, :0]) for layer, (keys, values) in self._layers.items()}
        shapes = {layer: tuple((part.shape[1:], part.dtype, part.device) for part in pair) for layer, pair in sizes.items()}
        del sizes
        self._layers.clear()
        new = Blocks(num_blocks, self.block)
        for layer, ((key_shape, dtype, device), (value_shape, _, _)) in shapes.items():
            keys = torch.zeros(num_blocks, self.block, *key_shape, dtype=dtype, device=device)
            new._layers[layer] = keys, torch.zeros(num_blocks, self.block, *value_shape, dtype=dtype, device=device)
        return new

    def layer(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values of a layer, made when it writes its first ``[kv_heads, n, head_dim]``."""
        pair = self._layers.get(layer)
        if pair is None:
            keys, values = (part.new_zeros(self.total, self.block, part.shape[0], part.shape[2]) for part in (key, value))
            pair = self._layers[layer] = keys, values
        return pair

    def write(self, layer: int, slots: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Store ``[kv_heads, n, head_dim]`` at these places among the positions of all blocks; all that the layer holds."""
        held = self.layer(layer, key, value)
        for blocks, new in zip(held, (key, value), strict=True):
            blocks.flatten(0, 1).index_copy_(0, slots, new.transpose(0, 1))
        return held

    def put(self, layer: int, slots: Sequence[int], states: Tensor) -> None:
        """Keep ``[n, width]`` at these places among the positions of all blocks, in a layer that nobody attends to."""
        kept, _ = self.layer(layer, states[None], states[None, :, :0])
        kept.flatten(0, 1).index_copy_(0, _on(states.device, slots), states[:, None])

    def get(self, layer: int, slots: Sequence[int]) -> Tensor:
        """What was kept there, ``[n, width]``."""
        kept, _ = self._layers[layer]
        return kept.flatten(0, 1).index_select(0, _on(kept.device, slots))[:, 0]

    def take(self, number: int) -> list[int]:
        """So many free blocks, for one user; raises `ModelError` if there are not as many."""
        if number > len(self._free):
            raise ModelError(f"{number} blocks of keys and values are wanted and {len(self._free)} of {self.total} are free")
        taken = [self._free.pop() for _ in range(number)]
        for block in taken:
            self._users[block] = 1
        return taken

    def share(self, blocks: Sequence[int]) -> None:
        """One user more for each of ``blocks``."""
        for block in blocks:
            self._users[block] += 1

    def drop(self, blocks: Sequence[int]) -> None:
        """One user less for each of ``blocks``."""
        for block in blocks:
            self._users[block] -= 1
            if not self._users[block]:
                self._free.append(block)

    def shared(self, block: int) -> bool:
        """Whether more than one session holds it."""
        return self._users[block] > 1

    @torch.inference_mode()
    def copy(self, source: int, target: int, positions: int) -> None:
        """Copy the first ``positions`` of a block, bit by bit, in all layers."""
        for pair in self._layers.values():
            for part in pair:
                part[target, :positions] = part[source, :positions]

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def block_bytes(self) -> int:
        """Memory of a block in all layers."""
        return sum(part[0].nbytes for pair in self._layers.values() for part in pair)

    def check(self, caches: Collection["PagedCache"]) -> None:
        """Raise `AssertionError`, with the arithmetic, unless ``caches`` are all that hold blocks."""
        held = [block for cache in caches for block in cache.table]
        num_held, num_users = len(set(held)), sum(self._users)
        assert num_users == len(held), f"blocks have {num_users} users, and {len(held)} places in tables"
        sum_ = f"{self.num_free} free + {num_held} held blocks are {self.num_free + num_held} of {self.total - 1}"
        assert self.num_free + num_held == self.total - 1, sum_
        assert SCRATCH not in held, "a session holds the scratch block"
        assert not set(held) & set(self._free), "a block is held and free"


def _on(device: torch.device, numbers: Sequence[int]) -> Tensor:
    return torch.tensor(numbers).to(device, non_blocking=True)


class PagedCache:
    """Keys and values of one session: a table of blocks. See `cascade.scorer.Store`."""

    __slots__ = ("__weakref__", "_blocks", "_slot_mapping", "table", "version")

    def __init__(self, blocks: Blocks) -> None:
        self._blocks = blocks
        self._slot_mapping: Tensor | None = None  # int64 [tiled(capacity)], where each position lies among all blocks'
        self.table: list[int] = []
        self.version = 0  # another one whenever the table is, different from those of all other caches

    @property
    def block(self) -> int:
        """Positions that are taken at once."""
        return self._blocks.block

    @property
    def capacity(self) -> int:
        """Positions."""
        return len(self.table) * self._blocks.block

    @property
    def nbytes(self) -> int:
        """Memory of its blocks, shared ones included."""
        return len(self.table) * self._blocks.block_bytes

    def reserve(self, positions: int) -> None:
        """Make room for ``positions`` in all; what is written stays."""
        missing = -(-positions // self._blocks.block) - len(self.table)
        if missing > 0:
            self.table += self._blocks.take(missing)
            self._changed()

    def take(self, source: "PagedCache", positions: int) -> None:
        """Hold the first ``positions`` of ``source``: whole blocks together with it, the rest as a copy."""
        whole, rest = divmod(positions, self._blocks.block)
        common = source.table[:whole]
        self._blocks.share(common)
        self._blocks.drop(self.table[:whole])
        self.table[:whole] = common
        self.reserve(positions)
        self._changed()
        if rest:
            self.prepare(whole * self._blocks.block, positions)
            self._blocks.copy(source.table[whole], self.table[whole], rest)

    def fork(self, position: int) -> "PagedCache":
        """A store that goes on otherwise from ``position`` on, with blocks of its own from there."""
        fork = PagedCache(self._blocks)
        fork.take(self, position)
        return fork

    def join(self, fork: "PagedCache") -> None:
        """Go on with the blocks of ``fork``, which has none afterwards; those of this store that follow upon them stay."""
        self._blocks.drop(self.table[: len(fork.table)])
        self.table[: len(fork.table)] = fork.table
        fork.table.clear()
        self._changed()
        fork._changed()

    def prepare(self, start: int, end: int) -> None:
        """Have room up to ``end``, and positions from ``start`` on to itself."""
        size = self._blocks.block
        if end > self.capacity:
            self.reserve(end)
        for index in range(start // size, -(-end // size)):
            if self._blocks.shared(self.table[index]):
                (own,) = self._blocks.take(1)
                self._blocks.copy(self.table[index], own, max(0, start - index * size))
                self._blocks.drop([self.table[index]])
                self.table[index] = own
                self._changed()

    def slot_mapping(self, start: int, end: int) -> list[int]:
        """Where positions lie among those of all blocks."""
        size = self._blocks.block
        return [self.table[position // size] * size + position % size for position in range(start, end)]

    def write(self, layer: int, start: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Store ``[kv_heads, n, head_dim]`` at ``start``; copies ``[1, kv_heads, m, head_dim]``, up to the end of the tile."""
        end = start + key.shape[1]
        self.prepare(start, end)
        if self._slot_mapping is None:
            slots = self.slot_mapping(0, self.capacity) + [SCRATCH] * (tiled(self.capacity) - self.capacity)
            self._slot_mapping = torch.tensor(slots).to(key.device, non_blocking=True)
        found = []
        for part, new in zip(self._blocks.layer(layer, key, value), (key, value), strict=True):
            positions = part.flatten(0, 1)
            positions.index_copy_(0, self._slot_mapping[start:end], new.transpose(0, 1))
            found.append(positions.index_select(0, self._slot_mapping[: tiled(end)]).transpose(0, 1)[None])
        return found[0], found[1]

    def writable(self, position: int) -> bool:
        """Whether what is held there is this session's alone."""
        return not self._blocks.shared(self.table[position // self._blocks.block])

    def free(self) -> None:
        """Give the blocks back."""
        self._blocks.drop(self.table)
        self.table.clear()
        self._changed()

    def __del__(self) -> None:
        self._blocks.drop(self.table)

    def _changed(self) -> None:
        self._slot_mapping = None
        self.version = next(_versions)
