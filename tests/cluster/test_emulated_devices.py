"""Emulated devices: that passes take what their table says, by a clock that is a fake, too."""

from collections.abc import Sequence

import pytest

from benchmarks.cluster.devices import Setup, table
from benchmarks.cluster.emulated import Device, Emulated
from cascade.draft import Draft
from cascade.params import SamplingParams
from cascade.planner.cost import Profile
from cascade.scorer import Row
from cascade.simulation.costs import TRIO
from cascade.simulation.toy_tier import ToyTier

PARAMS = SamplingParams(temperature=0, seed=3)
POINTS = ((1, 0.020), (11, 0.030), (21, 0.060))
CONTEXT_S = 1e-5
VOCAB = 32


class Clock:
    """Seconds that pass when somebody sleeps, or works."""

    def __init__(self) -> None:
        self.now = 100.0
        self.slept: list[float] = []

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.now += seconds


class Slow(ToyTier):
    """Takes its time itself."""

    def __init__(self, clock: Clock, seconds: float) -> None:
        super().__init__(VOCAB)
        self._clock, self._takes = clock, seconds

    def launch(self, rows: Sequence[Row]) -> Sequence[Row]:
        self._clock.now += self._takes
        return super().launch(rows)


def emulated(seconds: float) -> tuple[Emulated, Clock]:
    """A device whose model takes so long by itself."""
    clock = Clock()
    cost = Profile(POINTS, CONTEXT_S)
    return Emulated(Slow(clock, seconds), cost, clock=clock, sleep=clock.sleep), clock


@pytest.mark.parametrize(
    ("starts", "sizes", "guesses", "seconds"),
    [
        ((0,), (1,), 0, 0.020),
        ((0,), (6,), 0, 0.025),  # between two points
        ((0,), (1,), 10, 0.030),  # guesses are tokens of the pass
        ((0, 0), (11, 10), 0, 0.060),  # rows share the pass
        ((0,), (31,), 0, 0.090),  # as steep as before the last point
        ((100, 300), (1, 10), 0, 0.030 + 400 * CONTEXT_S),
    ],
)
def test_passes_obey_the_table(starts: tuple[int, ...], sizes: tuple[int, ...], guesses: int, seconds: float) -> None:
    """Guards every figure of an emulated cluster: a pass ends when the device would have ended it, whatever the model took."""
    device, clock = emulated(0.004)
    rows = []
    for start, size in zip(starts, sizes, strict=True):
        cache = device.new_cache()
        if start:
            device.run([Row(cache, 0, [1] * start, 0, PARAMS)])
        rows.append(Row(cache, start, [2] * size, 1, PARAMS, draft=Draft((2,) * guesses, bytes(guesses))))
    begin = clock.now
    device.run(rows)
    assert clock.now - begin == pytest.approx(seconds)
    assert clock.slept[-1] == pytest.approx(seconds - 0.004)
    assert device.late == 0


def test_passes_that_are_late_are_told(caplog: pytest.LogCaptureFixture) -> None:
    """Guards against figures of a machine that cannot carry its devices: once said, always counted."""
    device, clock = emulated(0.5)
    for _ in range(2):
        device.run([Row(device.new_cache(), 0, [1], 1, PARAMS)])
    assert (device.passes, device.late, clock.slept) == (2, 2, [])
    [record] = caplog.records
    assert "later than the device's would have" in record.message


def test_stretched_time_is_that_of_passes() -> None:
    """Guards tables on their way to a replica, as JSON: numbers of tokens, stretched seconds, in order."""
    config = Setup(stretch=10.0).config
    cost = Device.of(type(config).parse(config.model_dump(mode="json")).tiers[-1]).cost
    given = table(TRIO["Qwen3-32B"])
    assert cost.points == tuple((tokens, pytest.approx(1e-2 * ms)) for tokens, ms in given["pass_ms"].items())
    assert cost.context_s == pytest.approx(1e-5 * given["context_ms"])
