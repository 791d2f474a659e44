"""`cascade align`, `rollback` and `forget`: what an operator does with drafters that learn."""

import time
from pathlib import Path

import numpy as np

from cascade.training.reservoir import Limits, Reservoir, Sample
from cascade.training.versions import Versions
from tests.cli import run


def kept(folder: Path, count: int) -> Reservoir:
    """Answers on disk, of alice and bob."""
    answers, chance = Reservoir(Limits(), folder), np.random.default_rng(0)
    answers.add(
        Sample(tuple(chance.integers(10, 400, 32).tolist()), 8, 0.0, ("alice", "bob")[number % 2], 0, time.time())
        for number in range(count)
    )
    answers.save()
    return answers


def test_a_round_without_a_server(tmp_path: Path, small_demo: None) -> None:
    """Guards the command: it says what came of the round, and weights that are kept are the latest."""
    kept(tmp_path, 200)
    code, output = run("align", "--from", tmp_path, "--tier", "tiny", "--seconds", "0.5", "--device", "cpu")
    assert code == 0, output
    assert "tiny agreed on" in output
    current = Versions(tmp_path / "tiny").current
    assert (current is not None) == ("Its latest weights" in output.replace("\n", " "))
    if current is not None:
        assert {"config.json", "model.safetensors", "alignment.json"} <= {file.name for file in current.iterdir()}


def test_what_cannot_be_taught_is_one_sentence(tmp_path: Path, small_demo: None) -> None:
    """Guards operators against tracebacks: no answers, too few, a tier that is not there, nothing to go back to."""
    for arguments, words in (
        (("align", "--from", tmp_path, "--tier", "tiny"), "There are no answers"),
        (("align", "--from", tmp_path, "--tier", "other"), "it takes tiny"),
        (("rollback", "tiny", "--folder", tmp_path), "never learnt there"),
    ):
        code, output = run(*arguments)
        assert (code, words in " ".join(output.split())) == (1, True), output
    kept(tmp_path, 8)
    assert "too few" in run("align", "--from", tmp_path, "--tier", "tiny", "--seconds", "0.1", "--device", "cpu")[1]


def test_a_tenant_is_forgotten_without_a_server(tmp_path: Path) -> None:
    """Guards the disk: answers of one tenant are gone when the command returns, those of others stay."""
    kept(tmp_path, 20)
    assert run("forget", "alice", "--folder", tmp_path)[0] == 0
    assert [one.tenant for one in Reservoir(Limits(), tmp_path).newest] == ["bob"] * 10


def test_rollback_tells_where_it_goes(tmp_path: Path) -> None:
    """Guards what an operator reads: the version that serves from now on, or what the drafter began with."""
    versions = Versions(tmp_path / "tiny")
    for _ in range(2):
        versions.choose(versions.add(lambda folder: None))
    for words in ("000001", "the weights that it began with"):
        assert words in " ".join(run("rollback", "tiny", "--folder", tmp_path)[1].split())
