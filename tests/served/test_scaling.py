"""Ray Serve scales a draft tier, of some of the full model's layers, by its sessions: leases are what it counts."""

from copy import deepcopy

from ray import serve

from cascade import SamplingParams, Speculation
from cascade.client import Client
from cascade.settings.config import CascadeConfig
from deployments.ops.launch import Server
from tests import small
from tests.conftest import Cluster
from tests.served.test_serve import PROMPT
from tests.waiting import wait_until

APPLICATION = "scaled"
QUICK = {"upscale_delay_s": 0, "downscale_delay_s": 2, "metrics_interval_s": 0.5, "look_back_period_s": 2}
PARAMS = SamplingParams(max_tokens=48, temperature=0.8, seed=3, ignore_eos=True)


def num_replicas() -> int:
    """Of tiny, those that serve."""
    states = serve.status().applications[APPLICATION].deployments["tiny"].replica_states
    return sum(count for state, count in states.items() if state == "RUNNING")


def test_a_draft_tier_comes_when_it_is_asked_for_and_goes_when_it_is_not(cluster: Cluster) -> None:
    """Guards scaling to zero, and a tier of the model's own layers in a process of its own: no answer waits or changes."""
    values = small.config().model_dump(mode="json")
    full = values["tiers"][-1]
    part = deepcopy(full) | {"name": "tiny"}
    part["engine_kwargs"]["layers"] = ["0-3", 5]
    scaled = {"min_replicas": 0, "max_replicas": 1, "target_ongoing_requests": 4, **QUICK}
    part["deployment_config"] |= {"num_replicas": None, "autoscaling_config": scaled}
    config = CascadeConfig.parse({**values, "tiers": [part, full]})
    with Server.start(config, port=0, name=APPLICATION) as server, Client(server.address) as client:
        assert num_replicas() == 0
        alone = client.generate(PROMPT, PARAMS, Speculation("off"))

        def drafted() -> bool:
            answer = client.generate(PROMPT, PARAMS, Speculation(tiers=("tiny",)))
            assert answer.token_ids == alone.token_ids
            return any(edge.drafter == "tiny" and edge.accepted for edge in answer.stats.edges)

        assert not drafted()
        wait_until(drafted, serve.status)
        assert num_replicas() == 1
        wait_until(lambda: not num_replicas(), serve.status)
