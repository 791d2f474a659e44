"""Fleets over hours: made-up requests, and what a layout makes of them."""

from collections.abc import Callable
from dataclasses import replace

import pytest

from benchmarks.arrivals import DAY_S, Arrival, bursty, nightly, rising
from benchmarks.autoscale import FULL, TOKENS, fleet
from benchmarks.fleet import run, static
from cascade.planner.replicas import Goal
from cascade.planner.scaling import Pace, Scaler

HOUR_S = 3600.0


@pytest.mark.parametrize(("make", "mean"), [(rising, 0.55), (bursty, 0.44), (nightly, 0.44)])
def test_requests_come_as_they_are_said_to(make: Callable[..., list[Arrival]], mean: float) -> None:
    """Guards savings that the traces made up: their load on average, its order, and that a seed is a trace."""
    seconds = DAY_S if make is nightly else 12 * HOUR_S
    trace = make(0.5, seconds, TOKENS, 1)
    assert trace == make(0.5, seconds, TOKENS, 1) != make(0.5, seconds, TOKENS, 2)
    assert trace == sorted(trace)
    assert len(trace) / seconds == pytest.approx(0.5 * mean, rel=0.25 if make is bursty else 0.05)
    assert sum(one.tokens for one in trace) / len(trace) == pytest.approx(TOKENS, rel=0.05)


def test_sessions_share_passes_exactly() -> None:
    """Guards the arithmetic: one session alone, then two that share, then the longer one alone again; and device-hours."""
    there = fleet(60.0)
    alone, together = FULL(1), there.tiers[-1].cost(2)
    found = run(there, [Arrival(1.0, 100), Arrival(1.0, 200)], static((0, 0, 1)), (0, 0, 1))
    first, second = found.token_s
    assert first == pytest.approx(together)
    assert second == pytest.approx((100 * together + 100 * alone) / 200)
    assert found.device_hours == pytest.approx(2 * 5 / 3600)


def test_replicas_take_time_to_start_and_end_their_answers() -> None:
    """Guards what scaling costs: a replica counts from when it is asked for, serves later, and goes when it is empty."""
    there = replace(fleet(60.0), start_s=20.0)
    layouts = iter([(0, 0, 1), *[(0, 0, 2)] * 5, *[(0, 0, 1)] * 1000])
    trace = [Arrival(0.1, 1), *[Arrival(at, 2000) for at in (31.0, 31.5)]]
    found = run(there, trace, lambda tiers, speeds, now: next(layouts), (0, 0, 1))
    assert found.changes == 2
    assert found.most_devices == 2
    assert min(found.token_s[1:]) == pytest.approx(FULL(1), rel=0.05)  # each has a replica to itself


def test_scaling_saves_devices_over_a_morning() -> None:
    """Guards the claim in small: few requests take few devices, never too many, and the time per token is kept."""
    trace = [Arrival(one.at_s - 4 * HOUR_S, one.tokens) for one in nightly(3.0, 5 * HOUR_S, TOKENS) if one.at_s > 4 * HOUR_S]
    there, goal = fleet(60.0), Goal(5.0)
    scaled = run(there, trace, Scaler(goal, Pace()), (0, 1, 1))
    assert scaled.most_devices <= 5
    assert scaled.device_hours < 0.75 * 5
    assert scaled.quantile(0.95) < 1.2 * goal.slowdown * FULL(1)
