"""The cost of a tier's pass, timed at start and kept current; when a pass waits for guesses, and which it scores."""

import time
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from cascade.draft import Draft
from cascade.planner.acceptance import Calibration, DraftStats
from cascade.planner.choice import NO_GUESS, Policy, affordable
from cascade.planner.cost import Profile
from cascade.planner.tuning import PREFILL_TOKENS
from cascade.scorer import Row
from cascade.tier.runner import CONTEXT, GRID, measure
from tests.tier.test_tier import alone, opening, written
from tests.toys import ToyModel
from tests.waiting import LONG_S

POINTS = ((1, 0.010), (2, 0.011), (8, 0.014), (64, 0.070))


def test_a_model_is_timed_within_the_budget() -> None:
    """Guards the profile: at 1 to 4 tokens alone, guesses beside eight sessions looked free, and large models started late."""
    profile = measure(ToyModel(pass_s=0.004, token_s=0.0005), max_tokens=16, budget_s=LONG_S)
    assert [tokens for tokens, _ in profile.points] == [tokens for tokens in sorted(GRID) if tokens <= 16]
    assert all(profile.predict(tokens) >= 0.004 + 0.0005 * tokens for tokens in (1, 4, 16))
    assert profile.predict(16) > profile.predict(1)
    slow = ToyModel(pass_s=0.02, token_s=0.002)
    profile = measure(slow, budget_s=0.05)
    assert 2 <= len(profile.points) < 6
    assert slow.passes < 16
    assert profile.predict(512) > profile.predict(16) > 0.02 + 16 * 0.002


def test_no_longer_pass_is_cheaper_than_the_longest_timed() -> None:
    """Guards what lies beyond the timed sizes: noise in the last one made long passes cost less than nothing."""
    profile = Profile([(1, 0.10), (8, 0.12), (16, 0.11)])
    assert profile.predict(12) == pytest.approx(0.115)
    assert profile.predict(200) == pytest.approx(0.11)


@pytest.mark.parametrize("context_len", [2, 16, 700])
def test_short_contexts_are_respected(context_len: int) -> None:
    """Guards models of short context against being timed where they have no positions: `ToyModel` asserts it."""
    profile = measure(ToyModel(context_len=context_len))
    assert profile.points[-1][0] + min(CONTEXT, (context_len - 1) // 2) < max(context_len, 3)


@given(tokens=st.integers(1, 200), context=st.integers(0, 1000), factor=st.floats(0.6, 1.9))
def test_live_passes_move_the_profile(tokens: int, context: int, factor: float) -> None:
    """Guards currency: prices follow slower and faster passes for all sizes, and a pass that the machine stopped in hardly."""
    profile = Profile(POINTS, context_s=1e-6)
    before = profile.predict(tokens, context)
    for pass_s, moved in ((30.0, 0.1), (0.0, 0.2)):  # a pass cannot be too fast by a pause, so that counts more
        profile = Profile(POINTS, context_s=1e-6)
        profile.record(tokens, 0, context, pass_s)
        assert profile.predict(tokens, context) == pytest.approx(before, rel=moved)
    profile = Profile(POINTS, context_s=1e-6)
    seconds = before * factor
    for _ in range(400):
        profile.record(tokens, 0, context, seconds)
    assert profile.predict(tokens, context) == pytest.approx(seconds, rel=0.02)
    if tokens == 1:
        for (_, after), (_, timed) in zip(profile.points[1:], POINTS[1:], strict=True):
            assert after / timed == pytest.approx(profile.points[0][1] / POINTS[0][1], rel=0.1)


def test_sizes_that_are_run_keep_prices_of_their_own() -> None:
    """Guards prices of guesses: where passes of 8 and of 12 tokens take turns, one does not move the other."""
    profile = Profile([(1, 0.01), (8, 0.01), (12, 0.01), (64, 0.05)])
    for _ in range(100):
        profile.record(8, 0, 0, 0.02)
        profile.record(12, 0, 0, 0.03)
        profile.rested(0.002)
    profile.rested(5.0)
    assert profile.predict(8) == pytest.approx(0.02, rel=0.1)
    assert profile.predict(12) == pytest.approx(0.03, rel=0.1)
    assert profile.turn(8) == pytest.approx(profile.predict(8) + 0.002, rel=0.02)


def test_prefill_has_a_price_of_its_own() -> None:
    """Guards prices of guesses: tokens that are only read need no logits, and made those that do look as cheap."""
    profile = Profile([(1, 0.01), (64, 0.1), (128, 0.2)])
    for num_read in (64, 0, 20, 128) * 50:
        profile.record(64 + num_read, num_read, 0, 0.1 + 0.0005 * num_read)
    assert profile.token_s == pytest.approx(0.0005, rel=0.05)
    assert profile.predict(128) == pytest.approx(0.2, rel=0.05)


def test_positions_that_were_timed_too_dear_become_cheaper() -> None:
    """Guards prices of guesses where much is held: positions timed five times too dear made tokens cost nothing."""
    profile = Profile([(1, 0.01), (64, 0.1), (128, 0.2)], context_s=2e-6)
    for num_tokens, context in [(64, 60_000), (128, 120_000), (64, 20_000), (128, 1000)] * 500:
        profile.record(num_tokens, 0, context, 0.1 * num_tokens / 64 + 4e-7 * context)
    assert profile.predict(64) == pytest.approx(0.1, rel=0.1)
    assert profile.predict(64, 60_000) == pytest.approx(0.124, rel=0.1)


def test_passes_are_timed_as_they_follow_each_other() -> None:
    """Guards prices against the first pass after a long one, with cold caches: positions looked six times dearer."""

    class Cold(ToyModel):
        read = 0

        def launch(self, rows: Sequence[Row]) -> Sequence[Row]:
            tokens = sum(len(row.input_ids) for row in rows)
            time.sleep(0.02 if self.read > PREFILL_TOKENS else 0.0)
            self.read = tokens
            return super().launch(rows)

    assert measure(Cold(), max_tokens=4).context_s < 0.01 / CONTEXT


def test_a_tier_that_never_waits_knows_what_lies_between_its_passes() -> None:
    """Guards the measure through a tier: what lies between passes is measured, a wait for requests is not."""
    profile = Profile()
    with alone(ToyModel(), profile=profile) as tier:
        for seed in range(2):
            time.sleep(0.2)
            written(tier, opening(seed, chain=()))
    assert 0 < profile.between_s < 0.1


# when a pass waits for guesses, and which it scores


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
