"""vLLM's blocks of keys and values, shared by sessions: reference counts, block tables, copy on write.

A session's positions lie in the blocks of its table, in that order. Sessions share the blocks of a common beginning; a session
that writes into a shared block gets a copy of it first. Rolling back needs no code: the next pass starts at a smaller position.
"""

from array import array
from collections.abc import Sequence
from typing import Self

from cascade.errors import ModelError

SCRATCH = 0  # vLLM's null block, which belongs to no session
RESERVED = 2  # blocks that sessions cannot have: the null block, and one for a copy while all others are in use


class Blocks:
    """``num_blocks`` blocks of ``block`` positions, the null block among them."""

    def __init__(self, num_blocks: int, block: int) -> None:
        self.block = block
        self.total = num_blocks
        self.copies: dict[int, int] = {}  # source blocks by target; all copied at once before the next pass
        self._free = list(range(num_blocks - 1, SCRATCH, -1))
        self._users = [0] * num_blocks

    def allocate(self, number: int) -> list[int]:
        """Allocate ``number`` free blocks with one user; raises `ModelError` if there are fewer."""
        if number > self.num_free:
            raise ModelError(f"{number} blocks of keys and values are wanted and {self.num_free} of {self.total} are free")
        allocated = [self._free.pop() for _ in range(number)]
        for block in allocated:
            self._users[block] = 1
        return allocated

    def share(self, blocks: Sequence[int]) -> None:
        """Add a user to each of ``blocks``."""
        for block in blocks:
            self._users[block] += 1

    def release(self, blocks: Sequence[int]) -> None:
        """Remove a user from each of ``blocks``; blocks without users are free."""
        for block in blocks:
            self._users[block] -= 1
            if not self._users[block]:
                self._free.append(block)

    def copy(self, source: int, target: int) -> None:
        """Let ``target`` have what ``source`` holds, or is itself to get."""
        self.copies[target] = self.copies.get(source, source)

    def shared(self, block: int) -> bool:
        return self._users[block] > 1

    @property
    def num_free(self) -> int:
        return len(self._free)


class PagedCache:
    """Keys and values of one session: a table of blocks. See `cascade.scorer.Store`."""

    __slots__ = ("__weakref__", "_blocks", "table")

    def __init__(self, blocks: Blocks) -> None:
        self._blocks = blocks
        self.table = array("i")  # many rows' become one tensor in each pass, several times faster than lists would

    @property
    def block(self) -> int:
        return self._blocks.block

    @property
    def capacity(self) -> int:
        return len(self.table) * self._blocks.block

    def reserve(self, positions: int) -> None:
        """Make room for ``positions`` in total, without changing what is written."""
        missing = -(-positions // self._blocks.block) - len(self.table)
        if missing > 0:
            self.table.extend(self._blocks.allocate(missing))

    def reuse(self, source: "PagedCache", positions: int) -> None:
        """Take the first ``positions`` of ``source``: whole blocks are shared with it, the rest is copied."""
        whole, rest = divmod(positions, self._blocks.block)
        common = source.table[:whole]
        self._blocks.share(common)
        self._blocks.release(self.table[:whole])
        self.table[:whole] = common
        self.reserve(positions)
        if rest:
            self.prepare(whole * self._blocks.block, positions)
            self._blocks.copy(source.table[whole], self.table[whole])

    def fork(self, position: int) -> Self:
        """A store that shares the positions before ``position``, and has its own blocks from there on."""
        fork = type(self)(self._blocks)
        fork.reuse(self, position)
        return fork

    def join(self, fork: "PagedCache") -> None:
        """Take over the blocks of ``fork``, which then has none; this store's blocks after them stay."""
        self._blocks.release(self.table[: len(fork.table)])
        self.table[: len(fork.table)] = fork.table
        del fork.table[:]

    def prepare(self, start: int, end: int) -> None:
        """Make room up to ``end``, and copy shared blocks from ``start`` on."""
        size = self._blocks.block
        if end > self.capacity:
            self.reserve(end)
        for index in range(start // size, -(-end // size)):
            if self._blocks.shared(self.table[index]):
                (own,) = self._blocks.allocate(1)
                self._blocks.copy(self.table[index], own)
                self._blocks.release([self.table[index]])
                self.table[index] = own

    def guessing(self, end: int, until: int) -> Sequence[int]:
        """Blocks of the positions before ``until``; those after a text's ``end`` may be written: they are its own or null."""
        whole, all_ = (-(-position // self._blocks.block) for position in (end, until))
        table = self.table[:all_]
        for index in range(whole, len(table)):
            if self._blocks.shared(table[index]):
                table[index] = SCRATCH
        table.extend([SCRATCH] * (all_ - len(table)))
        return table

    def free(self) -> None:
        self._blocks.release(self.table)
        del self.table[:]

    def __del__(self) -> None:
        self.free()
