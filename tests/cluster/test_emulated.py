"""Emulated devices, by a clock that is a fake, too; and what their benchmark makes of what it measured."""

import pytest

from benchmarks.cluster.devices import FILE, Setup, table
from benchmarks.cluster.emulated import Device, Emulated
from cascade.draft import Draft
from cascade.params import SamplingParams
from cascade.planner.cost import Profile
from cascade.scorer import Row
from cascade.settings.llm_configs import load_config
from cascade.simulation.costs import TRIO
from cascade.simulation.toy_tier import ToyTier

PARAMS = SamplingParams(temperature=0, seed=3)
COST = Profile(((1, 0.020), (11, 0.030), (21, 0.060)), 1e-5)


class Clock:
    """Seconds that pass when somebody sleeps; the model works for ``model_s`` in each pass."""

    def __init__(self, model_s: float) -> None:
        self.now, self.slept, self._model_s = 100.0, list[float](), model_s
        self.device = Emulated(ToyTier(32), COST, clock=lambda: self.now, sleep=self.sleep)

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.now += seconds

    def run(self, *rows: Row) -> float:
        begin, launched = self.now, self.device.launch(rows)
        self.now += self._model_s
        self.device.collect(launched)
        return self.now - begin


@pytest.mark.parametrize(
    ("starts", "sizes", "guesses", "seconds"),
    [
        ((0,), (1,), 0, 0.020),
        ((0,), (6,), 0, 0.025),  # between two points
        ((0,), (1,), 10, 0.030),  # guesses are tokens of the pass
        ((0, 0), (11, 10), 0, 0.060),  # rows share the pass
        ((0,), (31,), 0, 0.090),  # as steep as before the last point
        ((100, 300), (1, 10), 0, 0.030 + 400e-5),
    ],
)
def test_passes_obey_the_table(starts: tuple[int, ...], sizes: tuple[int, ...], guesses: int, seconds: float) -> None:
    """Guards every figure of an emulated cluster: a pass ends when the device would have ended it, whatever the model took."""
    clock, rows = Clock(model_s=0.004), []
    for start, size in zip(starts, sizes, strict=True):
        cache = clock.device.new_cache()
        if start:
            clock.run(Row(cache, 0, [1] * start, 0, PARAMS))
        rows.append(Row(cache, start, [2] * size, 1, PARAMS, draft=Draft((2,) * guesses, bytes(guesses))))
    assert clock.run(*rows) == pytest.approx(seconds)
    assert clock.slept[-1] == pytest.approx(seconds - 0.004)
    assert clock.device.late == 0


def test_passes_that_are_late_are_told(caplog: pytest.LogCaptureFixture) -> None:
    """Guards against figures of a machine that cannot carry its devices: once said, always counted."""
    clock = Clock(model_s=0.5)
    for _ in range(2):
        clock.run(Row(clock.device.new_cache(), 0, [1], 1, PARAMS))
    assert (clock.device.passes, clock.device.late, clock.slept) == (2, 2, [])
    [record] = caplog.records
    assert "later than the device's would have" in record.message


def test_the_file_can_be_served() -> None:
    """Guards benchmarks/cluster/emulated.yaml, and its tables on their way to a replica, as JSON."""
    plain = load_config(FILE)
    assert Setup().config == plain
    config = Setup(stretch=10.0).config
    stretched = type(config).parse(config.model_dump(mode="json")).tiers
    for tier, slower, (model, load) in zip(plain.tiers, stretched, TRIO.items(), strict=True):
        device, cost, given = Device.of(tier), Device.of(slower).cost, table(load)
        assert {"pass_ms": device.pass_ms, "context_ms": device.context_ms} == given, model
        assert cost.points == tuple((tokens, pytest.approx(1e-2 * ms)) for tokens, ms in given["pass_ms"].items())
        assert cost.context_s == pytest.approx(1e-5 * given["context_ms"])
