"""Processes that train a drafter together, each on its own device; Ray Train starts and connects them."""

import os
import shutil
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor, wait
from functools import partial
from typing import Any

import ray
from ray.actor import ActorHandle
from ray.train import FailureConfig, RunConfig, ScalingConfig, WorkerGroupError
from ray.train.torch import TorchConfig, TorchTrainer, get_device

from cascade.errors import CascadeError
from cascade.training.alignment import Lesson, Outcome, Progress, Stopped

LOWEST = 19  # niceness of training processes, so that serving comes first
POLL_S = 0.5  # seconds between two checks of their progress
FOLDER = ".rounds"  # for Ray Train's own files, in the folder of the weights, which all workers share


@ray.remote(num_cpus=0)
class Board:
    """Progress of the first worker, and the signal for it to stop."""

    def __init__(self, student: str) -> None:
        self._progress, self._stopped = Progress(student, 0.0, 0), False

    def write(self, progress: Progress) -> bool:
        """Report the progress; returns whether the round shall stop."""
        self._progress = progress
        return self._stopped

    def read(self) -> Progress:
        return self._progress

    def stop(self) -> None:
        self._stopped = True


def train(lesson: Lesson, num_workers: int, options: Mapping[str, Any], tell: Callable[[Progress], object]) -> Outcome:
    """Run a round in processes with these ``ray_actor_options`` each. ``tell`` is called in this one.

    Raises the errors of `Lesson.run`, and `ray.train.TrainingFailedError` if a process dies or there are no resources.
    """
    board, folder = Board.remote(lesson.student), lesson.folder.parent / FOLDER  # type: ignore[attr-defined]  # by Ray
    num_gpus = options.get("num_gpus", 0)
    resources = {"CPU": options.get("num_cpus", 1), "GPU": num_gpus} | options.get("resources", {})
    trainer = TorchTrainer(
        partial(_work, ray.put(lesson), board),
        torch_config=TorchConfig(backend="cpu:gloo,cuda:nccl" if num_gpus else "gloo"),
        scaling_config=ScalingConfig(num_workers=num_workers, use_gpu=bool(num_gpus), resources_per_worker=resources),
        run_config=RunConfig(
            name=lesson.student,
            storage_path=str(folder),
            failure_config=FailureConfig(controller_failure_limit=0),
            worker_runtime_env=options.get("runtime_env"),
        ),
    )
    try:
        with ThreadPoolExecutor(1) as thread:
            fitted = thread.submit(trainer.fit)
            while not fitted.done():
                try:
                    tell(ray.get(board.read.remote()))
                except Stopped:
                    board.stop.remote()
                wait([fitted], timeout=POLL_S)
        outcome: Outcome = fitted.result().return_value
        return outcome
    except WorkerGroupError as error:
        for failure in error.worker_failures.values():
            if isinstance(failure, CascadeError | Stopped):
                raise failure from None
        raise
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _work(lesson: "ray.ObjectRef[Lesson]", board: ActorHandle) -> Outcome:
    os.nice(LOWEST)

    def tell(progress: Progress) -> None:
        if ray.get(board.write.remote(progress)):
            raise Stopped

    return ray.get(lesson).run(str(get_device()), tell)
