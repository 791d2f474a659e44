"""Drafters that learn while they serve, on the small models: texts stay, weights change, whoever is killed."""

import os
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from ray import serve

from benchmarks.document import titled
from cascade import Cascade, SamplingParams, Speculation
from cascade.client import Client
from cascade.params import Handling
from cascade.training.alignment import Progress, Stopped
from cascade.training.reservoir import Reservoir, forget
from cascade.training.versions import Versions
from deployments.gateway.admission.access import ANONYMOUS
from deployments.ops import workers
from deployments.ops.launch import APPLICATION, Server
from tests.conftest import Cluster
from tests.served.conftest import LEAST_LEARNT
from tests.training.test_alignment import SIZE, lesson
from tests.waiting import wait_until

PARAMS = SamplingParams(max_tokens=300, temperature=0.9, seed=7, ignore_eos=True)


def ask(deployment: str, method: str) -> list[Any]:
    """What every replica answers; nothing while one cannot be asked."""
    try:
        return list(serve.get_deployment_handle(deployment, APPLICATION).broadcast(method).results(timeout_s=20))
    except Exception:  # it was killed
        return []


def wait_for_weights(version: str) -> None:
    wait_until(lambda: {weights.version for weights in ask("tiny", "weights")} == {version}, lambda: version, every_s=0.2)


def prompt(number: int) -> str:
    return f"class Reader{number}:\n    def read(self, name{number}):\n"


@contextmanager
def streaming(server: Server, reference: Cascade) -> Iterator[None]:
    """Two clients that stream the same answer all the time, which drafts of the tiny tier never change."""
    wanted = reference.generate(prompt(0), PARAMS, Speculation("off")).text
    over, texts = threading.Event(), list[str]()

    def stream() -> None:
        with Client(server.address, patience_s=60) as client:
            while not over.is_set():
                pieces = client.stream(prompt(0), PARAMS, Speculation(tiers=("tiny",)), Handling(train=False))
                texts.append("".join(piece.text for piece in pieces))

    with ThreadPoolExecutor(2) as threads:
        clients = [threads.submit(stream) for _ in range(2)]
        try:
            yield
        finally:
            over.set()
        for client in clients:
            client.result()
    assert set(texts) == {wanted}


def test_a_tier_learns_from_its_traffic(server: Server, reference: Cascade, folder: Path) -> None:
    """Guards the whole way from answers to weights that serve, and back under load; nobody is learnt from who forbids it."""
    params = SamplingParams(max_tokens=40, temperature=0, ignore_eos=True)

    def answer(number: int) -> str:
        handling = Handling()
        if number >= LEAST_LEARNT:
            handling = Handling(cache_salt="mine") if number % 2 else Handling(train=False)
        with Client(server.address) as client:
            return client.generate(prompt(number), params, handling=handling).text

    with ThreadPoolExecutor(8) as threads:
        texts = list(threads.map(answer, range(LEAST_LEARNT + 8)))
    assert texts[:3] == [reference.generate(prompt(number), params, Speculation("off")).text for number in range(3)]
    ask("learner", "teach")
    wait_until(lambda: (states := ask("learner", "progress")) and states[0]["students"]["tiny"]["kept"], every_s=0.2)
    progress = ask("learner", "progress")[0]["students"]["tiny"]
    assert (progress["kept"], progress["dropped"]) == (1, 0)
    assert progress["after"] >= progress["before"] - 0.02
    wait_for_weights("000001")
    versions = Versions(folder / "tiny")
    with streaming(server, reference):  # not before: on busy cores nothing would be learnt beside it
        versions.rollback()
        wait_for_weights("")
        versions.choose(versions.all[0])
        wait_for_weights("000001")
        versions.rollback()
        wait_for_weights("")
    answers = Reservoir(folder)  # as they are on disk
    kept = {sample.tokens[: sample.prompt_len] for sample in (*answers.newest, *answers.older)}
    prompts = [tuple(reference.tokenizer.encode(prompt(number))) for number in range(LEAST_LEARNT + 8)]
    assert [ids in kept for ids in prompts] == [True] * LEAST_LEARNT + [False] * 8
    forget(folder, ANONYMOUS)
    wait_until(lambda: (states := ask("learner", "progress")) and not states[0]["answers"], every_s=0.2)
    assert Reservoir(folder).newest == []


@pytest.mark.slow
def test_swaps_outlive_who_is_killed(server: Server, reference: Cascade, folder: Path) -> None:
    """Guards answers and swaps where a replica that gets new weights, and the learner, die meanwhile."""
    versions = Versions(folder / "tiny")
    with streaming(server, reference):
        for victim, version in (("tiny", versions.all[0]), ("learner", None)):
            versions.choose(version)
            os.kill(titled(f"ray::ServeReplica:{APPLICATION}:{victim}")[0], signal.SIGKILL)
            wait_for_weights("" if version is None else version.name)


OPTIONS = {"num_cpus": 0.5}


def stopping(progress: Progress) -> None:
    if progress.steps:
        raise Stopped


@pytest.mark.slow
def test_workers_publish_one_version_and_stop_when_told(cluster: Cluster, tmp_path: Path) -> None:
    """Guards learners that train on several devices: the outcome and a tenant's wish to be forgotten cross processes."""
    reports: list[Progress] = []
    outcome = workers.train(lesson(tmp_path / "tiny"), SIZE, OPTIONS, reports.append)
    assert outcome.steps > 0
    assert len(Versions(tmp_path / "tiny").all) == (not outcome.problem)
    assert {progress.student for progress in reports} == {"tiny"}
    with pytest.raises(Stopped):
        workers.train(replace(lesson(tmp_path / "stopped"), seconds=600.0), SIZE, OPTIONS, stopping)
    assert not (tmp_path / "stopped").exists()
