"""Attention over blocked keys and values, against the same written out in float64, and its bits."""

import random
from collections.abc import Sequence
from itertools import accumulate

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from cascade.cpu.attention import ROUNDS, Kind, Sizes, attend
from cascade.cpu.cache import BlockedCache, Span, tables
from tests.cases import crossed, examples
from tests.cpu.forks import TEXTS, Piece, check_forks

LENGTH = 150
KINDS = {
    "full": Kind(0.2),
    "window": Kind(0.2, window=20),
    "window of one": Kind(0.2, window=1),
    "cap": Kind(0.3, softcap=5.0),
    "sinks": Kind(0.3, sinks=torch.linspace(-3, 6, 12)),
    "all": Kind(0.1, window=33, softcap=2.0, sinks=torch.linspace(-3, 6, 12)),
}
HEADS = {"grouped": (4, 32, 32), "each its own": (12, 24, 40), "one": (1, 64, 16)}  # of keys; sizes of keys and values


def texts(shape: Sizes, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    noise = torch.Generator().manual_seed(seed)
    sizes = ((12, shape.key_size), (shape.kv_heads, shape.key_size), (shape.kv_heads, shape.value_size))
    query, key, value = (torch.randn(heads, LENGTH, size, generator=noise) * 2 for heads, size in sizes)
    return query, key, value


def score(cache: BlockedCache, shape: Sizes, text: tuple[Tensor, ...], start: int, end: int, kind: Kind) -> Tensor:
    """A row of a pass: what comes out for positions ``start`` to ``end``."""
    parts = (part[:, start:end].transpose(0, 1).contiguous().transpose(0, 1) for part in text)
    return attend(*parts, tables([Span(cache, 0, end - start, start)], {0: shape})[0], kind)


def written_out(text: tuple[Tensor, ...], kind: Kind) -> Tensor:
    query, key, value = (part.double() for part in text)
    group = len(query) // len(key)
    scores = query @ key.repeat_interleave(group, 0).transpose(1, 2) * kind.scaling
    if kind.softcap:
        scores = torch.tanh(scores / kind.softcap) * kind.softcap
    behind = torch.arange(LENGTH)[:, None] - torch.arange(LENGTH)
    scores = scores.masked_fill((behind < 0) | (behind >= (kind.window or LENGTH)), -torch.inf)
    if kind.sinks is not None:
        scores = torch.cat([scores, kind.sinks.double()[:, None, None].expand(-1, LENGTH, 1)], dim=-1)
    out = scores.softmax(-1)[..., :LENGTH] @ value.repeat_interleave(group, 0)
    return out.transpose(0, 1).reshape(LENGTH, -1).float()


FORMS = {f"{heads}, {dtype}": (heads, dtype) for heads in HEADS for dtype in (torch.float32, torch.bfloat16)}


@pytest.mark.parametrize(("kind", "form"), crossed({kind: kind for kind in KINDS}, FORMS))
def test_attention_is_what_is_written_out(kind: str, form: tuple[str, torch.dtype]) -> None:
    """Guards the numbers, also where keys and values are held in 16 bits. Their bits are held below."""
    heads, dtype = form
    shape = Sizes(12, *HEADS[heads])
    query, *held = text = texts(shape)
    rounds = ROUNDS and dtype is torch.bfloat16  # queries and weights, too
    expected = written_out(
        (query.to(dtype).float() if rounds else query, *(part.to(dtype).float() for part in held)), KINDS[kind]
    )
    scores = score(BlockedCache({0: shape}, dtype), shape, text, 0, LENGTH, KINDS[kind])
    torch.testing.assert_close(scores, expected, rtol=1e-4, atol=1e-2 if rounds else 3e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_queries_that_are_no_numbers_stay_so(dtype: torch.dtype) -> None:
    """Guards the check of logits at load: what overflows must not come out as a number, and harms no other position."""
    shape, kind = Sizes(12, *HEADS["grouped"]), KINDS["full"]
    text = texts(shape)
    clean = score(BlockedCache({0: shape}, dtype), shape, text, 0, LENGTH, kind)
    text[0][:, 7], text[0][:, 9, 3] = torch.nan, torch.inf
    scores = score(BlockedCache({0: shape}, dtype), shape, text, 0, LENGTH, kind)
    others = [at for at in range(LENGTH) if at not in (7, 9)]
    assert scores[[7, 9]].isnan().all(dim=1).tolist() == [True, True]
    assert torch.equal(scores[others], clean[others])


@settings(max_examples=examples(0.3))
@given(rng=st.randoms(use_true_random=False), heads=st.sampled_from(sorted(HEADS)), kind=st.sampled_from(sorted(KINDS)))
def test_forks_are_texts_of_their_own(rng: random.Random, heads: str, kind: str) -> None:
    """Guards trees of guesses: a fork that sees what its base wrote after it, or whose bits depend on where it begins."""
    shape = Sizes(12, *HEADS[heads])
    many = [torch.stack(parts) for parts in zip(*(texts(shape, seed) for seed in range(TEXTS)), strict=True)]

    def score(pieces: Sequence[Piece]) -> Sequence[Tensor]:
        sizes = [len(piece.picks) for piece in pieces]
        picks, places = (
            torch.tensor([number for piece in pieces for number in numbers(piece)])
            for numbers in (lambda p: p.picks, lambda p: range(p.start, p.start + len(p.picks)))
        )
        parts = (part[picks, :, places].transpose(0, 1) for part in many)
        ends = [*accumulate(sizes)]
        rows = [Span(piece.store, end - n, end, piece.start) for piece, n, end in zip(pieces, sizes, ends, strict=True)]
        return attend(*parts, tables(rows, {0: shape})[0], KINDS[kind]).split(sizes)

    dtype = rng.choice([torch.float32, torch.bfloat16])
    check_forks(rng, lambda: BlockedCache({0: shape}, dtype), score, LENGTH)


def test_forks_take_little_memory() -> None:
    """Guards memory: a fork holds the blocks that its positions lie in, wherever it begins, and none before it is written."""
    shape, kind = Sizes(12, 4, 32, 32), KINDS["full"]
    text, base = texts(shape), BlockedCache({0: shape})
    score(base, shape, text, 0, 100, kind)
    each, fork = base.nbytes // base.capacity, base.fork(79)
    held = [fork.nbytes]
    for end in (80, 81, 111):
        score(fork, shape, text, 79, end, kind)
        held.append(fork.nbytes)
    assert held == [0, 16 * each, 32 * each, 48 * each]
    assert base.capacity == 128
