"""The programme for a GPU runs on CPUs."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.figures import tables
from benchmarks.gpu import engines, results
from benchmarks.gpu.step import STEPS, Notes
from cascade.engine.vllm.engine import CHOSEN

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
    """Guards the minutes on a GPU: three tiers on vLLM behind the server write the same text with drafts as without, and while
    replicas of them are killed."""
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
