"""Drafters that learn while they serve, on the small models: texts stay, weights change, whoever is killed."""

import gzip
import json
import os
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from ray import serve

from benchmarks.document import titled
from cascade import Cascade, SamplingParams, Speculation
from cascade.client import Client
from cascade.params import Handling
from cascade.settings.config import CascadeConfig
from cascade.training import reservoir
from cascade.training.versions import Versions
from deployments.ops.launch import Server
from tests import small
from tests.conftest import Cluster
from tests.waiting import wait_until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]  # by default tests/ops/test_learner.py, without Ray

NAME = "aligned"
ANSWERS = 72
SWAPS = 8


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("alignment")


@pytest.fixture(scope="module")
def aligned(cluster: Cluster, folder: Path) -> Iterator[Server]:
    """Two tiers, of which the tiny one, of two replicas, learns as soon as there is anything to learn from."""
    values = small.config().model_dump(mode="json")
    del values["tiers"][1]
    values["tiers"][0]["deployment_config"]["num_replicas"] = 2
    learning = {"students": ["tiny"], "min_rows": ANSWERS, "every_s": 0.0, "round_s": 3.0, "canary_s": 0.0}
    values["alignment"] = {"folder": str(folder), "on_disk": True, "device": "cpu", **learning}
    values["alignment"]["ray_actor_options"] = {"num_cpus": 0.5}
    with Server.start(CascadeConfig.parse(values), port=0, name=NAME) as server:
        yield server


def ask(deployment: str, method: str) -> list[Any]:
    """What every replica says; nothing while one cannot be asked."""
    try:
        return list(serve.get_deployment_handle(deployment, NAME).broadcast(method).results(timeout_s=20))
    except Exception:  # it was killed
        return []


def prompt(number: int) -> str:
    return f"class Reader{number}:\n    def read(self, name{number}):\n"


def rows(folder: Path) -> list[reservoir.Sample]:
    """Those on disk."""
    lines = gzip.decompress((folder / reservoir.ROWS).read_bytes()).decode().splitlines()
    return [reservoir.Sample(**json.loads(line) | {"tokens": tuple(json.loads(line)["tokens"])}) for line in lines]


def test_a_tier_learns_from_its_traffic(aligned: Server, reference: Cascade, folder: Path) -> None:
    """Guards the whole way from answers to weights that serve; and that nobody is learnt from who forbids it."""
    params = SamplingParams(max_tokens=48, temperature=0, ignore_eos=True)

    def answer(number: int) -> str:
        with Client(aligned.address) as client:
            if number >= ANSWERS:
                forbidden = Handling(cache_salt="mine") if number % 2 else Handling(train=False)
                return client.generate(prompt(number), params, handling=forbidden).text
            return client.generate(prompt(number), params).text

    with ThreadPoolExecutor(8) as threads:
        found = list(threads.map(answer, range(ANSWERS + 8)))
    assert found[:3] == [reference.generate(prompt(number), params, Speculation("off")).text for number in range(3)]
    wait_until(
        lambda: (said := ask("learner", "progress")) and said[0]["students"]["tiny"]["kept"],
        lambda: "nothing was learnt",
        every_s=0.2,
    )
    progress = ask("learner", "progress")[0]["students"]["tiny"]
    assert progress["after"] >= progress["before"] - 0.02
    wait_until(
        lambda: {one.version for one in ask("tiny", "weights")} == {"000001"},
        lambda: "replicas did not take the weights",
        every_s=0.2,
    )
    assert answer(0) == found[0]
    kept = {one.tokens[: one.prompt_len] for one in rows(folder)}
    prompts = [tuple(reference.tokenizer.encode(prompt(number))) for number in range(ANSWERS + 8)]
    assert [one in kept for one in prompts] == [True] * ANSWERS + [False] * 8


def test_swaps_under_load_change_nothing(aligned: Server, reference: Cascade, folder: Path) -> None:
    """Guards answers: swaps while clients stream, a replica and the learner killed meanwhile."""
    versions, params = Versions(folder / "tiny"), SamplingParams(max_tokens=300, temperature=0.9, seed=7, ignore_eos=True)
    wanted = reference.generate(prompt(0), params, Speculation("off")).text
    over, texts = threading.Event(), list[str]()

    def stream() -> None:
        with Client(aligned.address, patience_s=60) as client:
            while not over.is_set():
                chosen = Speculation(tiers=("tiny",))
                texts.append("".join(piece.text for piece in client.stream(prompt(0), params, chosen)))

    with ThreadPoolExecutor(2) as threads:
        clients = [threads.submit(stream) for _ in range(2)]
        try:
            for turn in range(SWAPS):
                versions.choose(versions.all[0] if turn % 2 else None)
                if turn in (3, 5):
                    kind = "tiny" if turn == 3 else "learner"
                    os.kill(titled(f"ray::ServeReplica:{NAME}:{kind}")[0], signal.SIGKILL)
                label = "000001" if turn % 2 else ""
                wait_until(
                    lambda label=label: len(said := ask("tiny", "weights")) == 2 and {one.version for one in said} == {label},
                    lambda turn=turn: f"swap {turn} did not come",
                    every_s=0.2,
                )
        finally:
            over.set()
        for client in clients:
            client.result()
    assert len(texts) >= 2
    assert set(texts) == {wanted}
