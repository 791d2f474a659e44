"""Memory for keys and values, counted in blocks: which session holds how much, what is kept for reuse, what is evicted. Pure.

A session's positions are one *allocation*, in a store that is contiguous or has a table of blocks. A prefix that two sessions
share is copied from store to store, or held by both; each allocation counts all of its blocks. Allocations of ended sessions
are kept until their memory is needed, and are looked up by the tokens of their blocks; the least recently used go first.
"""

import logging
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from cascade.draft import num_same
from cascade.errors import reason
from cascade.scorer import BLOCK, Store, grown_capacity, num_blocks

log = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class Allocation:
    """Consecutive positions from 0 on, in one store."""

    store: Store
    blocks: int
    in_use: bool = True  # a session holds it; False while it is kept for reuse
    salt: str = ""
    tokens: tuple[int, ...] = ()  # the prefix that others may reuse, since it is never rolled back
    keys: tuple[int, ...] = ()  # one for each full block of ``tokens``, see `block_keys`

    @property
    def capacity(self) -> int:
        return self.blocks * BLOCK


def block_keys(tokens: Sequence[int], salt: str) -> Iterator[int]:
    """A hash of each full block of ``tokens`` and all blocks before it. Equal texts under different salts share nothing."""
    key = hash(salt)
    for begin in range(0, len(tokens) - BLOCK + 1, BLOCK):
        key = hash((key, *tokens[begin : begin + BLOCK]))
        yield key


class BlockManager:
    """Allocations in ``new_store`` stores that together hold at most ``num_tokens`` positions, in whole blocks."""

    def __init__(self, new_store: Callable[[], Store], num_tokens: int) -> None:
        first = new_store()
        self._unit = first.block // BLOCK  # blocks that stores reserve at once
        first.free()
        self.total = num_tokens // first.block * self._unit  # blocks
        self.free = self.total
        self.queried = 0  # positions of all texts that were opened
        self.reused = 0  # positions of these that were reused
        self.lent = 0  # blocks of forks
        self._new_store = new_store
        self._allocations: set[Allocation] = set()
        self._kept: dict[Allocation, None] = {}  # the least recently used first
        self._index: dict[int, dict[Allocation, None]] = defaultdict(dict)  # allocations by block key, the latest last

    @property
    def usage(self) -> float:
        """Share of the blocks that sessions hold; blocks kept for reuse count as free. Callable from any thread."""
        kept = sum(allocation.blocks for allocation in list(self._kept))
        return max(0.0, 1 - (self.free + kept) / max(1, self.total))

    def fits(self, positions: int) -> bool:
        """Whether a session of this length could ever be held."""
        return self.blocks(positions) <= self.total

    def blocks(self, positions: int) -> int:
        return self._whole(num_blocks(positions))

    # operations of a session

    def open(self, tokens: Sequence[int], salt: str, positions: int) -> tuple[Allocation, int] | None:
        """An allocation with room for ``positions``, and how many of ``tokens`` it already holds; None if memory is short.

        It never holds the last token, which must be scored.
        """
        donor, num_held = self._find(tokens, salt)
        if donor is None:
            allocation = self._new(positions)
        else:
            allocation = self._copied(donor, positions, num_held) or self._inherited(donor, positions)
        if allocation is None:
            return None
        self.queried += len(tokens)
        self.reused += num_held
        return allocation, num_held

    def reserve(self, allocation: Allocation, positions: int) -> bool:
        """Give an allocation room for ``positions``; False if memory is short, and then nothing has changed."""
        needed = self.blocks(positions) - allocation.blocks
        if needed <= 0:
            return True
        if not self._make_room(needed):
            return False
        added = min(self.free, self._whole(grown_capacity(positions, allocation.capacity) // BLOCK) - allocation.blocks)
        if not self._reserved(allocation.store, allocation.blocks + added):
            return False
        allocation.blocks += added
        self.free -= added
        return True

    def lend(self, positions: int) -> int | None:
        """Take blocks for a fork of ``positions``, and for the block in which it begins; None if memory is short."""
        blocks = self.blocks(positions) + self._unit
        if not self._make_room(blocks):
            return None
        self.free -= blocks
        self.lent += blocks
        return blocks

    def give_back(self, blocks: int) -> None:
        self.free += blocks
        self.lent -= blocks

    def share(self, allocation: Allocation, tokens: Sequence[int], salt: str) -> None:
        """Let others reuse the beginning of an allocation: ``tokens``, which are never rolled back."""
        self._forget(allocation)
        allocation.tokens, allocation.salt, allocation.keys = tuple(tokens), salt, tuple(block_keys(tokens, salt))
        for key in allocation.keys:
            self._index[key][allocation] = None

    def close(self, allocation: Allocation, tokens: Sequence[int], salt: str) -> None:
        """A session has ended: keep its allocation for others with the prefix ``tokens``, unless another one holds that."""
        self.share(allocation, tokens, salt)
        self._prune(allocation)
        self._let_go(allocation)

    def drop(self, allocation: Allocation) -> None:
        """Free the allocation of a session without keeping it for reuse."""
        self._forget(allocation)
        self._let_go(allocation)

    def clear(self) -> None:
        for allocation in list(self._kept):
            self._remove(allocation)

    # blocks

    def _find(self, tokens: Sequence[int], salt: str) -> tuple[Allocation | None, int]:
        """The allocation with the longest prefix of ``tokens``, the last one excluded, and the length of this prefix."""
        allocations: dict[Allocation, None] = {}
        for key in block_keys(tokens[:-1], salt):
            if key not in self._index:
                break
            allocations = self._index[key]
        if not allocations:
            return None, 0
        allocation = next(reversed(allocations))
        num_held = num_same(allocation.tokens, tokens[:-1]) if allocation.salt == salt else 0  # equal hashes prove nothing
        return (allocation, num_held) if num_held else (None, 0)

    def _new(self, positions: int) -> Allocation | None:
        blocks = self.blocks(positions)
        if not self._make_room(blocks):
            return None
        allocation = Allocation(self._new_store(), blocks)
        if not self._reserved(allocation.store, blocks):
            allocation.store.free()
            return None
        self._allocations.add(allocation)
        self.free -= blocks
        return allocation

    def _copied(self, donor: Allocation, positions: int, num_held: int) -> Allocation | None:
        """A copy of a donor's first ``num_held`` positions; None if memory is short, or the donor itself may be taken over."""
        if not donor.in_use and len(donor.tokens) - num_held < BLOCK:
            return None
        self._kept.pop(donor, None)  # so that it is not evicted to make room
        copy = self._new(positions)
        if copy is not None:
            try:
                copy.store.reuse(donor.store, num_held)
            except Exception:
                log.exception("Keys and values could not be copied")
                self.drop(copy)
                copy = None
        if not donor.in_use:
            self._kept[donor] = None
        return copy

    def _inherited(self, donor: Allocation, positions: int) -> Allocation | None:
        """The donor itself, unless a session uses it."""
        if donor.in_use:
            return None
        del self._kept[donor]
        if not self.reserve(donor, positions):
            self._kept[donor] = None
            return None
        self._forget(donor)
        donor.in_use = True
        return donor

    def _reserved(self, store: Store, blocks: int) -> bool:
        """Reserve blocks in a store. If the device has less memory than expected, allocations kept for reuse are evicted."""
        while True:
            try:
                store.reserve(blocks * BLOCK)
            except Exception as error:  # devices raise different errors
                log.warning("There is no memory for %d blocks of keys and values: %s", blocks, reason(error))
                if not self._kept:
                    return False
                self._remove(next(iter(self._kept)))
            else:
                return True

    def _whole(self, blocks: int) -> int:
        return -(-blocks // self._unit) * self._unit

    def _make_room(self, blocks: int) -> bool:
        """Have ``blocks`` free, and evict what is kept for reuse if needed; False if that is not enough."""
        if self.free < blocks and self.free + sum(allocation.blocks for allocation in self._kept) < blocks:
            return False
        while self.free < blocks:
            self._remove(next(iter(self._kept)))
        return True

    def _let_go(self, allocation: Allocation) -> None:
        allocation.in_use = False
        self._kept[allocation] = None
        if not allocation.keys:
            self._remove(allocation)

    def _prune(self, allocation: Allocation) -> None:
        """Keep no prefix twice: neither this allocation, if another one covers it, nor kept ones that are a prefix of it."""
        if allocation.keys and len(self._index[allocation.keys[-1]]) > 1:
            self._forget(allocation)
        for key in allocation.keys:
            for other in [other for other in self._index[key] if not other.in_use and other.keys[-1] == key]:
                self._remove(other)

    def _forget(self, allocation: Allocation) -> None:
        for key in allocation.keys:
            allocations = self._index[key]
            del allocations[allocation]
            if not allocations:
                del self._index[key]
        allocation.tokens = allocation.keys = ()

    def _remove(self, allocation: Allocation) -> None:
        self._forget(allocation)
        del self._kept[allocation]
        self._allocations.remove(allocation)
        self.free += allocation.blocks
        allocation.store.free()
