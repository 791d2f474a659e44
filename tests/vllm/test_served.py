"""A server whose full tier runs on vLLM with a head, two draft tiers on our own engine: right texts, whichever replica dies."""

import contextlib
import os
import signal
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from ray import serve

from cascade import SamplingParams, Speculation
from cascade.client import Client
from cascade.settings.config import CascadeConfig
from deployments.ops.launch import APPLICATION, Server
from tests import small
from tests.waiting import LONG_S, wait_until

pytestmark = pytest.mark.timeout(900)
PROMPTS = ("def read(path):\n", "import os\n\nclass Shape:\n", "for name in names:\n", "class Point:\n    def __init__")


def params(number: int) -> SamplingParams:
    return SamplingParams(max_tokens=80, temperature=(0.0, 0.8)[number % 2], seed=number, ignore_eos=True)


def replica() -> int:
    """Process of the full tier's replica, when it answers."""
    found: list[int] = []

    def answers() -> bool:
        with contextlib.suppress(Exception):  # of any kind, while it is replaced
            found.append(serve.get_deployment_handle("full", APPLICATION).describe.remote().result(timeout_s=LONG_S)["pid"])
        return bool(found)

    wait_until(answers)
    return found[0]


def test_a_killed_replica_costs_no_answer() -> None:
    """Guards the promise through the front door: eight requests at once get the texts of our own engine, the engine that was
    writing them dies, and its successor goes on, however long it takes to start."""
    with small.cascade() as cascade:
        expected = [cascade.generate(PROMPTS[number % 4], params(number)).text for number in range(8)]
    values = small.config().model_dump(mode="json", exclude_unset=True)
    options = {"engine": "vllm", "dtype": "float32", "enforce_eager": True, "cache_tokens": 4096, "block_size": 32}
    drafters = ["suffix", {"kind": "eagle3", "source": small.head()}]
    values["tiers"][-1]["engine_kwargs"] = {**options, "drafter": drafters}
    with (
        Server.start(CascadeConfig.parse(values), port=0) as server,
        Client(server.address) as client,
        ThreadPoolExecutor(8) as threads,
    ):
        assert [tier.engine for tier in client.describe().tiers] == ["cascade", "cascade", "vllm"]
        assert client.describe().tiers[-1].same_bits is False
        guessed = client.generate(PROMPTS[0], params(0), Speculation(tiers=("eagle3",)))
        assert guessed.text == expected[0]
        assert sum(edge.accepted for edge in guessed.stats.edges if edge.drafter == "eagle3")
        pid, begun = replica(), threading.Event()

        def ask(number: int) -> str:
            text = ""
            for piece in client.stream(PROMPTS[number % 4], params(number)):
                begun.set()
                text += piece.text
            return text

        said = [threads.submit(ask, number) for number in range(8)]
        assert begun.wait(LONG_S)
        os.kill(pid, signal.SIGKILL)
        assert [one.result() for one in said] == expected
        assert replica() != pid
