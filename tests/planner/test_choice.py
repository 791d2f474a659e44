"""When a pass waits for guesses, and which it scores."""

import numpy as np
from hypothesis import example, given
from hypothesis import strategies as st

from cascade.draft import Draft
from cascade.planner.acceptance import Calibration, DraftStats
from cascade.planner.choice import NO_GUESS, Policy, affordable

POLICY = Policy()
ROOM = 15


def known(guesses: int, right: float, first: float) -> DraftStats:
    return DraftStats(guesses, 100 * right, 100 * (1 - right), 100 * first, 100 * (1 - first))


def tokens_per_pass(guesses: int, right: float, first: float, waits_for: int) -> float:
    """In the long run: a drafter makes so many guesses while a pass runs, the verifier waits for ``waits_for`` of them after a
    correction, and the own token after the last right guess comes in any case."""
    offered = waits_for, min(guesses, POLICY.max_guesses)
    corrected, ahead = (np.cumprod([chance, *[right] * number]) for chance, number in zip((first, right), offered, strict=True))
    share = (1 - ahead[-1]) / (1 - ahead[-1] + corrected[-1])  # of passes that come after a correction
    tokens = share * corrected[: offered[0]].sum() + (1 - share) * ahead[: offered[1]].sum()
    return float((1 + tokens) / (1 + share * waits_for / guesses))


@given(guesses=st.integers(1, 30), right=st.floats(0.1, 0.95), first=st.floats(0.1, 0.95))
@example(1, 0.9, 0.9)
@example(2, 0.99, 0.99)
@example(30, 0.0, 0.0)
def test_no_other_wait_gives_more(guesses: int, right: float, first: float) -> None:
    """Guards fast drafters that are often wrong, and against waiting for those that are slow: both passes came late."""
    chosen = POLICY.waits_for(known(guesses, right, first), ROOM)
    rates = [tokens_per_pass(guesses, right, first, number) for number in range(min(ROOM, guesses) + 1)]
    assert rates[chosen] >= 0.96 * max(rates)
    assert not chosen or (guesses > 2 and right)


@given(guesses=st.integers(1, 20), right=st.floats(0.3, 0.97), each=st.floats(0.0, 0.1))
def test_no_other_number_of_guesses_gives_more_in_turns(guesses: int, right: float, each: float) -> None:
    """Guards pairs on the same cores, where each guess delays the pass that scores it: too many and too few both cost."""
    cost = 1 + each * np.maximum(0, np.arange(ROOM + 3) - 1)
    least, most = POLICY.turn(known(guesses, right, right), ROOM, 0.0, cost)
    chosen = next(number for number in range(1, ROOM + 1) if right**number < least or number == ROOM)
    rates = [sum(right**i for i in range(n + 1)) / (cost[1 + n] + n / guesses) for n in range(1, ROOM + 1)]
    assert rates[chosen - 1] >= 0.95 * max(rates)
    assert rates[most - 1] == max(rates)


def test_no_guesses_are_asked_for_where_a_text_drafter_is_as_good() -> None:
    """Guards text that repeats: a pass waited for a model's guesses though eight of a text drafter's were all but certain."""
    cost = np.ones(ROOM + 3)
    assert POLICY.turn(known(3, 0.9, 0.9), ROOM, 0.0, cost)[0] <= 1
    assert POLICY.turn(known(3, 0.9, 0.9), ROOM, 8.0, cost)[0] == NO_GUESS
    assert POLICY.turn(known(3, 0.9, 0.9), 0, 0.0, cost)[0] == NO_GUESS


GUESS = Draft((7,), bytes(1), bytes([40]))


def test_another_domain_is_seen_within_twenty_passes() -> None:
    """Guards "never slower": a text in another language was drafted for hundreds of tokens as if nothing had changed."""
    calibration, cost = Calibration(), 0.4 + 0.6 * np.arange(17)  # a second token makes a pass 0.6 times longer
    for right, passes in ((True, 300), (False, 20), (True, 20)):
        for _ in range(passes):
            calibration.learn(GUESS, [7 if right else 8], [0] if right else [])
        chances = np.array(calibration.chances(GUESS))
        assert affordable(chances, np.ones(1, int), 1.0, 1, cost) == right


def test_a_drafter_in_turns_that_has_become_good_is_asked_for_more() -> None:
    """Guards pairs on the same cores: when second guesses had been wrong one was asked for, which told nothing of a second."""
    stats, cost = DraftStats(), 1 + 0.05 * np.arange(ROOM + 3)
    for num_guess, times in ((2, 200), (1, 100)):
        for _ in range(times):
            stats.interrupt()
            stats.passed(num_guess, 1, 2)
    assert POLICY.turn(stats, ROOM, 0.0, cost)[1] > 4
