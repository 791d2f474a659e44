"""vLLM's blocks: the books balance, sharing is by reference, and nobody reads what another wrote."""

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from cascade.engine.vllm.blocks import RESERVED, Blocks, PagedCache
from cascade.errors import ModelError
from cascade.scorer import BLOCK
from cascade.tier.block_manager import BlockManager
from tests.books import check_blocks, check_pages
from tests.tier.test_block_manager import BLOCKS, Books

PAGE = 16 * BLOCK


class Memory(Blocks):
    """Blocks of tokens. Copies are done before the next write, as a pass does them."""

    def __init__(self, num_blocks: int, block: int) -> None:
        super().__init__(num_blocks, block)
        self.held = [[-1] * block for _ in range(num_blocks)]

    def settle(self) -> None:
        copied = {target: list(self.held[source]) for target, source in self.copies.items()}
        for target, tokens in copied.items():
            self.held[target] = tokens
        self.copies.clear()


class Tokens(PagedCache):
    __slots__ = ("freed", "length")
    _blocks: Memory

    def __init__(self, blocks: Memory) -> None:
        super().__init__(blocks)
        self.freed, self.length = False, 0

    def write(self, start: int, tokens: Sequence[int]) -> None:
        self.prepare(start, start + len(tokens))
        self._blocks.settle()
        for position, token in enumerate(tokens, start):
            self._blocks.held[self.table[position // self.block]][position % self.block] = token
        self.length = start + len(tokens)

    @property
    def tokens(self) -> list[int]:
        self._blocks.settle()
        length = min(self.length, self.capacity)
        return [self._blocks.held[self.table[place // self.block]][place % self.block] for place in range(length)]

    def reuse(self, source: Any, positions: int) -> None:
        super().reuse(source, positions)
        self.length = positions

    def free(self) -> None:
        super().free()
        self.freed = True


class PagedBooks(Books):
    """The same sessions with stores in blocks twice as long as the pool's."""

    others_take_memory: Any = None  # all that vLLM's blocks take is theirs from the start

    def __init__(self) -> None:
        self.blocks = Memory(BLOCKS // 2 + RESERVED - 1, 2 * BLOCK)  # never more than the pool has counted
        super().__init__()

    def store(self) -> Any:
        self.stores.append(Tokens(self.blocks))
        return self.stores[-1]

    @invariant()
    def blocks_balance(self) -> None:
        check_pages(self.blocks, self.stores)


PagedBooks.TestCase.settings = settings(deadline=None, derandomize=True, max_examples=25, stateful_step_count=40)
TestPagedBooks = PagedBooks.TestCase


class Sessions(RuleBasedStateMachine):
    """Sessions take of each other, write from anywhere and go, without a pool that is careful for them."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = Memory(64, 4)
        self.texts: list[tuple[Tokens, list[int]]] = [(Tokens(self.blocks), [])]

    @rule(data=st.data(), tokens=st.lists(st.integers(0, 99), min_size=1, max_size=9))
    def write(self, data: st.DataObject, tokens: list[int]) -> None:
        cache, text = data.draw(st.sampled_from(self.texts))
        start = data.draw(st.integers(0, len(text)))
        if start + len(tokens) <= 24:
            cache.write(start, tokens)
            text[start:] = tokens

    @precondition(lambda self: len(self.texts) < 5)
    @rule(data=st.data())
    def take(self, data: st.DataObject) -> None:
        source, text = data.draw(st.sampled_from(self.texts))
        positions = data.draw(st.integers(0, len(text)))
        cache, free = Tokens(self.blocks), self.blocks.num_free
        cache.reuse(source, positions)
        assert free - self.blocks.num_free == bool(positions % 4)  # whole blocks cost nothing
        self.texts.append((cache, text[:positions]))

    @rule(data=st.data(), ends=st.lists(st.lists(st.integers(0, 99), max_size=9), min_size=1, max_size=3), joins=st.booleans())
    def fork(self, data: st.DataObject, ends: list[list[int]], joins: bool) -> None:
        """Other ends of a text, while it goes on itself; it takes the last one, or none."""
        cache, text = data.draw(st.sampled_from(self.texts))
        position = data.draw(st.integers(0, len(text)))
        forks: list[Tokens] = []
        for tokens in ends:
            forks.append(cache.fork(position))
            assert forks[-1].table[: position // 4] == cache.table[: position // 4]  # whole blocks cost nothing
            forks[-1].write(position, tokens[: 24 - position])
        cache.write(position, [100] * min(3, 24 - position))
        text[position:] = [100] * min(3, 24 - position)
        for fork, tokens in zip(forks, ends, strict=True):
            assert fork.tokens == [*text[:position], *tokens[: 24 - position]]
        if joins:
            cache.join(forks[-1])
            cache.length = forks[-1].length
            text[position:] = ends[-1][: 24 - position]
        for fork in forks:
            fork.free()

    @precondition(lambda self: len(self.texts) > 1)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        cache, _ = self.texts.pop(data.draw(st.integers(0, len(self.texts) - 1)))
        cache.free()

    @invariant()
    def everyone_reads_his_own(self) -> None:
        check_pages(self.blocks, [cache for cache, _ in self.texts])
        for cache, text in self.texts:
            assert cache.tokens == text


Sessions.TestCase.settings = settings(deadline=None, derandomize=True, max_examples=30, stateful_step_count=40)
TestSessions = Sessions.TestCase


def test_the_books_balance_after_faults() -> None:
    """Guards memory against caches that nobody freed, and against attempts that take something though there is too little."""
    blocks = Memory(10, 4)
    one, other, dropped = (Tokens(blocks) for _ in range(3))
    one.write(0, [1] * 17)
    dropped.write(0, [1] * 9)
    assert blocks.num_free == 1
    with pytest.raises(ModelError, match="2 blocks of keys and values are wanted and 1 of 10 are free"):
        other.reserve(8)
    del dropped
    assert blocks.num_free == 4
    check_pages(blocks, [one, other])


def test_pools_count_whole_blocks() -> None:
    """Guards against promising sessions more than there is: a short one takes as much as the kernel's block is long."""
    pool = BlockManager(lambda: Tokens(Memory(9, PAGE)), 3 * PAGE + 255)
    assert pool.total == 3 * PAGE // BLOCK
    assert pool.fits(3 * PAGE)
    assert not pool.fits(3 * PAGE + 1)
    held = [pool.open([place], "", 1) for place in range(4)]
    assert [allocation is not None for allocation in held] == [True, True, True, False]
    check_blocks(pool)
