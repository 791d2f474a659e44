"""What benchmarks are made of still works: they run rarely, and for minutes."""

import asyncio
import io
import json
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from benchmarks import cascade, device_metrics, gpu, hop, price, reference, rules, scale, vs_transformers
from benchmarks.drafters import __main__ as drafters
from benchmarks.drafters import cost, report
from benchmarks.drafters.modes import MODES
from benchmarks.trees import __main__ as trees
from benchmarks.trees import acceptance, cells, crowd, served, simulated
from cascade.answer import Completion, Stats
from cascade.bench.load import Cell
from cascade.messages import Edge
from cascade.params import DEFAULT_WINDOW, Handling, SamplingParams, Speculation
from tests import small


def test_hops_can_be_measured() -> None:
    """Guards the price of a message against links that have changed: a benchmark would fail behind its longest part."""
    with ProcessPoolExecutor(1, get_context("spawn")) as worker:  # whose tier ends with it
        hop_s = asyncio.run(hop.measure(*worker.submit(hop.serve).result()))
    assert 0 < hop_s < 1


def test_passes_and_messages_have_prices(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards what the simulator is told of served tiers against links and tiers that have changed."""
    monkeypatch.setattr(price, "NUM_TOKENS", 48)
    monkeypatch.setattr(price, "NUM_ROUNDS", 3)
    tiny = small.paths()[0]
    with ProcessPoolExecutor(1, get_context("spawn")) as worker:
        ticket = worker.submit(price.serve, tiny, "float32").result()

        def verify() -> "asyncio.Future[None]":
            return asyncio.wrap_future(worker.submit(reference.verify, tiny, "float32"))

        async def measure() -> list[price.Price]:
            return [await price.price(worker, ticket, session, 8, judge) for session, judge in (("0", None), ("1", verify))]

        for found in asyncio.run(measure()):
            assert 0 < found.pass_s < 1
            assert 0 < found.message_s < 1


def test_lockstep_pairs_are_no_strawmen() -> None:
    """Guards the strongest baseline: every drafter with windows on both sides of its best one."""
    modes = [mode.speculation for mode in cascade.lockstep_pairs()]
    assert {mode.tiers for mode in modes} == {("tiny",), ("medium",)}
    assert all(mode.schedule == "lockstep" for mode in modes)
    assert max(mode.window or 0 for mode in modes) >= DEFAULT_WINDOW // 2


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_gpu_is_asked_for_in_one_sentence() -> None:
    """Guards machines without one against a traceback, and against figures that mean nothing."""
    with pytest.raises(SystemExit, match=r"^bench-gpu needs an NVIDIA GPU[^\n]*$"):
        gpu.main([])


def test_the_gpu_benchmark_works_before_there_is_a_gpu(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Guards the first run on a GPU, which may be the only one for long: every part but the device's own profile."""
    gpu.main(["--device", "cpu", "--shape", "tiny", "--results", str(tmp_path / "gpu.json")])
    document = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert document == json.loads((tmp_path / "gpu.json").read_text())
    found = document["shapes"]["tiny"]
    assert found["problems"] == []
    assert set(gpu.WANTED) - set(found) == {"device_gap_ms"}
    assert document["bfloat16_cascade"]["problems"] == []
    assert found["bfloat16_exactness"]["compared"] == 8
    assert document["float32_exactness"]["problems"] == []
    assert document["float32_exactness"]["same_text"]
    assert document["float32_exactness"]["accepted"] > 0


def test_what_fails_on_a_gpu_leaves_the_rest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards long runs: a compiler that is not there, a part that breaks and a model too large cost themselves alone."""
    whole, results = vs_transformers.generate, tmp_path / "gpu.json"

    def generate(*args: Any, **options: Any) -> list[int]:
        if "cache_implementation" in options:
            raise RuntimeError("no compiler")
        return whole(*args, **options)

    def broken(*_: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(vs_transformers, "generate", generate)
    monkeypatch.setattr(gpu, "batching", broken)
    monkeypatch.setattr(gpu, "same_text", broken)
    device, small = torch.device("cpu"), replace(scale.SMALL, tokens=9)
    build = gpu.build
    monkeypatch.setattr(gpu, "build", lambda shape, *rest: broken() if shape is gpu.SHAPES["7b"] else build(shape, *rest))
    document = json.loads(json.dumps(gpu.measure(["7b", "tiny"], device, small, results)))
    assert document == json.loads(results.read_text())
    assert document["shapes"]["7b"] == {"problems": ["OutOfMemoryError: CUDA out of memory"]}
    found = document["shapes"]["tiny"]
    assert found["problems"] == ["OutOfMemoryError: CUDA out of memory", "generate_static: RuntimeError: no compiler"]
    assert set(gpu.WANTED) - set(found) == {"device_gap_ms", "batch_vs_generate_batch", "decode_vs_generate_static"}
    assert len(gpu.table(document).columns) == 4


def test_a_device_waits_between_its_graphs() -> None:
    """Guards the gap that is asked for: lulls between the kernels of one graph are not the host's."""
    assert device_metrics.idle_s(
        [(0.0, 1e-3), (1.002e-3, 2e-3), (2.5e-3, 3e-3), (2.6e-3, 2.7e-3), (3.1e-3, 4e-3)]
    ) == pytest.approx(0.6e-3)


def test_trees_are_compared_with_lines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Guards the parts that serve nothing: a runner-up can only add to a share, and trees are no slower than lines on paper."""
    monkeypatch.setattr(simulated, "WINDOWS", (DEFAULT_WINDOW,))
    tiny = trees.Plan(
        acceptance.Size(rows=1, length=48, prompt=16, written=8), simulated.Size(200, 1), served.Size(8), crowd.Size(8)
    )
    monkeypatch.setattr(trees, "plan", lambda *_, **__: tiny)
    trees.main(["--parts", "acceptance,simulated", "--results", str(tmp_path / "trees.json")])
    head = json.loads(capsys.readouterr().out.splitlines()[-1])
    document = json.loads((tmp_path / "trees.json").read_text())
    assert head == document["head"]
    for texts in document["acceptance"].values():
        for ranks in (ranks for edges in texts.values() for ranks in edges.values()):
            assert 0 <= ranks[0] <= ranks[1] <= ranks[2] <= 1
    assert head["acceptance"]["t1.0"] == document["acceptance"][acceptance.HELD_OUT]["t1.0"]["medium → full"][2]
    for kind, windows in document["simulated"].items():
        assert 1 < windows[str(DEFAULT_WINDOW)]["lines"] < head["simulated"][kind] < simulated.bounds(kind)["trees"]


async def _answer(prompt: str, params: SamplingParams, speculation: Speculation, handling: Handling) -> Completion:
    """The same text in every mode, but for the request that is asked to differ."""
    ids = tuple(range(params.max_tokens - (speculation.branches == 0 and params.temperature == 0.8)))
    return Completion("", ids, "length", 0, Stats(1, len(ids), ()))


def test_served_modes_are_compared() -> None:
    """Guards the figures of served trees, and their alarm: one mode that writes another text fails the run."""
    found = served.figures(asyncio.run(served.measure(_answer, served.Size(tokens=8, prompts=2))))
    assert {"t0.8_vs_lines", "t0.8_vs_alone", "t0_vs_lines"} == set(served.headline(found))
    assert [found[name]["same_text"] for name in ("t0", "t0.8")] == [True, False]
    assert not trees.lossless({"systems": {"library": found}})
    assert served.prepared(found) == {"t0": None, "t1.0": None}
    assert not served.branched(found)
    load = crowd.Size(tokens=8, warm_up=0, rounds=2, round_s=0.01, loads=(1, 3))
    crowded = crowd.figures(asyncio.run(crowd.measure(_answer, load)))
    assert trees.lossless(crowded)
    assert set(crowd.headline(crowded)) == set(map(cells.at, crowd.TEMPERATURES))
    assert crowded["t0"]["3"]["rounds"] == 2
    assert [trees.lossless({"a": one}) for one in ({"same_text": False}, {"b": {"c": 1}})] == [False, True]


@pytest.mark.slow
def test_drafters_are_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Guards `make bench-drafters` against kinds and modes that have changed: its last line names them all, and texts agree."""
    drafters.main(["--quick", "--results", str(tmp_path / "drafters.json"), "--picture", str(tmp_path / "drafters.svg")])
    out = capsys.readouterr()
    line = json.loads(out.out.splitlines()[-1])
    assert {*line["drafters"]} == {mode.name for mode in MODES[1:]}
    assert all(one["t0"]["speedup"] > 0 and one["t0"]["accepted_len"] >= 1 for one in line["drafters"].values())
    assert line["best"] in line["drafters"]
    assert json.loads((tmp_path / "drafters.json").read_text())["head"] == line
    assert (tmp_path / "drafters.svg").read_text().count("suffix + tiny") == 2


def cells_of(temperature: str) -> list[Cell]:
    """As a full run has them."""
    places = [(category, 1) for category in ("code", "tests", "data", "prose")] + [("all", 16)]
    made = [Cell(mode, category, load, 96, 1.5, 1) for mode in MODES for category, load in places]
    for cell in made:
        cell.edges.add([Edge("", "full", passes=40, emitted=96)])
    return made


def test_drafters_fit_into_a_window(tmp_path: Path) -> None:
    """Guards what is kept and what is shown: a full run's document is small, its tables are no wider than a window."""
    found = {name: cells_of(name) for name in map(cells.at, drafters.Plan().temperatures)}
    head = report.head(found)
    path = tmp_path / "drafters.json"
    drafters.write({"head": head, "cost": {}, "hardware": "", "cells": report.entries(found)}, path)
    document = json.loads(path.read_text())
    assert len(document["cells"]) == 3 * 6 * len(MODES)
    assert document["cells"][-1]["tokens_per_full_pass"] == 2.4
    assert path.stat().st_size < 100_000
    console = Console(width=drafters.WIDTH, file=io.StringIO())
    table = report.table("t0", found["t0"])
    assert console.measure(table).minimum <= drafters.WIDTH
    assert console.measure(table).maximum <= drafters.WIDTH


def test_loads_are_level() -> None:
    """Guards speeds of crowds: a client that is through asks on, and one request is all that each has."""
    running: list[int] = []

    async def ask(number: int) -> Completion:
        running.append(number)
        assert len(running) <= 3
        await asyncio.sleep(0.001 * (number % 3))
        running.remove(number)
        return Completion("", tuple(range(number + 1)), "length", 0, Stats(1, number + 1, ()))

    speed, answers = asyncio.run(cells.level_load(ask, 3, 0.05))
    assert sorted(answers) == [*range(len(answers))]
    assert 0 < speed * 0.05 <= sum(len(answer.token_ids) for answer in answers.values())


@pytest.mark.parametrize("kind", cost.KINDS)
def test_guesses_without_a_model_take_little_memory(kind: str) -> None:
    """Guards long contexts: at most 64 bytes a position."""
    assert (cost.measure(kind)["bytes_a_position"] or 0) <= 64


def test_rules_are_compared_fairly() -> None:
    """Guards the table of rules: all modes of one choice of tiers, and distributions that weigh what they hold."""
    for name, chain in rules.CHAINS.items():
        asked = [mode.speculation for mode in rules.modes(name, chain)]
        assert {one.tiers for one in asked} == {chain}
        assert [one.rule for one in asked].count("coupled") == 4
        assert all(sum(one == replace(other, branches=0) for one in asked) == 1 for other in asked if other.branches)
    assert rules.expected("ratio", [0.5, 0.5]) == 0.75
    assert rules.expected("block", [0.5, 0.5]) == 1.25
    assert rules.expected_of_tree([[0.5, 0.5], [0.5, 0.0]]) == 1.0
    given = rules.tokens_per_round(1.0, rules.BUILT_IN[:1], 12)
    assert 1 <= given["ratio"] < given["ratio trees"] <= 1 + rules.LOCKSTEP_WINDOW
    weights = list(rules.bytes_per_token(1.0, top_p=0.9).values())
    assert 1 < weights[0] < weights[1] <= weights[2]
