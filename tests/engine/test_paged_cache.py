"""Keys and values in blocks: the books balance, sharing is by reference, and nobody reads what another wrote."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from torch import Tensor

from cascade.chain.block_manager import BlockManager
from cascade.engine.kernels import PAGE, agrees, find_kernel
from cascade.engine.paged_cache import RESERVED, Blocks, PagedCache
from cascade.engine.survey import Survey
from cascade.errors import ModelError
from cascade.scorer import BLOCK
from tests.chain.test_block_manager import BLOCKS, Books
from tests.kernels import varlen

CPU = torch.device("cpu")


class Tokens(PagedCache):
    """Tokens by position, as the keys and values of two layers."""

    __slots__ = ("freed", "length")

    def __init__(self, blocks: Blocks) -> None:
        super().__init__(blocks)
        self.freed, self.length = False, 0

    def write(self, start: int, tokens: Sequence[int]) -> Any:  # type: ignore[override]
        new = torch.tensor(tokens, dtype=torch.int64).view(1, -1, 1)
        for layer in (0, 1):
            if tokens:
                super().write(layer, start, new.expand(2, -1, 3), -new - layer)
        self.length = start + len(tokens)

    @property
    def tokens(self) -> list[int]:
        slots = torch.tensor(self.slot_mapping(0, min(self.length, self.capacity)), dtype=torch.int64)
        said = []
        for layer, (keys, values) in self._blocks._layers.items():
            said += [keys.flatten(0, 1)[slots, 1, 2], -values.flatten(0, 1)[slots, 0, 0] - layer]
        assert all(torch.equal(part, said[0]) for part in said)
        return said[0].tolist() if said else []

    @classmethod
    def like(cls, cache: PagedCache) -> "Tokens":
        """The same blocks, which the other one has no more."""
        new = cls(cache._blocks)
        new.join(cache)
        return new

    def take(self, source: Any, positions: int) -> None:
        super().take(source, positions)
        self.length = positions

    def free(self) -> None:
        super().free()
        self.freed = True


class PagedBooks(Books):
    """The same sessions with stores in blocks twice as long as the pool's."""

    def __init__(self) -> None:
        self.blocks = Blocks(BLOCKS // 2 + RESERVED - 1, 2 * BLOCK)  # never more than the pool has counted
        super().__init__()

    def store(self) -> Any:
        self.stores.append(Tokens(self.blocks))
        return self.stores[-1]

    @invariant()
    def blocks_balance(self) -> None:
        self.blocks.check(self.stores)


PagedBooks.TestCase.settings = settings(deadline=None, derandomize=True, max_examples=50, stateful_step_count=40)
TestPagedBooks = PagedBooks.TestCase


class Sessions(RuleBasedStateMachine):
    """Sessions take of each other, write from anywhere and go, without a pool that is careful for them."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = Blocks(64, 4)
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
        cache.take(source, positions)
        assert free - self.blocks.num_free == bool(positions % 4)  # whole blocks cost nothing
        self.texts.append((cache, text[:positions]))

    @rule(data=st.data(), ends=st.lists(st.lists(st.integers(0, 99), max_size=9), min_size=1, max_size=3), joins=st.booleans())
    def fork(self, data: st.DataObject, ends: list[list[int]], joins: bool) -> None:
        """Other ends of a text, while it goes on itself; it takes the last one, or none."""
        cache, text = data.draw(st.sampled_from(self.texts))
        position = data.draw(st.integers(0, len(text)))
        forks: list[Tokens] = []
        for tokens in ends:
            fork = PagedCache.fork(cache, position)
            assert fork.table[: position // 4] == cache.table[: position // 4]  # whole blocks cost nothing
            forks.append(Tokens.like(fork))
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
        self.blocks.check([cache for cache, _ in self.texts])
        for cache, text in self.texts:
            assert cache.tokens == text


Sessions.TestCase.settings = settings(deadline=None, derandomize=True, max_examples=75, stateful_step_count=40)
TestSessions = Sessions.TestCase


def test_a_cache_that_is_dropped_gives_its_blocks_back() -> None:
    """Guards memory against caches that nobody freed, such as those of a pass that failed."""
    blocks = Blocks(10, 4)
    cache = Tokens(blocks)
    cache.write(0, [1] * 9)
    assert blocks.num_free == 6
    del cache
    assert blocks.num_free == 9
    blocks.check([])


def test_memory_that_is_used_up_is_named() -> None:
    """Guards the message, and the books: nothing is taken by an attempt that fails."""
    blocks = Blocks(5, 4)
    one, other = Tokens(blocks), Tokens(blocks)
    one.write(0, [1] * 9)
    with pytest.raises(ModelError, match="2 blocks of keys and values are wanted and 1 of 5 are free"):
        other.reserve(8)
    blocks.check([one, other])


def test_check_sees_a_lost_block() -> None:
    """Guards the check itself."""
    blocks = Blocks(5, 4)
    cache = Tokens(blocks)
    cache.write(0, [1] * 9)
    blocks._free.pop()
    with pytest.raises(AssertionError, match="0 free \\+ 3 held blocks are 3 of 4"):
        blocks.check([cache])


def test_memory_is_made_whole_at_once() -> None:
    """Guards the start: what was tried out is forgotten, and all layers have their memory before the first request."""
    blocks = Blocks(3, 4)
    Tokens(blocks).write(0, [1])
    whole = blocks.resized(7)
    assert whole.block_bytes == 2 * 4 * (2 * 3 + 1) * 8  # layers, positions, numbers of keys and values, bytes
    assert sum(part.nbytes for pair in whole._layers.values() for part in pair) == 7 * whole.block_bytes
    assert not blocks._layers


def test_pools_count_whole_blocks() -> None:
    """Guards against promising sessions more than there is: a short one takes as much as the kernel's block is long."""
    pool = BlockManager(lambda: Tokens(Blocks(9, PAGE)), 3 * PAGE + 255)
    assert pool.total == 3 * PAGE // BLOCK
    assert pool.fits(3 * PAGE)
    assert not pool.fits(3 * PAGE + 1)
    held = [pool.open([place], "", 1) for place in range(4)]
    assert [allocation is not None for allocation in held] == [True, True, True, False]
    pool.check()


HEADS = (4, 2, 16, 16)


def _early(*args: Any, **options: Any) -> Tensor:
    """Aligned at the first key, as older kernels."""
    return varlen(*args, **{**options, "seqused_k": options["seqused_k"] - 1})


def _wide(*args: Any, **options: Any) -> Tensor:
    return varlen(*args, **{**options, "window_size": (options["window_size"][0] + 1, 0)})


def _in_order(*args: Any, **options: Any) -> Tensor:
    table = options["block_table"]
    return varlen(*args, **{**options, "block_table": torch.arange(table.numel(), dtype=torch.int32).view_as(table) % 6})


def _failing(*args: Any, **options: Any) -> Tensor:
    raise RuntimeError("Paged KV cache block size must be divisible by 512")


@pytest.mark.parametrize("window", [None, 1, 7, 300])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_kernels_are_believed_if_they_are_right(window: int | None, dtype: torch.dtype) -> None:
    """Guards the probe, from both sides: a good kernel is used, and one that errs a little is not."""
    assert agrees(varlen, HEADS, window, CPU, dtype)
    for mistake in (_early, _in_order, _failing, *([_wide] if window else [])):
        assert not agrees(mistake, HEADS, window, CPU, dtype)


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", varlen)
    return monkeypatch


def test_the_kernel_of_pytorch_is_found(installed: pytest.MonkeyPatch) -> None:
    """Guards the choice: by what the installed PyTorch has and does, not by its version."""
    found = Survey({0: None, 1: 5}, heads={0: HEADS})
    assert find_kernel(CPU, torch.bfloat16, found) is varlen
    assert find_kernel(CPU, torch.float32, found) is None
    assert find_kernel(CPU, torch.bfloat16, Survey({0: None}, heads={0: (4, 2, 16, 8)})) is None
    assert find_kernel(CPU, torch.bfloat16, Survey({0: None}, heads={0: HEADS}, plain=False)) is None
    installed.setattr("torch.nn.attention.varlen.varlen_attn", _failing)
    assert find_kernel(CPU, torch.bfloat16, found) is None
    installed.setattr("torch.nn.attention.varlen.varlen_attn", lambda query, key: query)  # of PyTorch 2.11
    assert find_kernel(CPU, torch.bfloat16, found) is None


def test_kernels_that_want_sums_of_lengths_get_them(installed: pytest.MonkeyPatch) -> None:
    """Guards implementations of the kernel that cannot do without, while others refuse them."""
    asked = []

    def wants(query: Tensor, key: Tensor, value: Tensor, ends: Tensor, sums: Tensor | None, *sizes: int, **options: Any) -> Any:
        if sums is None:
            raise RuntimeError("cum_seq_k is missing")
        asked.append((sums.tolist(), options["seqused_k"].tolist()))
        assert sums.dtype is torch.int32
        return varlen(query, key, value, ends, None, *sizes, **options)

    wants.__signature__ = __import__("inspect").signature(varlen)  # type: ignore[attr-defined]
    installed.setattr("torch.nn.attention.varlen.varlen_attn", wants)
    assert find_kernel(CPU, torch.bfloat16, Survey({0: None}, heads={0: HEADS})) not in (None, wants)
    for sums, lengths in asked:
        assert sums == [sum(lengths[:i]) for i in range(len(lengths) + 1)]
