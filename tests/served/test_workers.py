"""A round in processes that Ray Train starts: what they do together is in `tests/training/test_group.py`."""

from dataclasses import replace
from pathlib import Path

import pytest

from cascade.training.alignment import Progress, Stopped
from cascade.training.versions import Versions
from deployments.ops import workers
from tests.conftest import Cluster
from tests.training.test_group import SIZE, lesson

OPTIONS = {"num_cpus": 0.5}


def stopping(progress: Progress) -> None:
    if progress.steps:
        raise Stopped


@pytest.mark.slow
def test_workers_publish_one_version_and_stop_when_told(cluster: Cluster, tmp_path: Path) -> None:
    """Guards learners that train on several devices: the outcome and a tenant's wish to be forgotten cross processes."""
    told: list[Progress] = []
    outcome = workers.train(lesson(tmp_path / "tiny"), SIZE, OPTIONS, told.append)
    assert outcome.steps > 0
    assert len(Versions(tmp_path / "tiny").all) == (not outcome.problem)
    assert {progress.student for progress in told} == {"tiny"}
    with pytest.raises(Stopped):
        workers.train(replace(lesson(tmp_path / "stopped"), seconds=600.0), SIZE, OPTIONS, stopping)
    assert not (tmp_path / "stopped").exists()
