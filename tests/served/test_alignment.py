"""Drafters that learn while they serve, on the small models: texts stay, weights change, whoever is killed."""

import os
import signal
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from ray import serve

from benchmarks.document import titled
from cascade import Cascade, SamplingParams, Speculation
from cascade.client import Client
from cascade.params import Handling
from cascade.training.reservoir import Limits, Reservoir
from cascade.training.versions import Versions
from deployments.ops.launch import APPLICATION, Server
from tests.served.conftest import LEAST_LEARNT
from tests.waiting import wait_until

SWAPS = 3  # the first harms nobody, a replica dies in the second, the learner in the third


def ask(deployment: str, method: str) -> list[Any]:
    """What every replica answers; nothing while one cannot be asked."""
    try:
        return list(serve.get_deployment_handle(deployment, APPLICATION).broadcast(method).results(timeout_s=20))
    except Exception:  # it was killed
        return []


def wait_for_weights(version: str) -> None:
    """Until all replicas of the tiny tier have these weights."""
    wait_until(
        lambda: {weights.version for weights in ask("tiny", "weights")} == {version},
        lambda: f"replicas did not take the weights {version!r}",
        every_s=0.2,
    )


def prompt(number: int) -> str:
    return f"class Reader{number}:\n    def read(self, name{number}):\n"


def test_a_tier_learns_from_its_traffic(server: Server, reference: Cascade, folder: Path) -> None:
    """Guards the whole way from answers to weights that serve; and that nobody is learnt from who forbids it."""
    params = SamplingParams(max_tokens=48, temperature=0, ignore_eos=True)

    def answer(number: int) -> str:
        with Client(server.address) as client:
            if number >= LEAST_LEARNT:
                forbidden = Handling(cache_salt="mine") if number % 2 else Handling(train=False)
                return client.generate(prompt(number), params, handling=forbidden).text
            return client.generate(prompt(number), params).text

    with ThreadPoolExecutor(8) as threads:
        found = list(threads.map(answer, range(LEAST_LEARNT + 8)))
    assert found[:3] == [reference.generate(prompt(number), params, Speculation("off")).text for number in range(3)]
    ask("learner", "teach")
    wait_until(
        lambda: (said := ask("learner", "progress")) and said[0]["students"]["tiny"]["kept"],
        lambda: "nothing was learnt",
        every_s=0.2,
    )
    progress = ask("learner", "progress")[0]["students"]["tiny"]
    assert progress["after"] >= progress["before"] - 0.02
    wait_for_weights("000001")
    assert answer(0) == found[0]
    answers = Reservoir(Limits(), folder)  # as they are on disk
    kept = {sample.tokens[: sample.prompt_len] for sample in (*answers.newest, *answers.older)}
    prompts = [tuple(reference.tokenizer.encode(prompt(number))) for number in range(LEAST_LEARNT + 8)]
    assert [ids in kept for ids in prompts] == [True] * LEAST_LEARNT + [False] * 8


def test_swaps_under_load_change_nothing(server: Server, reference: Cascade, folder: Path) -> None:
    """Guards answers: swaps while clients stream, a replica and the learner killed meanwhile."""
    versions, params = Versions(folder / "tiny"), SamplingParams(max_tokens=300, temperature=0.9, seed=7, ignore_eos=True)
    wanted = reference.generate(prompt(0), params, Speculation("off")).text
    over, texts = threading.Event(), list[str]()

    def stream() -> None:
        with Client(server.address, patience_s=60) as client:
            while not over.is_set():
                chosen = Speculation(tiers=("tiny",))
                texts.append("".join(piece.text for piece in client.stream(prompt(0), params, chosen)))

    with ThreadPoolExecutor(2) as threads:
        clients = [threads.submit(stream) for _ in range(2)]
        try:
            for turn in range(SWAPS):
                versions.choose(versions.all[0] if turn % 2 else None)
                for kind in {1: ("tiny",), 2: ("learner",)}.get(turn, ()):
                    os.kill(titled(f"ray::ServeReplica:{APPLICATION}:{kind}")[0], signal.SIGKILL)
                wait_for_weights("000001" if turn % 2 else "")
        finally:
            over.set()
        for client in clients:
            client.result()
    assert len(texts) >= 2
    assert set(texts) == {wanted}
