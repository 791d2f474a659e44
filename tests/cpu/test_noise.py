"""Which tokens can win: no winner is left out, and few others are taken along."""

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cascade.cpu.noise import ROOM, contenders
from cascade.engine.sampling.own_tokens import gumbel, mixed, noise_bits

SEED = 77


def scores_of(rows: int, size: int, scale: float = 3.0) -> torch.Tensor:
    scores = torch.randn(rows, size, generator=torch.Generator().manual_seed(size)) * scale
    return scores - scores.amax(-1, keepdim=True)


@pytest.mark.parametrize("size", [1, 2, 64, 65, 50_257])
@pytest.mark.parametrize(("number", "threads"), [(1, 1), (3, 2)], indirect=["threads"])
def test_winners_are_among_them(size: int, number: int) -> None:
    """Guards bounds, the last block of a row, bits, and threads, of which each has rows of its own."""
    rows, number = 3, min(number, size)
    scores, positions = scores_of(rows, size), torch.arange(9, 9 + rows)
    tokens, bits, kept, counts = contenders(scores, [(position, mixed(SEED)) for position in positions.tolist()], number)
    best = (scores + gumbel(noise_bits(mixed(SEED), positions, size))).topk(number).indices
    everything = noise_bits(mixed(SEED), positions, size)
    for row, count in enumerate(counts):
        found = tokens[row, :count]
        assert number <= count <= min(ROOM, size)
        assert set(best[row].tolist()) <= set(found.tolist())
        assert (found.diff() > 0).all()
        assert torch.equal(bits[row, :count], everything[row, found])
        assert torch.equal(kept[row, :count], scores[row, found])
        assert not tokens[row, count:].any()
        assert (kept[row, count:] == -torch.inf).all()


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    size=st.sampled_from([1, 2, 7, 16, 64, 300, 4096]),
    scale=st.sampled_from([0.0, 0.1, 3.0, 1e6]),
    seed=st.integers(-(2**63), 2**63 - 1),
    position=st.integers(0, 2**40),
    number=st.integers(1, 6),
)
def test_few_are_left(size: int, scale: float, seed: int, position: int, number: int) -> None:
    """Guards against bounds that are far too wide, which would be right and slow."""
    number = min(number, size)
    *_, counts = contenders(scores_of(1, size, scale), [(position, mixed(seed))], number)
    assert number <= counts[0] <= 12 * number


def test_filtered_tokens_and_what_is_no_number() -> None:
    """Guards tokens that never win, rows that have too few others, too many equals, or no numbers at all."""
    scores = torch.full((4, 300), -torch.inf)
    scores[0, 271] = scores[1, :] = 0.0
    scores[1, 1:] = -1e30  # noise is less than such numbers are rounded by: all are equal
    scores[3, 5] = torch.nan
    tokens, _, _, counts = contenders(scores, [(place, mixed(SEED)) for place in range(4)], 2)
    assert counts[0] == 1
    assert counts[1] > ROOM
    assert counts[2:] == [0, 0]
    assert tokens[0, 0] == 271


def test_bounds_hold_for_every_exponent_of_the_noise() -> None:
    """Guards both bounds where the noise is extreme: of a million tokens, with and without the least of them."""
    size = 2**20
    scores = torch.zeros(1, size)
    noise = gumbel(noise_bits(mixed(SEED), torch.tensor([0]), size))
    tokens, _, _, (count,) = contenders(scores, [(0, mixed(SEED))], 20)
    assert set(noise[0].topk(20).indices.tolist()) <= set(tokens[0, :count].tolist())
    low = torch.where(noise > -2.0, -torch.inf, scores)  # those with the least noise, near u = 1
    tokens, _, _, (count,) = contenders(low, [(0, mixed(SEED))], 1)
    assert count > ROOM or (low + noise).argmax() in tokens[0, :count]
