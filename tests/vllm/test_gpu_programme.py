"""The programme for a GPU runs on CPUs. Skipped where vLLM is not installed."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.vllm import models  # noqa: F401  # asks for vLLM

ROOT = Path(__file__).parents[2]
STEPS = ("graphs", "library", "invariant")

# vLLM and what it imports warn of themselves
pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.timeout(1200)]


def run(out: Path, *steps: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "benchmarks.gpu", *steps, "--small", "--out", str(out)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


def test_steps_run_on_cpus(tmp_path: Path) -> None:
    """Guards the minutes on a GPU: steps that no server takes part in start, find the same text with drafts, and are kept."""
    ended = run(tmp_path, *STEPS)
    assert ended.returncode == 0, ended.stdout
    found = json.loads((tmp_path / "programme.json").read_text())["found"]
    assert {*found} == {*STEPS}
    assert all(one["complete"] for one in found.values())
    texts = [found["graphs"]["models"]["tiny"]["text"], found["invariant"]["text"]]
    assert all(one["same"] == one["tokens"] for one in texts)
    assert found["invariant"]["same"] == found["invariant"]["rows"]
    assert all(found["library"][at]["same"] == found["library"][at]["texts"] for at in ("t0", "t0.8"))


def test_a_step_that_fails_says_why_and_the_next_begins(tmp_path: Path) -> None:
    """Guards all later steps against an early one: ``train`` finds no text, and ``own`` runs after it."""
    ended = run(tmp_path, "train", "own")
    assert ended.returncode == 1
    steps = json.loads((tmp_path / "programme.json").read_text())["steps"]
    assert "There is no text" in steps["train"]["problem"]
    assert steps["own"]["problem"] is None
