"""The likeliest tokens of a row, against an ordered vocabulary."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cascade.cpu.leading import leading


@given(
    size=st.sampled_from([1, 2, 17, 64, 65, 3000]),
    spread=st.sampled_from([0.0, 0.5, 3.0, 30.0]),
    share=st.sampled_from([0.0, 0.3, 0.9, 0.999]),
    number=st.sampled_from([0, 1, 5, 40]),
    seed=st.integers(0, 99),
)
def test_all_that_count_are_told(size: int, spread: float, share: float, number: int, seed: int) -> None:
    """Guards top-k and top-p: a token that is left out is never said."""
    drawn = torch.randn(3, size, generator=torch.Generator().manual_seed(seed)) * spread
    scores, number = drawn - drawn.amax(-1, keepdim=True), min(number, size)
    found = leading(scores, [share] * 3, [number] * 3)
    assert found.totals.tolist() == pytest.approx(scores.double().exp().sum(-1).tolist(), rel=1e-6)
    for row, count in enumerate(found.counts):
        if count > found.tokens.shape[1]:
            continue
        ordered, order = scores[row].sort(descending=True, stable=True)
        probabilities = ordered.double().softmax(-1)
        needed = max(number, int((probabilities.cumsum(-1) - probabilities < share).sum()))
        told = found.tokens[row, :count].tolist()
        assert set(order[:needed].tolist()) <= set(told)
        assert told == sorted(told)
        assert torch.equal(found.scores[row, :count], scores[row, told])
        assert found.tokens[row, count:].eq(size).all()
        assert found.scores[row, count:].eq(-math.inf).all()


def test_rows_that_cannot_be_told_say_so() -> None:
    """Guards the fall back to the whole vocabulary: where all are alike, or are no numbers, nothing must be left out."""
    scores = torch.zeros(2, 9000)
    scores[1] = torch.nan
    found = leading(scores, [0.9, 0.9], [0, 0])
    assert all(count > found.tokens.shape[1] for count in found.counts)
