"""The programme for a GPU runs on CPUs, and models that it inflates say what they said before."""

import json
import subprocess
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from benchmarks.figures import tables
from benchmarks.gpu import engines, inflate, results
from benchmarks.gpu.step import STEPS, Notes
from benchmarks.vllm import written
from cascade.engine.vllm.engine import CHOSEN
from tests.architectures import VOCAB, build
from tests.vllm.models import started

ROOT = Path(__file__).parents[2]

pytestmark = pytest.mark.timeout(1200)


def run(out: Path, *steps: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "benchmarks.gpu", *steps, "--small", "--out", str(out)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


def ended(name: str, folder: Path) -> dict[str, Any]:
    """What a step found in this process, which has imported vLLM already."""
    getattr(engines, name)(Notes(folder, name, small=True))
    found: dict[str, Any] = json.loads((folder / f"{name}.json").read_text())
    return found


@pytest.mark.parametrize("name", ["graphs", "invariant", "library"])
def test_steps_run_on_cpus(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards the minutes on a GPU: steps that no server takes part in start, find the same text with drafts, and are kept."""
    if name == "library":
        monkeypatch.setitem(CHOSEN, "enforce_eager", True)  # compiling takes minutes
    found = ended(name, tmp_path)
    if name == "library":
        assert all(found[at]["same"] == found[at]["texts"] for at in ("t0", "t0.8"))
        return
    text = found["text"] if name == "invariant" else found["models"]["tiny"]["text"]
    assert text["same"] == text["tokens"]
    if name == "invariant":
        assert found["same"] == found["rows"]


def test_steps_with_servers_run_on_cpus(tmp_path: Path) -> None:
    """Guards the minutes on a GPU: servers on vLLM write the same text with drafts, and while replicas are killed."""
    steps = run(tmp_path, "server", "kill")
    assert steps.returncode == 0, steps.stdout
    served, killed = (json.loads((tmp_path / f"{name}.json").read_text()) for name in ("server", "kill"))
    loads = [load["alike"] for load in served.values() if isinstance(load, dict)]
    assert len(loads) == 4
    assert all(mode["same"] == mode["texts"] > 0 for load in loads for mode in load.values())
    assert all(killed[tier]["same"] == killed[tier]["texts"] > 0 for tier in ("medium", "full"))


def test_a_step_that_fails_says_why_and_the_next_begins(tmp_path: Path) -> None:
    """Guards all later steps against an early one: ``train`` finds no text, and ``own`` runs after it."""
    assert run(tmp_path, "train", "own").returncode == 1
    steps = json.loads((tmp_path / "programme.json").read_text())["steps"]
    assert "There is no text" in steps["train"]["problem"]
    assert steps["own"]["problem"] is None


@pytest.mark.slow
@pytest.mark.timeout(9000)
def test_the_whole_programme_runs_on_cpus(tmp_path: Path) -> None:
    """Guards the steps with servers and training, too, and the way of their figures into README and docs."""
    whole = run(tmp_path)
    assert whole.returncode == 0, whole.stdout
    programme = json.loads((tmp_path / "programme.json").read_text())
    assert {*programme["found"]} == {step.name for step in STEPS}
    document = results.document(programme)
    assert not document["problems"]
    assert tables.accelerated(document)
    assert tables.one_gpu(document)
    answers = [cell for step in document["served"].values() for cells in step.values() for cell in cells.values()]
    assert all(not cell["failed"] and cell.get("same") == cell.get("texts") for cell in answers)
    with pytest.raises(SystemExit, match="figures of a processor"):
        results.main([str(tmp_path)])


SMALL = {"hidden_size": 64, "head_dim": 32, "intermediate_size": 96, "tie_word_embeddings": True}
LARGE = inflate.Shape(hidden=192, layers=4, heads=12, kv_heads=3, inner=224)


def test_an_inflated_model_writes_what_its_source_writes(tmp_path: Path) -> None:
    """Guards figures of large models: with a head, a norm or a dead column in the wrong place they are of another text."""
    network = build("llama", **SMALL)
    network.config.architectures = [type(network).__name__]
    network.save_pretrained(source := tmp_path / "source")
    inflate.register()
    folder = inflate.write(str(source), LARGE, tmp_path / "inflated")
    with closing(started(str(source))) as small, closing(started(folder, load_format=inflate.FORMAT)) as large:
        assert large.num_parameters > 3 * small.num_parameters
        for first in range(4):
            prompt = [(first + 7 * place) % VOCAB for place in range(12)]
            assert written(small, prompt, 40) == written(large, prompt, 40)


def test_a_source_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    """Guards against a live block that is cut off without a word."""
    build("llama", **SMALL).save_pretrained(tmp_path / "source")
    with pytest.raises(ValueError, match="fits into"):
        inflate.write(str(tmp_path / "source"), inflate.Shape(192, 1, 12, 3, 224), tmp_path / "inflated")
