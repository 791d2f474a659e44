"""Processes that train together: they take the step of one process on all the texts, and end together."""

import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from datetime import timedelta
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from cascade.training.alignment import Lesson, Outcome, Progress, Stopped
from cascade.training.distillation import Learner, Schedule
from cascade.training.reservoir import Sample
from cascade.training.versions import Versions
from tests import small
from tests.waiting import LONG_S

SIZE = 2
ROWS = 8


def steps(rank: int, size: int) -> Tensor:
    """The weights of a linear module after three steps on the rows of this process."""
    torch.manual_seed(rank)  # it is the first one's weights that count
    module = nn.Linear(6, 4)
    learner = Learner(module, Schedule(muon_lr=0.0, adam_lr=0.1, warmup_steps=1), 0)
    rows = torch.randn(ROWS, 6, generator=torch.Generator().manual_seed(9))[rank::size]
    for step in range(3):
        learner.learn((module(rows) ** 2).mean(), step, 0.0)
    return module.weight.detach()


def lesson(folder: Path) -> Lesson:
    """A round of the small tiny model, all of whose answers may be judged by."""
    rng = np.random.default_rng(0)
    answers = [Sample(tuple(rng.integers(10, 400, 48).tolist()), 8, 0.0, "", 1, time.time()) for _ in range(96)]
    tiny, _, full = small.paths()
    return Lesson("tiny", full, tiny, (), answers, [], seconds=0.5, folder=folder)


def stopping(progress: Progress) -> None:
    if progress.steps == 2:
        raise Stopped


def joined(rank: int, folder: Path, work: Callable[[int, Path], Any]) -> Any:
    """What ``work`` finds in a process of the group."""
    torch.set_num_threads(1)
    bound = timedelta(seconds=LONG_S)
    dist.init_process_group("gloo", init_method=f"file://{folder / 'meeting'}", rank=rank, world_size=SIZE, timeout=bound)
    try:
        return work(rank, folder)
    finally:
        dist.destroy_process_group()


def in_group(folder: Path, work: Callable[[int, Path], Any]) -> list[Any]:
    """What each process of a group finds: this one, and another one."""
    with ProcessPoolExecutor(1, get_context("spawn")) as others:
        other = others.submit(joined, 1, folder, work)
        return [joined(0, folder, work), other.result()]


def three_steps(rank: int, folder: Path) -> Tensor:
    return steps(rank, SIZE)


def round_and_stop(rank: int, folder: Path) -> tuple[Outcome, bool]:
    """The outcome of a round, and whether another one stopped when the first process did."""
    outcome = lesson(folder / "tiny").run("cpu", lambda progress: None)
    try:
        replace(lesson(folder / "stopped"), seconds=60.0).run("cpu", stopping if rank == 0 else lambda progress: None)
    except Stopped:
        return outcome, True
    return outcome, False


def test_a_step_is_that_of_one_process_on_all_texts(tmp_path: Path, one_thread: None) -> None:
    """Guards what is learnt: processes that begin apart, or keep gradients to themselves, drift away from each other."""
    first, second = in_group(tmp_path, three_steps)
    assert torch.equal(first, second)
    assert torch.allclose(first, steps(0, 1), atol=1e-6)


@pytest.mark.slow
def test_all_judge_alike_one_publishes_and_all_stop_when_the_first_is_told_to(tmp_path: Path, one_thread: None) -> None:
    """Guards answers that are judged twice or by nobody, two versions of one round, and a process that waits for ever."""
    (first, *stopped), (second, *others) = in_group(tmp_path, round_and_stop)
    alone = lesson(tmp_path / "alone").run("cpu", lambda progress: None)
    assert (first.before, first.after, first.problem) == (second.before, second.after, second.problem)
    assert first.steps == second.steps > 0
    assert first.judged == alone.judged
    assert first.before == pytest.approx(alone.before)
    assert len(Versions(tmp_path / "tiny").all) == (not first.problem)
    assert (stopped, others) == ([True], [True])
    assert not (tmp_path / "stopped").exists()
