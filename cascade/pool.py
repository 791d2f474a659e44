"""Memory for keys and values, counted in blocks: who holds how much, what is kept for reuse, what must go. Pure.

A session's positions are one *strip*, in a store that is contiguous, so that attention needs no gathers, or has a table of
blocks. What two sessions have in common is copied from store to store, bit by bit, or held by both; each strip counts all of
its blocks. Strips whose session is over are kept until their memory is needed, the least recently used go first, and are found
again by what their blocks say. Forks share a strip until one of them writes.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from cascade.scorer import Store

BLOCK = 16  # positions
TILE = 64  # positions that attention looks at at once, see `cascade.kv`
GROWTH = 16  # a strip that is full grows by at least this part of itself: little is copied, and little held in vain


def num_blocks(positions: int) -> int:
    """Blocks that hold so many positions."""
    return -(-positions // BLOCK)


def tiled(positions: int) -> int:
    """Positions of the whole tiles that hold so many."""
    return -(-positions // TILE) * TILE


def room(positions: int, capacity: int) -> int:
    """New capacity, in positions, of storage for ``capacity`` that has to hold more."""
    return BLOCK * max(num_blocks(positions), num_blocks(capacity + capacity // GROWTH))


@dataclass(slots=True, eq=False)
class Strip:
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


class Pool:
    """Strips of ``new_store`` stores that together hold at most ``num_tokens`` positions, in whole blocks."""

    def __init__(self, new_store: Callable[[], Store], num_tokens: int) -> None:
        first = new_store()
        self._unit = first.block // BLOCK  # blocks that stores take at once
        first.free()
        self.total = num_tokens // first.block * self._unit  # blocks
        self.free = self.total
        self.reused = 0  # positions that were not scored again
        self._new_store = new_store
        self._strips: set[Strip] = set()
        self._kept: dict[Strip, None] = {}  # the least recently used first
        self._index: dict[int, dict[Strip, None]] = defaultdict(dict)  # by block key, the latest strip last

    def fits(self, positions: int) -> bool:
        """Whether a session of this length could ever be held."""
        return self.blocks(positions) <= self.total

    def blocks(self, positions: int) -> int:
        """Blocks that a session of this length takes."""
        return self._whole(num_blocks(positions))

    # what a session does

    def open(self, tokens: Sequence[int], salt: str, positions: int) -> tuple[Strip, int] | None:
        """A strip with room for ``positions``, and how many of ``tokens`` it holds already; None if memory is short.

        The last token is never among them: somebody has to score it.
        """
        donor, known = self._find(tokens, salt)
        if donor is None:
            fresh = self._new(positions)
            return None if fresh is None else (fresh, 0)
        self._hold(donor)
        strip = None
        if donor.users > 1 or len(donor.tokens) - known >= BLOCK:  # others need it, or could
            strip = self._copied(donor, positions, known)
        if strip is None and donor.users == 1:
            strip = self._grown(donor, positions)
        if strip is donor:
            self._forget(donor)
        else:
            self._let_go(donor)
        if strip is None:
            return None
        self.reused += known
        return strip, known

    def reserve(self, strip: Strip, positions: int, written: int) -> Strip | None:
        """The strip with room for ``positions``, of which ``written`` are in use; another strip if a fork shares it.

        None if memory is short; then nothing has changed.
        """
        if strip.users == 1:
            return self._grown(strip, positions)
        copy = self._copied(strip, positions, written)
        if copy is not None:
            self._let_go(strip)
        return copy

    def fork(self, strip: Strip) -> Strip:
        """The same strip for another session. Either has to `reserve` before it writes, and gets its own then."""
        strip.users += 1
        return strip

    def share(self, strip: Strip, tokens: Sequence[int], salt: str) -> None:
        """Let others reuse the beginning of a strip: ``tokens``, which are scored and never rolled back."""
        self._forget(strip)
        strip.tokens, strip.salt, strip.keys = tuple(tokens), salt, tuple(block_keys(tokens, salt))
        for key in strip.keys:
            self._index[key][strip] = None

    def close(self, strip: Strip, tokens: Sequence[int], salt: str) -> None:
        """A session is over: keep its strip for those who need ``tokens`` again, unless another holds them as well."""
        if strip.users == 1:
            self.share(strip, tokens, salt)
            self._prune(strip)
        self._let_go(strip)

    def drop(self, strip: Strip) -> None:
        """A session gives its strip back, and what it holds is of no use."""
        if strip.users == 1:
            self._forget(strip)
        self._let_go(strip)

    def clear(self) -> None:
        """Free what is kept for reuse."""
        for strip in list(self._kept):
            self._remove(strip)

    def check(self) -> None:
        """Raise `AssertionError`, with the arithmetic, if the books do not balance."""
        kept = sum(strip.blocks for strip in self._kept)
        held = sum(strip.blocks for strip in self._strips if strip.users)
        sum_ = f"{self.free} free + {kept} kept + {held} held blocks are {self.free + kept + held} of {self.total}"
        assert self.free >= 0, sum_
        assert self.free + kept + held == self.total, sum_
        assert set(self._kept) == {strip for strip in self._strips if not strip.users}, "kept strips are those without users"
        for key, strips in self._index.items():
            assert strips, f"the index has an empty entry {key}"
            for strip in strips:
                assert strip in self._strips, f"the index leads from {key} to a strip that is gone"
                assert key in strip.keys, f"the index leads from {key} to a strip that has it no more"
                assert len(strip.tokens) <= strip.capacity, f"{len(strip.tokens)} positions in {strip.blocks} blocks"

    # blocks

    def _find(self, tokens: Sequence[int], salt: str) -> tuple[Strip | None, int]:
        """The strip that holds most of ``tokens``, and how many but the last."""
        strips: dict[Strip, None] = {}
        for key in block_keys(tokens[:-1], salt):
            if key not in self._index:
                break
            strips = self._index[key]
        if not strips:
            return None, 0
        strip = next(reversed(strips))
        known = _num_equal(strip.tokens, tokens[:-1]) if strip.salt == salt else 0  # a hash proves nothing
        return (strip, known) if known else (None, 0)

    def _new(self, positions: int) -> Strip | None:
        blocks = self.blocks(positions)
        if not self._make_room(blocks):
            return None
        strip = Strip(self._new_store(), blocks)
        strip.store.reserve(strip.capacity)
        self._strips.add(strip)
        self.free -= blocks
        return strip

    def _copied(self, strip: Strip, positions: int, written: int) -> Strip | None:
        copy = self._new(positions)
        if copy is not None:
            copy.store.take(strip.store, written)
        return copy

    def _grown(self, strip: Strip, positions: int) -> Strip | None:
        needed = self.blocks(positions) - strip.blocks
        if needed <= 0:
            return strip
        if not self._make_room(needed):
            return None
        added = min(self.free, self._whole(room(positions, strip.capacity) // BLOCK) - strip.blocks)
        strip.blocks += added
        self.free -= added
        strip.store.reserve(strip.capacity)
        return strip

    def _whole(self, blocks: int) -> int:
        return -(-blocks // self._unit) * self._unit

    def _make_room(self, blocks: int) -> bool:
        """Have so many free blocks, at the cost of what is kept, if that is enough."""
        if self.free < blocks and self.free + sum(strip.blocks for strip in self._kept) < blocks:
            return False
        while self.free < blocks:
            self._remove(next(iter(self._kept)))
        return True

    def _hold(self, strip: Strip) -> None:
        strip.users += 1
        self._kept.pop(strip, None)

    def _let_go(self, strip: Strip) -> None:
        strip.users -= 1
        if not strip.users:
            self._kept[strip] = None
            if not strip.keys:
                self._remove(strip)

    def _prune(self, strip: Strip) -> None:
        """Keep nothing twice: neither this strip, if another has all of it, nor others whose text it begins with."""
        if strip.keys and len(self._index[strip.keys[-1]]) > 1:
            self._forget(strip)
        for key in strip.keys:
            for other in [other for other in self._index[key] if not other.users and other.keys[-1] == key]:
                self._remove(other)

    def _forget(self, strip: Strip) -> None:
        """Nobody finds it any more."""
        for key in strip.keys:
            strips = self._index[key]
            del strips[strip]
            if not strips:
                del self._index[key]
        strip.tokens = strip.keys = ()

    def _remove(self, strip: Strip) -> None:
        self._forget(strip)
        del self._kept[strip]
        self._strips.remove(strip)
        self.free += strip.blocks
        strip.store.free()


def _num_equal(one: Sequence[int], other: Sequence[int]) -> int:
    """Length of what both begin with."""
    if tuple(one[: len(other)]) == tuple(other[: len(one)]):
        return min(len(one), len(other))
    return next(i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b)
