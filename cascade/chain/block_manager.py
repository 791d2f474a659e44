"""Memory for keys and values, counted in blocks: who holds how much, what is kept for reuse, what must go. Pure.

A session's positions are one *allocation*, in a store that is contiguous, so that attention needs no gathers, or has a table
of blocks. What two sessions have in common is copied from store to store, bit by bit, or held by both; each allocation counts
all of its blocks. Allocations whose session is over are kept until their memory is needed, the least recently used go first,
and are found again by what their blocks say. Forks share an allocation until one of them writes.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from cascade.scorer import BLOCK, Store, num_blocks, room


@dataclass(slots=True, eq=False)
class Allocation:
    """Consecutive positions from 0 on, in one store."""

    store: Store
    blocks: int
    users: int = 1  # sessions that hold it; 0 while it is kept for reuse, more after a fork
    salt: str = ""
    tokens: tuple[int, ...] = ()  # whose keys and values it holds for good: what others may share
    keys: tuple[int, ...] = ()  # of the full blocks of tokens, see `block_keys`

    @property
    def capacity(self) -> int:
        """Positions."""
        return self.blocks * BLOCK


def block_keys(tokens: Sequence[int], salt: str) -> Iterator[int]:
    """A hash of each full block of ``tokens`` and of all before it. Equal texts under different salts share nothing."""
    key = hash(salt)
    for begin in range(0, len(tokens) - BLOCK + 1, BLOCK):
        key = hash((key, *tokens[begin : begin + BLOCK]))
        yield key


class BlockManager:
    """Strips of ``new_store`` stores that together hold at most ``num_tokens`` positions, in whole blocks."""

    def __init__(self, new_store: Callable[[], Store], num_tokens: int) -> None:
        first = new_store()
        self._unit = first.block // BLOCK  # blocks that stores take at once
        first.free()
        self.total = num_tokens // first.block * self._unit  # blocks
        self.free = self.total
        self.reused = 0  # positions that were not scored again
        self._new_store = new_store
        self._allocations: set[Allocation] = set()
        self._kept: dict[Allocation, None] = {}  # the least recently used first
        self._index: dict[int, dict[Allocation, None]] = defaultdict(dict)  # by block key, the latest allocation last

    def fits(self, positions: int) -> bool:
        """Whether a session of this length could ever be held."""
        return self.blocks(positions) <= self.total

    def blocks(self, positions: int) -> int:
        """Blocks that a session of this length takes."""
        return self._whole(num_blocks(positions))

    # what a session does

    def open(self, tokens: Sequence[int], salt: str, positions: int) -> tuple[Allocation, int] | None:
        """A allocation with room for ``positions``, and how many of ``tokens`` it holds already; None if memory is short.

        The last token is never among them: somebody has to score it.
        """
        donor, known = self._find(tokens, salt)
        if donor is None:
            fresh = self._new(positions)
            return None if fresh is None else (fresh, 0)
        self._hold(donor)
        allocation = None
        if donor.users > 1 or len(donor.tokens) - known >= BLOCK:  # others need it, or could
            allocation = self._copied(donor, positions, known)
        if allocation is None and donor.users == 1:
            allocation = self._grown(donor, positions)
        if allocation is donor:
            self._forget(donor)
        else:
            self._let_go(donor)
        if allocation is None:
            return None
        self.reused += known
        return allocation, known

    def reserve(self, allocation: Allocation, positions: int, written: int) -> Allocation | None:
        """The allocation with room for ``positions``, of which ``written`` are in use; another allocation if a fork shares it.

        None if memory is short; then nothing has changed.
        """
        if allocation.users == 1:
            return self._grown(allocation, positions)
        copy = self._copied(allocation, positions, written)
        if copy is not None:
            self._let_go(allocation)
        return copy

    def fork(self, allocation: Allocation) -> Allocation:
        """The same allocation for another session. Either has to `reserve` before it writes, and gets its own then."""
        allocation.users += 1
        return allocation

    def share(self, allocation: Allocation, tokens: Sequence[int], salt: str) -> None:
        """Let others reuse the beginning of an allocation: ``tokens``, which are scored and never rolled back."""
        self._forget(allocation)
        allocation.tokens, allocation.salt, allocation.keys = tuple(tokens), salt, tuple(block_keys(tokens, salt))
        for key in allocation.keys:
            self._index[key][allocation] = None

    def close(self, allocation: Allocation, tokens: Sequence[int], salt: str) -> None:
        """A session is over: keep its allocation for those who need ``tokens`` again, unless another holds them as well."""
        if allocation.users == 1:
            self.share(allocation, tokens, salt)
            self._prune(allocation)
        self._let_go(allocation)

    def drop(self, allocation: Allocation) -> None:
        """A session gives its allocation back, and what it holds is of no use."""
        if allocation.users == 1:
            self._forget(allocation)
        self._let_go(allocation)

    def clear(self) -> None:
        """Free what is kept for reuse."""
        for allocation in list(self._kept):
            self._remove(allocation)

    def check(self) -> None:
        """Raise `AssertionError`, with the arithmetic, if the books do not balance."""
        kept = sum(allocation.blocks for allocation in self._kept)
        held = sum(allocation.blocks for allocation in self._allocations if allocation.users)
        sum_ = f"{self.free} free + {kept} kept + {held} held blocks are {self.free + kept + held} of {self.total}"
        assert self.free >= 0, sum_
        assert self.free + kept + held == self.total, sum_
        assert set(self._kept) == {allocation for allocation in self._allocations if not allocation.users}, (
            "kept allocations are those without users"
        )
        for key, allocations in self._index.items():
            assert allocations, f"the index has an empty entry {key}"
            for allocation in allocations:
                assert allocation in self._allocations, f"the index leads from {key} to an allocation that is gone"
                assert key in allocation.keys, f"the index leads from {key} to an allocation that has it no more"
                assert len(allocation.tokens) <= allocation.capacity, (
                    f"{len(allocation.tokens)} positions in {allocation.blocks} blocks"
                )

    # blocks

    def _find(self, tokens: Sequence[int], salt: str) -> tuple[Allocation | None, int]:
        """The allocation that holds most of ``tokens``, and how many but the last."""
        allocations: dict[Allocation, None] = {}
        for key in block_keys(tokens[:-1], salt):
            if key not in self._index:
                break
            allocations = self._index[key]
        if not allocations:
            return None, 0
        allocation = next(reversed(allocations))
        known = _num_equal(allocation.tokens, tokens[:-1]) if allocation.salt == salt else 0  # a hash proves nothing
        return (allocation, known) if known else (None, 0)

    def _new(self, positions: int) -> Allocation | None:
        blocks = self.blocks(positions)
        if not self._make_room(blocks):
            return None
        allocation = Allocation(self._new_store(), blocks)
        allocation.store.reserve(allocation.capacity)
        self._allocations.add(allocation)
        self.free -= blocks
        return allocation

    def _copied(self, allocation: Allocation, positions: int, written: int) -> Allocation | None:
        copy = self._new(positions)
        if copy is not None:
            copy.store.take(allocation.store, written)
        return copy

    def _grown(self, allocation: Allocation, positions: int) -> Allocation | None:
        needed = self.blocks(positions) - allocation.blocks
        if needed <= 0:
            return allocation
        if not self._make_room(needed):
            return None
        added = min(self.free, self._whole(room(positions, allocation.capacity) // BLOCK) - allocation.blocks)
        allocation.blocks += added
        self.free -= added
        allocation.store.reserve(allocation.capacity)
        return allocation

    def _whole(self, blocks: int) -> int:
        return -(-blocks // self._unit) * self._unit

    def _make_room(self, blocks: int) -> bool:
        """Have so many free blocks, at the cost of what is kept, if that is enough."""
        if self.free < blocks and self.free + sum(allocation.blocks for allocation in self._kept) < blocks:
            return False
        while self.free < blocks:
            self._remove(next(iter(self._kept)))
        return True

    def _hold(self, allocation: Allocation) -> None:
        allocation.users += 1
        self._kept.pop(allocation, None)

    def _let_go(self, allocation: Allocation) -> None:
        allocation.users -= 1
        if not allocation.users:
            self._kept[allocation] = None
            if not allocation.keys:
                self._remove(allocation)

    def _prune(self, allocation: Allocation) -> None:
        """Keep nothing twice: neither this allocation, if another has all of it, nor others whose text it begins with."""
        if allocation.keys and len(self._index[allocation.keys[-1]]) > 1:
            self._forget(allocation)
        for key in allocation.keys:
            for other in [other for other in self._index[key] if not other.users and other.keys[-1] == key]:
                self._remove(other)

    def _forget(self, allocation: Allocation) -> None:
        """Nobody finds it any more."""
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


def _num_equal(one: Sequence[int], other: Sequence[int]) -> int:
    """Length of what both begin with."""
    if tuple(one[: len(other)]) == tuple(other[: len(one)]):
        return min(len(one), len(other))
    return next(i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b)
