"""What the benchmark of emulated clusters makes of what it measured."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.cluster import __main__ as bench
from benchmarks.cluster import autoscale, crowd, one
from benchmarks.cluster.devices import FILE, Asked, Setup, Simulated
from benchmarks.cluster.emulated import Device
from benchmarks.cluster.recording import RecordedText, Recording
from benchmarks.cluster.trio import BYTES, BYTES_S, TRIO, Shape
from benchmarks.document import lossless
from cascade.params import SamplingParams
from cascade.scorer import RunnerUp
from cascade.settings.config import CascadeConfig

PROMPTS = [list(range(20)), list(range(30))]
PARAMS = SamplingParams(max_tokens=32, temperature=0)


def test_the_file_can_be_served() -> None:
    """Guards benchmarks/cluster/emulated.yaml: what it takes for a pass is what is assumed of the trio, and nothing else."""
    plain = CascadeConfig.load(FILE)
    assert Setup().config == plain
    for tier, shape in zip(plain.tiers, TRIO, strict=True):
        device = Device.of(tier)
        assert (device.pass_ms, device.context_ms) == (shape.pass_ms, shape.context_ms), shape.name


def test_passes_of_the_trio_take_what_published_figures_say() -> None:
    """Guards the formula: parameters of the model cards, weights over bandwidth at least, and a known model's known speed."""
    assert [round(shape.read / 1e9, 1) for shape in TRIO] == [0.6, 4.0, 32.0]
    assert all(shape.seconds(1) > BYTES * shape.read / BYTES_S for shape in TRIO)
    assert TRIO[-1].seconds(512) > 2 * TRIO[-1].seconds(64)  # arithmetic counts there
    llama = Shape("Llama-3.2-1B", 2048, 8192, 16, 32, head_dim=64, vocab=128_256)
    assert BYTES * llama.read / 3.35e12 / llama.seconds(1) == pytest.approx(0.50, abs=0.02)  # of the peak, in vLLM and SGLang


def test_lockstep_pairs_are_the_best_of_their_kind() -> None:
    """Guards the strongest baseline: of all windows the one that the simulator finds fastest is measured."""
    tiers = Setup().tiers()
    mode = one.best_lockstep(tiers, Asked(PROMPTS, PARAMS), "medium", one.Size(windows=(1, 4, 16)))
    assert mode.speculation.window == 4
    assert mode.speculation.schedule == "lockstep"


def test_ratios_are_to_the_best_pair() -> None:
    """Guards what is claimed of three tiers: beside the best of all pairs, not the last one."""
    speeds = {"alone": 1.0, "lockstep a": 3.0, "lockstep b": 2.0, "async pair, a": 2.5, "async pair, b": 4.0}
    found = one.ratios(speeds | {"async three": 6.0, "auto": 5.0})
    over_alone = {"three_vs_alone": 6, "auto_vs_alone": 5}
    assert found == over_alone | {"auto_vs_best": 0.833, "three_vs_async_pair": 1.5, "three_vs_lockstep_pair": 2}


def test_other_texts_fail_the_run() -> None:
    """Guards the alarm: an answer that is not the simulator's, or not the recorded one, ends the run with an error."""
    texts = [RecordedText((1,), (((RunnerUp(1, 0.0),), (RunnerUp(2, 0.0),)),) * 3, "code")]
    runs = [
        one.Run(mode, Simulated((2.0,), ((1, 2),), 1.0), seconds=[1.0], texts=[(1, 2)])
        for mode in (
            one.ALONE,
            one.best_lockstep(Setup().tiers(), Asked(PROMPTS, PARAMS), "tiny", one.Size(windows=(4,))),
            *one.PAIRS,
            one.THREE,
            one.AUTO,
        )
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
    phases = [{"load": 4, "tokens_per_second": 8.0, "replicas": {"tiny": 1, "full": 2}}]
    assert autoscale.headline({"phases": phases}) == {"load": [4], "replicas": ["1/2"], "tokens_per_second": [8.0]}
    head = bench.head({"scale": found})
    assert head.keys() == {"one", "scale", "autoscale", "auto_vs_best", "auto_vs_alone"}
    assert head["auto_vs_best"]["2/2/4 64"] == 0.8
    assert head["auto_vs_alone"]["1/1/1 16"] == 1.0
    kept = {"scale": found, "dates": {"scale": "2026-01-01"}, "head": {"one": 1}}
    now = {"autoscale": {"phases": phases}, "dates": {"autoscale": "2026-02-02"}, "head": {}}
    both = bench.joined(kept, now)
    assert both["head"]["scale"] == head["scale"]
    assert both["head"]["autoscale"]["load"] == [4]
    assert both["dates"] == {"scale": "2026-01-01", "autoscale": "2026-02-02"}


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_whole_benchmark_works(tmp_path: Path) -> None:
    """Guards `make bench-cluster`, which runs for a quarter of an hour, against parts that have changed; in its own Ray."""
    command = [sys.executable, "-m", "benchmarks.cluster", "--quick", "--results", str(tmp_path / "cluster.json")]
    ran = subprocess.run(command, cwd=Path(__file__).parents[2], capture_output=True, text=True, check=True)
    head = json.loads(ran.stdout.splitlines()[-1])
    assert head == json.loads((tmp_path / "cluster.json").read_text())["head"]
    assert head["one"]["all"]["three_vs_alone"] > 0
    assert 0 < head["one"]["agreement"]["medium → full"] <= 1
    assert head["scale"]["1/1/1"]["4"]["three"] > 0
    assert head["autoscale"]["load"] == [1, 4]
