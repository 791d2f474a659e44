"""The alarm on drafters whose agreement falls."""

import math
import random

from hypothesis import given
from hypothesis import strategies as st

from deployments.ops.collector import BATCH_S, BATCH_TOKENS, LEAST_FALL, LONG, RELEASE, WARM, Drift

shares = st.floats(0.0, 1.0)
answers = st.lists(st.tuples(st.integers(0, 300), st.integers(0, 300), st.floats(0, 2 * BATCH_S)), max_size=120)


def feed(drift: Drift, shares: list[float], now: float = 0.0, tokens: int = 10 * BATCH_TOKENS) -> list[bool]:
    """Observations of these shares; the alarm after each."""
    alarms = []
    for number, share in enumerate(shares, start=1):
        right = round(share * tokens)
        drift.observe(right, tokens - right, now + number * BATCH_S)
        alarms.append(drift.alarm)
    return alarms


@given(st.floats(0.05, 0.95), st.integers(0, 2**32), st.floats(0.0, 0.08))
def test_chance_is_no_drift(share: float, seed: int, spread: float) -> None:
    """Guards operators' sleep: answers that differ from each other, but not from those before, raise nothing in an hour."""
    chance, drift = random.Random(seed), Drift()
    for number in range(360):
        own = min(1.0, max(0.0, chance.uniform(share - spread, share + spread)))
        right = sum(chance.random() < own for _ in range(BATCH_TOKENS))
        assert not drift.observe(right, BATCH_TOKENS - right, number * BATCH_S)
    assert not drift.alarm


@given(st.floats(0.4, 1.0), st.floats(2.0, 4.0), st.integers(WARM, 500))
def test_a_fall_is_alarmed_and_its_end_too(share: float, falls: float, warm: int) -> None:
    """Guards the alarm: a fall of twice the least is seen within ten observations, and once; so is its end."""
    drift, low = Drift(), max(0.0, share - falls * LEAST_FALL)
    assert not any(feed(drift, [share] * warm))
    fallen = feed(drift, [low] * 12, warm * BATCH_S)
    assert fallen[9]
    assert fallen == sorted(fallen)
    back = feed(drift, [share] * 20, (warm + 12) * BATCH_S)
    assert not back[-1]
    assert back == sorted(back, reverse=True)


@given(answers)
def test_the_alarm_has_two_thresholds(answers: list[tuple[int, int, float]]) -> None:
    """Guards against an alarm that flutters: between half of the bound and the bound nothing changes."""
    drift, now = Drift(), 0.0
    for right, wrong, seconds in answers:
        now += seconds
        before = drift.alarm
        changed = drift.observe(right, wrong, now)
        assert changed == (drift.alarm != before)
        if changed and drift.alarm:
            assert drift.fall > drift.bound
        elif changed:
            assert drift.fall <= RELEASE * drift.bound
        assert drift.bound >= LEAST_FALL


@given(st.lists(shares, min_size=1, max_size=100))
def test_a_drafter_that_gets_better_raises_nothing(shares: list[float]) -> None:
    """Guards the sign: only falls count."""
    assert not any(feed(Drift(), sorted(shares)))


def test_few_tokens_and_short_times_are_no_observation() -> None:
    """Guards busy servers, whose level would be that of the last minute, and idle ones, whose few tokens say nothing."""
    drift = Drift()
    drift.observe(BATCH_TOKENS - 1, 0, 0.0)
    assert math.isnan(drift.level)
    drift.observe(1, 0, 0.0)
    assert drift.level == 1.0
    for _ in range(50):
        drift.observe(0, BATCH_TOKENS, BATCH_S / 2)
    assert drift.recent == 1.0


def test_a_fall_for_good_becomes_the_level() -> None:
    """Guards alarms that would last for ever when requests have become others."""
    drift = Drift()
    feed(drift, [0.9] * 360)
    alarms = feed(drift, [0.6] * 1000, 360 * BATCH_S)
    assert alarms[9]
    assert not alarms[-1]
    assert sum(alarms) > 1 / LONG / 2
