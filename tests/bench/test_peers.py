"""The benchmark against other engines: what it makes of what they say, and that who is not there is named."""

import json
import struct
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from benchmarks.peers import __main__ as peers
from benchmarks.peers import crew, environments, gguf_file, report
from benchmarks.peers.contract import Said, Setup
from benchmarks.peers.prompts import PROMPTS
from benchmarks.peers.report import Cell
from tests import small

ONE, EIGHT = Cell(0.0, 1), Cell(0.8, 8)


def said(speed: float, text: Sequence[int] = (1, 2, 3, 4)) -> Said:
    return Said(len(text) / speed, [text])


def test_the_median_round_counts_and_the_best_drafted_mode() -> None:
    """Guards against the mean, which one slow round spoils, and against a best of modes that were not measured."""
    spreads = {
        "cascade_alone": report.spread([said(100), said(10), said(110)]),
        "cascade_auto": report.spread([said(150), said(160), said(20)]),
        "cascade_drafter": report.spread([said(140), said(500), said(130)]),
        "vllm_ngram": report.spread([said(50)]),
        "generate": report.spread([said(90), said(80)]),
    }
    assert spreads["cascade_alone"] == {"low": 10.0, "median": 100.0, "high": 110.0}
    speeds, chosen = report.headline(spreads)
    assert speeds == {"cascade_alone": 100.0, "generate": 85.0, "cascade_best": 150.0, "vllm_best": 50.0}
    assert chosen == {"cascade_best": "cascade_auto", "vllm_best": "vllm_ngram"}


def test_the_document_has_the_asked_shape() -> None:
    """Guards those who read the last line: the embedded model at the top, others by name, one request and eight apart."""
    turns = {
        "cascade_alone": [said(100)],
        "cascade_auto": [said(200)],
        "generate": [said(50)],
        "vllm_alone": [said(70, (9, 2, 3, 4))],
    }
    found = report.figures({ONE: turns, EIGHT: turns})
    document = report.document({"embedded": found, "grown": found}, {"missing": {}})
    assert document == json.loads(json.dumps(document))
    assert document["tokens_per_second"] == {
        "t0": {"cascade_alone": 100.0, "generate": 50.0, "vllm_alone": 70.0, "cascade_best": 200.0}
    }
    assert document["grown"]["tokens_per_second"] == document["tokens_per_second"]
    assert set(document["at_once"]["8"]) == {"t0.8"}
    assert document["same_text_as_generate"] == {"t0": {"cascade_alone": 1.0, "cascade_auto": 1.0, "vllm_alone": 0.0}}
    assert document["cascade_lossless"] is True
    assert len(report.table("embedded", found).columns) == 3


def test_another_text_of_the_cascade_is_noticed() -> None:
    """Guards the first law where speed is measured: drafts that change a text are no speed-up."""
    assert not report.lossless({ONE: {"cascade_alone": [said(1)], "cascade_auto": [said(2, (1, 2, 3, 5))]}})


def test_rounds_take_turns_through_all_prompts() -> None:
    """Guards against a batch that always has the same texts, and one request that never has some."""
    plan = peers.Plan([[i] for i in range(len(PROMPTS))], 8, ())
    alone = [plan.turn("generate", ONE, number).prompts for number in range(plan.rounds(ONE))]
    assert sorted(prompt for prompts in alone for (prompt,) in prompts) == list(range(len(PROMPTS)))
    together = [plan.turn("generate", EIGHT, number).prompts for number in range(plan.rounds(EIGHT))]
    assert {len(prompts) for prompts in together} == {8}
    assert {prompt for prompts in together for (prompt,) in prompts} == set(range(len(PROMPTS)))


def test_a_peer_that_cannot_be_installed_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Guards against figures that nobody measured, and a run that ends where one peer is not to be had."""
    monkeypatch.setattr(environments.shutil, "which", lambda _: None)
    monkeypatch.setattr(environments, "FOLDER", tmp_path)
    monkeypatch.setattr(peers, "WORK", tmp_path)
    peers.interpreter.cache_clear()
    with ExitStack() as stack:
        run = peers.Run(small.paths(), peers.Plan([[1]], 4, ["llama_cpp_python"]), stack)
        assert run.measure(ONE) == {}
    assert set(run.missing) == {"llama_alone", "llama_draft"}
    assert "no C++ compiler" in run.missing["llama_alone"]


def test_a_worker_that_cannot_load_says_why(tmp_path: Path) -> None:
    """Guards against a peer whose reason is lost with its process."""
    setup = Setup("nobody", ("nobody_alone",), tuple(small.paths()), str(tmp_path))
    with pytest.raises(crew.WorkerFailed, match=r"ModuleNotFoundError.*nobody"):
        crew.Worker(setup, peers.interpreter(None), {})


def state(process: Path) -> str:
    return (process / "stat").read_text().rpartition(")")[2].split()[0]


def test_who_does_not_compute_is_stopped(tmp_path: Path) -> None:
    """Guards those who compute against threads that spin, and workers against being left behind stopped."""
    tiny = small.paths()[0]
    setup = Setup("huggingface", ("generate", "generate_assisted", "generate_lookup"), (tiny, tiny), str(tmp_path))
    with crew.Worker(setup, peers.interpreter(None), {"OMP_NUM_THREADS": "1"}) as worker:
        plan = peers.Plan([[50, 51, 52], [60, 61]], 4, ())
        said = {mode: worker.ask(plan.turn(mode, Cell(0.0, 2), 0)) for mode in setup.modes}
        process = Path("/proc") / str(worker._process.pid)
        while state(process) != "T":  # a signal takes a moment
            time.sleep(0.01)
        assert all(0 < one.processor_s <= worker.processor_s() for one in said.values())
        with pytest.raises(crew.WorkerFailed, match="KeyError"):
            worker.ask(plan.turn("nobody", ONE, 0))
    assert not process.exists()
    assert len({str(one.token_ids) for one in said.values()}) == 1
    assert [len(text) for text in said["generate"].token_ids] == [4, 4]


def rotated(x: torch.Tensor, position: int, neighbours: bool) -> torch.Tensor:
    """Rotary embedding of one head: of neighbours, as llama.cpp has it, or of halves, as Transformers has it."""
    half = len(x) // 2
    angle = position * 10000.0 ** (-torch.arange(half, dtype=torch.float64) / half)
    first, second = (x[0::2], x[1::2]) if neighbours else (x[:half], x[half:])
    turned = (first * angle.cos() - second * angle.sin(), second * angle.cos() + first * angle.sin())
    return torch.stack(turned, 1).flatten() if neighbours else torch.cat(turned)


def test_projections_are_permuted_for_the_other_rotation() -> None:
    """Guards GGUF files against heads in Transformers' order, whose text is fluent at first and wrong."""
    generator = torch.Generator().manual_seed(0)
    heads, size, width = 3, 8, 5
    weights = [torch.randn(heads * size, width, generator=generator) for _ in "qk"]
    x, y = torch.randn(2, width, generator=generator, dtype=torch.float64)

    def scores(neighbours: bool) -> list[float]:
        rows = [torch.from_numpy(gguf_file.permuted(w.numpy(), heads)) if neighbours else w for w in weights]
        q, k = (w.double() @ v for w, v in zip(rows, (x, y), strict=True))
        pairs = zip(q.split(size), k.split(size), strict=True)
        return [float(rotated(a, 7, neighbours) @ rotated(b, 3, neighbours)) for a, b in pairs]

    assert scores(True) == pytest.approx(scores(False))


def test_weights_are_read_exactly(tmp_path: Path) -> None:
    """Guards `same weights`: bfloat16 is widened bit by bit, and every tensor has a name in GGUF."""
    folder = Path(small.paths()[0])
    found = gguf_file.tensors(folder)
    expected = load_file(folder / "model.safetensors")
    assert set(found) == set(expected)
    for name, weight in expected.items():
        assert np.array_equal(found[name], weight.float().numpy())
    names = {gguf_file.tensor_name(name) for name in found}
    assert len(names) == len(found)
    assert {"token_embd.weight", "output_norm.weight", "blk.0.attn_q.weight", "blk.0.ffn_down.weight"} <= names
    header = json.dumps({"x": {"dtype": "F16", "shape": [1], "data_offsets": [0, 2]}}).encode()
    (tmp_path / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + b"\0\0")
    with pytest.raises(ValueError, match="F16"):
        gguf_file.tensors(tmp_path)
