"""Toy tiers: that they agree as often as they are said to."""

import itertools

import pytest

from cascade.params import SamplingParams
from cascade.simulation.toy_tier import ABOVE, ToyTier

VOCAB = 64
AGREEMENT = (0.65, 0.82)
PLACES = 3000
TIERS = [ToyTier(VOCAB, AGREEMENT[level:]) for level in range(3)]  # bottom to top


def said(tier: ToyTier, place: int, count: int = 3) -> list[int]:
    """What it says and nearly says at a place of some text."""
    context = tuple((place * step) % VOCAB for step in (7, 11, 13))
    return [one.token for one in tier.ranked(context, place, SamplingParams(temperature=0, seed=1), count)]


def shared(one: ToyTier, other: ToyTier) -> float:
    return sum(said(one, place, 1) == said(other, place, 1) for place in range(PLACES)) / PLACES


def test_tiers_agree_as_often_as_they_should() -> None:
    """Guards what benchmarks of clusters are about: each edge has its share, and errors of different edges are unrelated."""
    for (lower, upper), share in zip(itertools.pairwise(TIERS), AGREEMENT, strict=True):
        assert shared(lower, upper) == pytest.approx(share, abs=0.02)
    assert shared(TIERS[0], TIERS[-1]) == pytest.approx(AGREEMENT[0] * AGREEMENT[1], abs=0.02)


def test_runner_ups_are_as_right_as_measured() -> None:
    """Guards trees, which live on them: where a tier is wrong its runner-ups are right as often as those of real models."""
    medium, full = TIERS[1:]
    wrong = [said(medium, place) for place in range(PLACES) if said(medium, place)[0] != said(full, place, 1)[0]]
    right = [said(full, place, 1)[0] for place in range(PLACES) if said(medium, place)[0] != said(full, place, 1)[0]]
    for rank, share in enumerate(ABOVE, start=1):
        found = sum(ranked[rank] == token for ranked, token in zip(wrong, right, strict=True)) / len(wrong)
        assert found == pytest.approx(share, abs=0.05)


def test_own_tokens_and_runner_ups_differ() -> None:
    """Guards draft trees, whose children must be different tokens of the vocabulary, in order of their gaps."""
    for place, tier in itertools.product(range(1000), TIERS[:-1]):
        ranked = tier.ranked((place % VOCAB,), place, SamplingParams(temperature=0, seed=0), 3)
        assert len({one.token for one in ranked}) == 3
        assert all(0 <= one.token < VOCAB for one in ranked)
        assert [one.gap for one in ranked] == sorted(one.gap for one in ranked)


def test_rows_that_need_logits_are_refused() -> None:
    """Guards against texts that are said to obey parameters which the toy does not know."""
    with pytest.raises(NotImplementedError, match="honours a request's seed alone"):
        TIERS[0].logits((1, 2, 3))
