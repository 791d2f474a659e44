"""A server whose full tier runs on vLLM, two draft tiers on our own engine: right texts, whichever replica dies."""

import contextlib
import os
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from ray import serve

from cascade import SamplingParams
from cascade.client import Client
from cascade.settings.config import CascadeConfig
from deployments.ops.launch import APPLICATION, Server
from tests import small
from tests.waiting import LONG_S, wait_until

pytest.importorskip("vllm")
# vLLM and what it imports warn of themselves
pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.timeout(900)]
PROMPTS = ("def read(path):\n", "import os\n\nclass Shape:\n", "for name in names:\n", "class Point:\n    def __init__")


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    values = small.config().model_dump(mode="json", exclude_unset=True)
    options = {"engine": "vllm", "dtype": "float32", "enforce_eager": True, "cache_tokens": 4096, "block_size": 32}
    values["tiers"][-1]["engine_kwargs"] = options
    with Server.start(CascadeConfig.parse(values), port=0) as server:
        yield server


def params(number: int) -> SamplingParams:
    return SamplingParams(max_tokens=80, temperature=(0.0, 0.8)[number % 2], seed=number, ignore_eos=True)


@pytest.fixture(scope="module")
def expected() -> list[str]:
    """What our own engine writes."""
    with small.cascade() as cascade:
        return [cascade.generate(PROMPTS[number % 4], params(number)).text for number in range(8)]


def replica(tier: str) -> int:
    """Process of a replica that answers."""
    found: list[int] = []

    def answers() -> bool:
        with contextlib.suppress(Exception):  # of any kind, while it is replaced
            handle = serve.get_deployment_handle(tier, APPLICATION)
            found.append(handle.describe.remote().result(timeout_s=LONG_S)["pid"])
        return bool(found)

    wait_until(answers)
    return found[0]


def test_the_engine_is_told(server: Server) -> None:
    """Guards people who look at what runs."""
    with Client(server.address, timeout=LONG_S) as client:
        assert [tier.engine for tier in client.describe().tiers] == ["cascade", "cascade", "vllm"]
        assert client.describe().tiers[-1].same_bits is False


def test_texts_are_those_of_our_own_engine(server: Server, expected: list[str]) -> None:
    """Guards the promise through the front door, eight requests at once."""
    with Client(server.address, timeout=LONG_S) as client, ThreadPoolExecutor(8) as threads:
        said = threads.map(lambda number: client.generate(PROMPTS[number % 4], params(number)).text, range(8))
        assert list(said) == expected


@pytest.mark.parametrize("victim", ["tiny", "full"])
def test_killed_replicas_cost_no_answer(server: Server, expected: list[str], victim: str) -> None:
    """Guards answers that a dying engine was writing: they go on at its successor, with the same text."""
    with Client(server.address, timeout=LONG_S) as client, ThreadPoolExecutor(8) as threads:
        pid = replica(victim)
        said = [threads.submit(lambda n=number: client.generate(PROMPTS[n % 4], params(n)).text) for number in range(8)]
        time.sleep(0.3)
        os.kill(pid, signal.SIGKILL)
        assert [one.result(LONG_S) for one in said] == expected
        assert replica(victim) != pid
