"""How long a step of a tier may take."""

import pytest

from cascade.tier import watchdog
from cascade.tier.watchdog import FACTOR, GRACE_S, Watchdog


class Clock:
    """Time that stands still until it is told otherwise."""

    def __init__(self) -> None:
        self.now = 100.0

    def monotonic(self) -> float:
        return self.now


@pytest.mark.parametrize(("expected_s", "bound_s"), [(0.0, GRACE_S), (0.01, GRACE_S), (4.0, FACTOR * 4.0)])
def test_bound_follows_the_profile(monkeypatch: pytest.MonkeyPatch, expected_s: float, bound_s: float) -> None:
    """Guards slow machines: what a pass was measured to take decides, but for a grace that short ones have, too."""
    clock = Clock()
    monkeypatch.setattr(watchdog, "time", clock)
    dog = Watchdog()
    assert not dog.hangs
    dog.begin(expected_s)
    clock.now += bound_s - 0.01
    assert not dog.hangs
    clock.now += 0.02
    assert dog.hangs
    dog.begin()
    assert not dog.hangs
    dog.rest()
    clock.now += 1e9
    assert not dog.hangs
