"""Memory in blocks: the books balance, nothing is shared that should not be, and what is shared is right."""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from cascade.scorer import BLOCK, grown_capacity
from cascade.tier import block_manager
from cascade.tier.block_manager import Allocation, BlockManager
from tests.books import check_blocks
from tests.cases import examples
from tests.toys import ToyCache

BLOCKS = 12


class Text:
    """A session: its text, of which the first ``num_known`` positions are in its allocation."""

    def __init__(self, tokens: list[int], salt: str, allocation: Allocation, num_known: int) -> None:
        self.tokens, self.salt, self.allocation, self.num_known = tokens, salt, allocation, num_known

    @property
    def held(self) -> list[int]:
        tokens: list[int] = self.allocation.store.tokens[: self.num_known]
        return tokens


class Held(ToyCache):
    """Keys and values on a device that may have less memory than the books say."""

    def __init__(self, books: "Books") -> None:
        super().__init__()
        self.books = books

    def reserve(self, positions: int) -> None:
        if self.books.held * BLOCK - (self.room or 0) + positions > self.books.device * BLOCK:
            self.books.short = True
            raise MemoryError("the device is full")
        super().reserve(positions)


class Books(RuleBasedStateMachine):
    """Sessions come, write, roll back and go, in less memory than they want."""

    def __init__(self) -> None:
        super().__init__()
        self.stores: list[Any] = []
        self.device = BLOCKS  # blocks that there is memory for
        self.short = False  # a store did not get what the books said there is
        self.block_manager = BlockManager(self.store, BLOCKS * BLOCK + 5)
        self.texts: list[Text] = []
        self.left: list[list[int]] = []  # texts of sessions that are over

    def store(self) -> Any:
        self.stores.append(Held(self))
        return self.stores[-1]

    @property
    def held(self) -> int:
        """Blocks of the device that stores have reserved."""
        return sum((store.room or 0) // BLOCK for store in self.stores if not store.freed)

    @rule(blocks=st.sampled_from([*[BLOCKS] * 3, BLOCKS // 2, BLOCKS // 3]))
    def others_take_memory(self, blocks: int) -> None:
        """From now on the device has less or more memory than the books say."""
        self.device = max(self.held, blocks)

    @rule(data=st.data(), kept=st.integers(0, 200), more=st.integers(1, 60), salt=st.sampled_from(["", "a"]))
    def open(self, data: st.DataObject, kept: int, more: int, salt: str) -> None:
        """A new text, or one that begins as another did."""
        before = data.draw(st.sampled_from([[], *self.left]))
        tokens = before[:kept] + random.Random(more).choices(range(9), k=more)
        with self.nothing_changes_when_refused() as refused:
            opened = self.block_manager.open(tokens, salt, len(tokens) + 1)
            refused += [opened is None]
        if opened is not None:
            allocation, num_known = opened
            assert num_known < len(tokens)
            allocation.store.write(num_known, tokens[num_known:])
            self.texts.append(Text(tokens, salt, allocation, len(tokens)))

    @contextmanager
    def nothing_changes_when_refused(self) -> Iterator[list[bool]]:
        """An attempt that fails costs nothing that is kept, unless the device had less memory than the books said."""
        kept, refused, blocks = {*self.block_manager._kept}, list[bool](), [text.allocation.blocks for text in self.texts]
        self.short = False
        yield refused
        if refused == [True]:
            now = {*self.block_manager._kept}
            assert now <= kept if self.short else now == kept
            assert [text.allocation.blocks for text in self.texts] == blocks

    @precondition(lambda self: self.texts)
    @rule(data=st.data(), more=st.integers(0, 40), back=st.integers(0, 5))
    def write(self, data: st.DataObject, more: int, back: int) -> None:
        """Score what is not known yet and some tokens more, after rolling back a little."""
        text = data.draw(st.sampled_from(self.texts))
        fixed = len(text.allocation.tokens)
        text.num_known = max(fixed, text.num_known - back)
        del text.tokens[max(text.num_known, len(text.tokens) - back, 1) :]
        text.tokens += [(more + i) % 9 for i in range(more)]
        with self.nothing_changes_when_refused() as refused:
            refused += [not self.block_manager.reserve(text.allocation, len(text.tokens))]
        if refused == [False]:
            text.allocation.store.write(text.num_known, text.tokens[text.num_known :])
            text.num_known = len(text.tokens)

    @precondition(lambda self: self.texts)
    @rule(data=st.data())
    def share(self, data: st.DataObject) -> None:
        text = data.draw(st.sampled_from(self.texts))
        self.block_manager.share(text.allocation, text.tokens[: text.num_known], text.salt)

    @precondition(lambda self: self.texts)
    @rule(data=st.data(), spoilt=st.booleans())
    def leave(self, data: st.DataObject, spoilt: bool) -> None:
        text = data.draw(st.sampled_from(self.texts))
        self.texts.remove(text)
        if spoilt:
            self.block_manager.drop(text.allocation)
        else:
            self.block_manager.close(text.allocation, text.tokens[: text.num_known], text.salt)
            self.left.append(text.tokens)

    @rule(positions=st.integers(1, 60))
    def lend(self, positions: int) -> None:
        """A fork comes and goes; it never takes the place of a text."""
        blocks = self.block_manager.lend(positions)
        check_blocks(self.block_manager)
        if blocks is not None:
            self.block_manager.give_back(blocks)

    @invariant()
    def books_balance(self) -> None:
        check_blocks(self.block_manager)
        for text in self.texts:
            assert text.held == text.tokens[: text.num_known], "a session reads what another wrote"

    def teardown(self) -> None:
        for text in self.texts:
            self.block_manager.close(text.allocation, text.tokens[: text.num_known], text.salt)
        check_blocks(self.block_manager)
        self.block_manager.clear()
        check_blocks(self.block_manager)
        assert self.block_manager.free == self.block_manager.total
        assert all(store.freed for store in self.stores)


Books.TestCase.settings = settings(max_examples=examples(2), stateful_step_count=40)
TestBooks = Books.TestCase


def leave(pool: BlockManager, tokens: list[int], salt: str = "") -> Allocation:
    """A session that scored ``tokens`` and is over; its allocation."""
    opened = pool.open(tokens, salt, len(tokens))
    allocation, num_known = opened
    allocation.store.write(num_known, tokens[num_known:])
    pool.close(allocation, tokens, salt)
    return allocation


def num_known(pool: BlockManager, tokens: list[int], salt: str = "") -> int:
    """How many tokens a new session would not have to score."""
    opened = pool.open(tokens, salt, len(tokens))
    pool.drop(opened[0])
    return opened[1]


def test_reuse_goes_to_the_last_common_token() -> None:
    """Guards what reuse is worth: all that texts have in common, all but the last token of the same text, not less."""
    text = list(range(100))
    for other, expected in (
        (text, 99),
        ([*text, 7], 100),
        ([*text[:50], 500, 501], 50),
        (text[:40], 39),
        (text[:17], 16),
        (text[:16], 0),  # its first block ends with the token that must be scored
        ([500, *text], 0),
        (text[1:], 0),
    ):
        pool = BlockManager(ToyCache, 1000)
        leave(pool, text)
        assert num_known(pool, other) == expected
        check_blocks(pool)


@pytest.mark.parametrize("collide", [False, True])
def test_salts_keep_tenants_apart(collide: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards tenants against each other's prompts, which speed would tell, also where hashes collide."""
    if collide:
        monkeypatch.setattr(block_manager, "block_keys", lambda tokens, salt: range(len(tokens) // BLOCK))
    pool = BlockManager(ToyCache, 1000)
    leave(pool, [1] * 64, "mine")
    for tokens, salt, expected in (([1] * 64, "", 0), ([1] * 64, "yours", 0), ([2] * 64, "mine", 0), ([1] * 64, "mine", 63)):
        assert num_known(pool, tokens, salt) == expected


def test_least_recently_used_goes_first() -> None:
    """Guards what is kept: the prefix that everybody uses, not the one that came last."""
    pool = BlockManager(ToyCache, 10 * BLOCK)
    leave(pool, [1] * 48)
    leave(pool, [2] * 48)
    assert num_known(pool, [1] * 20 + [5]) == 20
    leave(pool, [3] * 100)  # 7 blocks: one of the others has to go
    assert num_known(pool, [1] * 48) == 47
    assert num_known(pool, [2] * 48) == 0


def test_prefix_outlives_the_tail_of_its_text() -> None:
    """Guards a long conversation: a short request that begins like it must copy, not take its memory over."""
    pool = BlockManager(ToyCache, 1000)
    text = list(range(200))
    leave(pool, text)
    leave(pool, [*text[:64], *range(300, 350)])
    assert num_known(pool, [*text, 1]) == 200


def test_a_prefix_is_no_reason_not_to_fit() -> None:
    """Guards against waiting for ever: a kept one as large as the memory must not keep out the session that reuses it."""
    pool = BlockManager(ToyCache, 10 * BLOCK)
    text = list(range(9 * BLOCK))
    leave(pool, text)
    opened = pool.open([*text[: 4 * BLOCK], *range(500, 500 + 6 * BLOCK)], "", 10 * BLOCK)
    assert opened[1] == 4 * BLOCK
    check_blocks(pool)


def test_growing_holds_little_in_vain() -> None:
    """Guards memory and time: a growing session holds hardly more than it uses, and copies itself only so often."""
    capacity = copied = 0
    for position in range(1, 30_001):
        if position > capacity:
            copied += capacity
            capacity = grown_capacity(position, capacity)
        assert capacity <= position * 17 / 16 + BLOCK
        assert copied < 17 * position
