"""Ray Serve scales a draft tier by its sessions: leases are what it counts."""

from collections.abc import Iterator

import pytest
from ray import serve

from benchmarks.cluster.devices import Setup
from cascade import SamplingParams, Speculation
from cascade.client import Client
from cascade.messages import SessionSpec
from cascade.settings.config import CascadeConfig
from cascade.simulation.toy import full_text
from deployments.ops.launch import Server
from tests.conftest import Cluster
from tests.waiting import wait_until

APPLICATION = "scaled"
QUICK = {"upscale_delay_s": 0, "downscale_delay_s": 2, "metrics_interval_s": 0.5, "look_back_period_s": 2}
PROMPT = list(range(20, 60))
PARAMS = SamplingParams(max_tokens=48, temperature=0.8, seed=3, ignore_eos=True)


@pytest.fixture(scope="module")
def server(cluster: Cluster) -> Iterator[Server]:
    """A drafter that may have no replica, and begins so."""
    values = Setup(stretch=1.0).values
    del values["tiers"][1]
    tiny = values["tiers"][0]["deployment_config"]
    del tiny["num_replicas"]
    tiny["autoscaling_config"] = {"min_replicas": 0, "max_replicas": 1, "target_ongoing_requests": 4, **QUICK}
    with Server.start(CascadeConfig.parse(values), port=0, name=APPLICATION) as server:
        yield server


def num_replicas() -> int:
    """Of tiny, those that serve."""
    states = serve.status().applications[APPLICATION].deployments["tiny"].replica_states
    return sum(count for state, count in states.items() if state == "RUNNING")


def test_a_draft_tier_comes_when_it_is_asked_for_and_goes_when_it_is_not(server: Server) -> None:
    """Guards scaling to zero: no answer waits for a tier without replicas or changes, and no GPU is held for nobody."""
    assert num_replicas() == 0
    *_, full = Setup().models()
    expected = full_text(full, SessionSpec(tuple(PROMPT), len(PROMPT), PARAMS))[len(PROMPT) :]
    with Client(server.address) as client:

        def drafted() -> bool:
            answer = client.generate(PROMPT, PARAMS, Speculation(tiers=("tiny",)))
            assert list(answer.token_ids) == expected
            return any(edge.drafter == "tiny" and edge.accepted for edge in answer.stats.edges)

        assert not drafted()
        wait_until(drafted, serve.status)
    assert num_replicas() == 1
    wait_until(lambda: not num_replicas(), serve.status)
