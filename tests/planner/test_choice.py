"""When a pass waits for guesses."""

import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cascade.planner.acceptance import DraftStats
from cascade.planner.choice import NO_GUESS, Policy

POLICY = Policy()
ROOM = 15


def known(guesses: int, right: float, first: float) -> DraftStats:
    return DraftStats(guesses, 100 * right, 100 * (1 - right), 100 * first, 100 * (1 - first))


def tokens_per_pass(guesses: int, right: float, first: float, waits_for: int, passes: int = 4000) -> float:
    """Played: a drafter makes so many guesses while a pass runs, the verifier waits for ``waits_for`` after a correction."""
    lots, tokens, time, at_hand = random.Random(0), 0.0, 0.0, 0
    for _ in range(passes):
        interrupted = not at_hand
        offered = waits_for if interrupted else at_hand
        time += 1 + (waits_for / guesses if interrupted else 0.0)
        chances = [first if interrupted and not place else right for place in range(offered + 1)]
        num_right = next((place for place, chance in enumerate(chances) if lots.random() >= chance), offered + 1)
        tokens += min(num_right, offered) + 1  # the own token after the last right guess comes in any case
        at_hand = min(guesses, POLICY.max_guesses) if num_right > offered else 0
    return tokens / time


@settings(max_examples=10, deadline=None)
@given(guesses=st.integers(1, 30), right=st.floats(0.1, 0.95), first=st.floats(0.1, 0.95))
def test_no_other_wait_gives_more(guesses: int, right: float, first: float) -> None:
    """Guards fast drafters that are often wrong: pairs lost a fifth because each pass after a correction started at once."""
    chosen = POLICY.waits_for(known(guesses, right, first), ROOM)
    rates = [tokens_per_pass(guesses, right, first, number) for number in range(min(ROOM, guesses) + 1)]
    assert rates[chosen] >= 0.96 * max(rates)


@settings(max_examples=20, deadline=None)
@given(guesses=st.integers(1, 20), right=st.floats(0.3, 0.97), each=st.floats(0.0, 0.1))
def test_no_other_number_of_guesses_gives_more_in_turns(guesses: int, right: float, each: float) -> None:
    """Guards pairs on the same cores, where each guess delays the pass that scores it: too many and too few both cost."""
    cost = 1 + each * np.maximum(0, np.arange(ROOM + 3) - 1)
    least = POLICY.least_chance(known(guesses, right, right), ROOM, 0.0, cost)
    chosen = next(number for number in range(1, ROOM + 1) if right**number < least or number == ROOM)
    rates = [sum(right**i for i in range(n + 1)) / (cost[1 + n] + n / guesses) for n in range(1, ROOM + 1)]
    assert rates[chosen - 1] >= 0.95 * max(rates)


def test_no_guesses_are_asked_for_where_a_text_drafter_is_as_good() -> None:
    """Guards text that repeats: a pass waited for a model's guesses though eight of a text drafter's were all but certain."""
    cost = np.ones(ROOM + 3)
    assert POLICY.least_chance(known(3, 0.9, 0.9), ROOM, 0.0, cost) <= 1
    assert POLICY.least_chance(known(3, 0.9, 0.9), ROOM, 8.0, cost) == NO_GUESS
    assert POLICY.least_chance(known(3, 0.9, 0.9), 0, 0.0, cost) == NO_GUESS


@pytest.mark.parametrize(("guesses", "right"), [(1, 0.9), (2, 0.99), (30, 0.0)])
def test_who_is_slow_or_wrong_is_not_waited_for(guesses: int, right: float) -> None:
    """Guards "never slower": a pass that waits for such guesses is a pass late."""
    assert POLICY.waits_for(known(guesses, right, right), ROOM) == 0
