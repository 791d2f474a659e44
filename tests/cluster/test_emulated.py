"""A cascade on emulated devices, served on GPUs that are not there: the benchmark's, through the real gRPC door."""

import asyncio
import time
from collections.abc import Iterator
from dataclasses import replace

import pytest
import ray

from benchmarks.cluster.crowd import AUTO, THREE, crowd
from benchmarks.cluster.devices import Asked, Setup, simulated
from benchmarks.cluster.one import ALONE, PAIRS
from cascade import InvalidRequest, SamplingParams, Speculation
from cascade.bench.measure import Mode
from cascade.client import AsyncClient, Client
from deployments.ops.launch import Server
from tests.conftest import FAKE_GPUS, Cluster

SETUP = Setup(stretch=1.0, replicas=(1, 1, 2))
PROMPT = list(range(20, 60))
PARAMS = SamplingParams(max_tokens=48, temperature=0, ignore_eos=True)
LOCKSTEP = Mode("lockstep", Speculation(tiers=("medium",), window=4, schedule="lockstep"))


@pytest.fixture(scope="module")
def server(cluster: Cluster) -> Iterator[Server]:
    """Three tiers of toys, each replica with a device, of whose full one there are two."""
    with Server.start(SETUP.config, port=0) as server:
        yield server


def test_every_mode_writes_what_the_toy_writes_alone(server: Server) -> None:
    """Guards figures against wrong texts: leases, links, sessions and trees lose, repeat and mistake no token."""
    prompts = [PROMPT, PROMPT[5:]]
    expected = simulated(SETUP.tiers(), Asked(prompts, PARAMS), ALONE.speculation, warm_up=1).texts
    with Client(server.address) as client:
        for mode in (ALONE, *PAIRS, LOCKSTEP, THREE, AUTO):
            for seed, prompt in enumerate(prompts):
                found = client.generate(prompt, replace(PARAMS, seed=seed), mode.speculation)
                assert found.token_ids == expected[seed], mode.name


def test_each_replica_holds_its_device(server: Server) -> None:
    """Guards a device for each replica: Ray has given away as many GPUs as there are replicas."""
    with Client(server.address) as client:
        tiers = client.describe().tiers
    assert [tier.replicas for tier in tiers] == [1, 1, 2]
    assert {(tier.device, tier.dtype) for tier in tiers} == {("emulated", "toy")}
    assert ray.available_resources().get("GPU", 0) == FAKE_GPUS - 4


def test_passes_are_not_sooner_than_the_device(server: Server) -> None:
    """Guards the table in a real replica: an answer alone takes a pass of the device for each token at least."""
    begin = time.monotonic()
    with Client(server.address) as client:
        client.generate(PROMPT, replace(PARAMS, max_tokens=12, seed=0), Speculation("off"))
    assert time.monotonic() - begin >= 12 * SETUP.full_pass_s


def test_clients_that_come_and_go_get_exact_texts(server: Server) -> None:
    """Guards the crowd of the benchmark: many at once on several replicas, broken off in the middle."""

    async def together() -> bool:
        async with AsyncClient(server.address) as client:
            clients = crowd(client, THREE, 40, SETUP, [PROMPT, PROMPT[5:]])
            clients.grow(8)
            await clients.rate(1.0)
            await clients.stop(2)
            await clients.rate(0.3)
            await clients.stop()
        return clients.exact and clients.tokens > 0

    assert asyncio.run(together())


def test_what_toys_do_not_honour_is_refused(server: Server) -> None:
    """Guards against penalties and biases that a toy would ignore without a word."""
    with Client(server.address) as client, pytest.raises(InvalidRequest, match="honours temperature and the filters"):
        client.generate(PROMPT, replace(PARAMS, seed=0, presence_penalty=1.0))
