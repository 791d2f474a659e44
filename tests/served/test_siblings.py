"""Two routers and two full replicas, as Ray Serve runs them: what routers tell each other, and where prompts go."""

import time
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from cascade.client import Client
from cascade.errors import Overloaded
from cascade.params import Handling, SamplingParams
from cascade.settings.config import CascadeConfig
from deployments.ops.launch import Server
from tests.conftest import LONG_S, Cluster
from tests.served.test_serve import replicas

LONG = SamplingParams(max_tokens=400, temperature=1.0, seed=1, ignore_eos=True)
SHORT = SamplingParams(max_tokens=4, temperature=1.0, seed=1, ignore_eos=True)


@pytest.fixture(scope="module")
def server(cluster: Cluster) -> Iterator[Server]:
    """Toys, after two routers that share their ports; everybody together may have three answers at once."""
    device = {"pass_ms": {1: 10, 64: 15, 512: 80}, "agreement": []}
    full = {
        "name": "full",
        "model_loading_config": {"model_id": "toy-full", "model_source": "embedded:tiny"},
        "engine_kwargs": {"drafter": [], "num_threads": 1, "emulated": device, "cache_tokens": 4096},
        "deployment_config": {"num_replicas": 2, "ray_actor_options": {"num_cpus": 0, "num_gpus": 1}},
    }
    router = {
        "prefix_affinity": True,
        "deployment_config": {"num_replicas": 2},
        "access": {"default_limits": {"max_running": 3}},
    }
    with Server.start(CascadeConfig.parse({"tiers": [full], "router": router}), port=0, name="siblings") as server:
        yield server


def settled(server: Server) -> None:
    """Wait until no router knows of an answer."""
    deadline = time.monotonic() + LONG_S
    with Client(server.address) as client:
        while time.monotonic() < deadline:
            try:
                for _ in range(6):  # any router
                    client.generate(list(range(1, 9)), SHORT)
                return
            except Overloaded:
                time.sleep(0.2)
    pytest.fail("a limit counts answers that are over")


def test_routers_keep_a_limit_together(server: Server) -> None:
    """Guards a limit against the number of routers, whichever of them a connection meets; and that places come back."""
    with ExitStack() as stack:
        for number in range(3):
            stream = stack.enter_context(Client(server.address)).stream(list(range(1, 9)), LONG)
            next(stream)
            stack.callback(stream.close)
            time.sleep(1.0 if number == 2 else 0.0)  # until the others have heard
        refusals = 0
        for _ in range(8):
            with Client(server.address, patience_s=0) as client, pytest.raises(Overloaded, match="may have 3 answers"):
                client.generate(list(range(1, 9)), SHORT)
            refusals += 1
        assert refusals == 8
    settled(server)


def reuse() -> tuple[int, int]:
    """Tokens with which sessions came to both full replicas, and those of them that were reused."""
    states = replicas("full", "siblings").values()
    assert len(states) == 2
    return sum(one["asked"] for one in states), sum(one["reused"] for one in states)


def test_prompts_that_begin_alike_are_read_once(server: Server) -> None:
    """Guards the preference for a replica on its whole way: the router, Serve's router, what replicas say of themselves."""
    before = reuse()
    with Client(server.address) as client:
        for number in range(16):
            prompt = [*range(1000, 1160), number]
            client.generate(prompt, SHORT)
            client.generate(prompt, SHORT, handling=Handling(cache_salt=f"tenant {number}"))
    asked, reused = (now - then for now, then in zip(reuse(), before, strict=True))
    assert asked == 32 * 161
    assert reused >= 12 * 160
