"""What the benchmark of emulated clusters makes of what it measured."""

from benchmarks.cluster import __main__ as bench
from benchmarks.cluster import crowd, one
from benchmarks.cluster.devices import FILE, Setup, Simulated
from benchmarks.cluster.emulated import Device
from benchmarks.document import lossless
from cascade.params import SamplingParams
from cascade.scorer import RunnerUp
from cascade.settings.config import CascadeConfig
from cascade.simulation.recording import RecordedText, Recording
from cascade.simulation.trio import TRIO

PROMPTS = [list(range(20)), list(range(30))]
PARAMS = SamplingParams(max_tokens=32, temperature=0)


def test_the_file_can_be_served() -> None:
    """Guards benchmarks/cluster/emulated.yaml: what it takes for a pass is what is assumed of the trio, and nothing else."""
    plain = CascadeConfig.load(FILE)
    assert Setup().config == plain
    for tier, shape in zip(plain.tiers, TRIO, strict=True):
        device = Device.of(tier)
        assert (device.pass_ms, device.context_ms) == (shape.pass_ms, shape.context_ms), shape.name


def test_other_texts_fail_the_run() -> None:
    """Guards the alarm: an answer that is not the simulator's, or not the recorded one, ends the run with an error."""
    texts = [RecordedText((1,), (((RunnerUp(1, 0.0),), (RunnerUp(2, 0.0),)),) * 3, "code")]
    runs = [
        one.Run(mode, Simulated((2.0,), ((1, 2),), 1.0), seconds=[1.0], texts=[(1, 2)])
        for mode in (one.ALONE, *one.PAIRS, one.THREE, one.AUTO)
    ]
    found = one.figures(Setup(), runs, texts)
    assert lossless({"one": found})
    assert found["modes"]["alone"]["measured_over_simulated"] == 2
    line = one.headline(found | {"agreement": one.agreement(Recording(tuple(texts)))})
    assert line["all"]["measured_over_simulated"] == [2, 2, 2]
    assert line["code"]["three_vs_alone"] == 1
    runs[-1].texts = [(1, 3)]
    assert not lossless({"one": one.figures(Setup(), runs, texts)})
    runs[-1].expected = Simulated((2.0,), ((1, 3),), 1.0)
    assert not lossless({"one": one.figures(Setup(), runs, texts)})


def test_replicas_are_compared_at_the_same_load_of_each() -> None:
    """Guards the claim of scaling: four full replicas with 64 requests are beside one with 16, not with 64."""
    found = {
        name: {
            str(load): {"alone": speed * load, "three": speed * load, "ratios": {"three": 1.25, "auto": 1.0}}
            for load in (16, 64)
        }
        for name, speed in (("1/1/1", 2.0), ("2/2/4", 1.9))
    }
    assert crowd.headline(found)["full_replicas"] == {"4": {"alone": 3.8, "three": 3.8}}
    head = bench.head({"scale": found})
    assert head.keys() == {"one", "scale", "map", "auto_vs_best", "auto_vs_alone"}
    assert head["auto_vs_best"]["2/2/4 64"] == 0.8
    assert head["auto_vs_alone"]["1/1/1 16"] == 1.0
    kept = {"scale": found, "dates": {"scale": "2026-01-01"}, "processors": {"scale": "A"}, "head": {"one": 1}}
    now = {"stretch": {"one": 6.0}, "dates": {"one": "2026-02-02"}, "processors": {"one": "B"}, "head": {}}
    both = bench.joined(kept, now)
    assert both["head"]["scale"] == head["scale"]
    assert both["dates"] == {"scale": "2026-01-01", "one": "2026-02-02"}
    assert both["processors"] == {"scale": "A", "one": "B"}
