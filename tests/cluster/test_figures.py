"""What the benchmark of emulated clusters makes of what it measured."""

from benchmarks.cluster import one
from benchmarks.cluster.devices import FILE, Setup, Simulated, table
from benchmarks.cluster.emulated import Device
from benchmarks.document import lossless
from cascade import family
from cascade.params import SamplingParams
from cascade.scorer import RunnerUp
from cascade.settings.file import load_config
from cascade.simulation.costs import TRIO
from cascade.simulation.recording import RecordedText, Recording

PROMPTS = [list(range(20)), list(range(30))]
PARAMS = SamplingParams(max_tokens=32, temperature=0)


def test_the_file_can_be_served() -> None:
    """Guards benchmarks/cluster/emulated.yaml: what it takes for a pass is what is assumed of the trio, and nothing else."""
    plain = load_config(FILE)
    assert Setup().config == plain
    for tier, (model, load) in zip(plain.tiers, TRIO.items(), strict=True):
        device = Device.of(tier)
        assert {"pass_ms": device.pass_ms, "context_ms": device.context_ms} == table(load), model


def test_other_texts_fail_the_run() -> None:
    """Guards the alarm: an answer that is not the simulator's, or not the recorded one, ends the run with an error."""
    texts = [RecordedText((1,), (((RunnerUp(1, 0.0),), (RunnerUp(2, 0.0),)),) * 3, "code")]
    runs = [one.Run(mode, Simulated((2.0,), ((1, 2),), 1.0), seconds=[1.0], texts=[(1, 2)]) for mode in one.modes(family.NAMES)]
    found = one.figures(Setup(), runs, texts)
    assert lossless({"one": found})
    assert found["modes"]["alone"]["measured_over_simulated"] == 2
    line = one.headline(found | {"agreement": one.agreement(Recording(tuple(texts)), family.NAMES)})
    assert line["all"]["measured_over_simulated"] == [2, 2, 2]
    assert line["code"]["three_vs_alone"] == 1
    runs[-1].texts = [(1, 3)]
    assert not lossless({"one": one.figures(Setup(), runs, texts)})
    runs[-1].expected = Simulated((2.0,), ((1, 3),), 1.0)
    assert not lossless({"one": one.figures(Setup(), runs, texts)})
