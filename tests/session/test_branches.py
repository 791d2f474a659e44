"""Branches, what is known of their chances, and how much of them a pass takes: the laws of the parts, each by itself."""

import random

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from cascade.draft import Draft
from cascade.messages import MAX_RANKS
from cascade.planner.acceptance import Calibration
from cascade.planner.choice import affordable
from cascade.planner.tuning import GUESS_PRICE
from cascade.scorer import RunnerUp, gap_byte
from cascade.session.branches import Branches, Margin

NO_ENDS: frozenset[int] = frozenset()

gaps = st.floats(0, 20)
chances = st.lists(st.floats(0, 1), max_size=12).map(lambda values: sorted(values, reverse=True))


@given(
    chances,
    st.floats(0, 4),
    st.integers(0, 40),
    st.floats(0.001, 0.1),
    st.floats(0, 0.05),
    st.integers(1, 16),
    st.lists(st.integers(1, 5), min_size=12, max_size=12),
    st.integers(0, 30),
)
def test_no_other_pass_gives_more_in_a_second(
    likely: list[float], own: float, tokens: int, base_s: float, token_s: float, knee: int, sizes: list[int], room: int
) -> None:
    """Guards the one rule, held against all other numbers: passes with steps in their costs have several local bests."""
    most, count = tokens + room, len(likely)

    def cost(num_tokens: int) -> float:
        return base_s + token_s * max(0, num_tokens - knee)

    def rate(count: int) -> float:
        alone_s = cost(tokens)
        return (own + sum(likely[:count])) / (alone_s + GUESS_PRICE * (cost(tokens + sum(sizes[:count])) - alone_s))

    fitting = [count for count in range(0 if tokens else 1, len(likely) + 1) if sum(sizes[:count]) <= room]
    candidates, costs = (np.array(likely), np.array(sizes[:count], int)), np.array([cost(size) for size in range(most + 1)])
    count = affordable(*candidates, own, tokens, costs)
    assert sum(sizes[:count]) <= room, "a pass takes no more than it may"
    if fitting:
        assert rate(count) >= max(map(rate, fitting)) * (1 - 1e-9)
    assert affordable(*candidates, 1.0, 1, np.full(101, base_s)) == len(likely), "what costs nothing is taken"


@given(gap=gaps, rank=st.integers(0, 4), first=st.booleans(), share=st.floats(0, 1))
def test_a_chance_becomes_the_share_that_was_right(gap: float, rank: int, first: bool, share: float) -> None:
    """Guards calibration: whatever it believes to begin with, verdicts correct it, and others of its kind alone."""
    calibration, lots, byte = Calibration(), random.Random(0), gap_byte(gap)
    before = calibration.chance(rank, byte, first=not first)
    for _ in range(2000):
        calibration.judged(rank, byte, first=first, right=lots.random() < share)
    assert abs(calibration.chance(rank, byte, first=first) - share) < 0.12
    assert calibration.chance(rank, byte, first=not first) == before


@given(gaps, gaps, st.booleans())
def test_close_tokens_are_less_certain(first_gap: float, other_gap: float, first: bool) -> None:
    """Guards the beginning, before any verdict: a larger gap is never less certain, and its runner-ups never likelier."""
    near, far = sorted((gap_byte(first_gap), gap_byte(other_gap)))
    calibration = Calibration()
    for rank in range(MAX_RANKS):
        chance = calibration.chance(rank, near, first=first), calibration.chance(rank, far, first=first)
        assert chance == tuple(sorted(chance, reverse=bool(rank)))
        assert all(0 <= probability <= 1 for probability in chance)
    assert 0 < near <= far < 256


def close(*tokens: int) -> Margin:
    return Margin.of([RunnerUp(token, 0.1 + place) for place, token in enumerate(tokens)])


def branches(most: int = 4) -> Branches:
    """A text 5, 6, 7 after 3 committed tokens, with close tokens beside its first two."""
    kept = Branches(most, 3)
    for margin in (close(1, 2), close(8), Margin.of([])):
        kept.append(margin)
    return kept


def test_a_draft_offers_runner_ups_and_what_is_behind_them() -> None:
    """Guards the tree that goes up: its trunk is the text, runner-ups come by rank, tails after their heads."""
    kept = branches()
    likeliest = max(kept.candidates(100, NO_ENDS), key=lambda way: way[0])[1]
    assert (likeliest.start, likeliest.tokens) == (3, [1])
    kept.hold(likeliest)
    likeliest.tokens.append(9)
    likeliest.margins.append(close(4))
    draft = kept.proposal([5, 6, 7], bytes(3), 1)
    assert draft.trunk.tokens == (5, 6, 7)
    assert [len(draft.find(path)) for path in ([1, 9], [2], [5, 8])] == [2, 1, 2]
    assert [draft.ranks[node] for node in (*draft.find([1, 9]), *draft.find([2]))] == [1, 0, 2]
    assert branches(most=1).proposal([5, 6, 7], bytes(3), 1).tokens == (5, 6, 7, 1)
    assert Branches(4, 3).proposal([], b"", 0) == Draft()


def test_unlikely_branches_make_room() -> None:
    """Guards memory: no more branches than a request allows, those that are likeliest to be taken, and none once one is."""
    held = branches(most=1)
    for _, branch in held.candidates(100, NO_ENDS):
        held.hold(branch)
    assert len(held.held) == 1
    assert branches().candidates(4, NO_ENDS) == [], "a branch has room behind its first token"
    [likeliest] = held.held
    assert held.correct(likeliest.start - 3, (*likeliest.tokens,)) is likeliest
    assert held.held == []


def test_a_text_that_is_certain_goes_up_as_a_line() -> None:
    """Guards messages and passes: runner-ups that are never right made trees of all drafts, which take longer than lines."""
    kept = Branches(4, 3)
    for _ in range(3):
        kept.append(Margin.of([RunnerUp(1, 12.0), RunnerUp(2, 13.0)]))
    assert kept.proposal([5, 6, 7], bytes(3), 1).is_line
    assert kept.candidates(100, NO_ENDS) == []


def test_nothing_is_written_after_an_ending_token() -> None:
    """Guards passes and texts: a branch went on after a runner-up that ends the text, or after a rejected guess's own end."""
    kept, end = branches(), 1
    assert {branch.tokens[0] for _, branch in kept.candidates(100, {end})} == {2, 8}
    for margin in (close(4), close()):
        kept.append(margin)
    kept.keep_rejected(6, Draft((7, 4), bytes(2), parents=(-1, -1)), [7, 3, end], [close(4), close(), close()], [0])
    [branch] = kept.held
    assert branch.tokens == [4, end]
    assert branch not in [branch for _, branch in kept.candidates(100, {end})]
