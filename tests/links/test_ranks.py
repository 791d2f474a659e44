"""A served tier whose model is shared among ranks, in Ray Serve."""

import os
import signal
import time
from typing import Any

import pytest
from ray import serve

from cascade import ConfigError, SamplingParams, Speculation
from cascade.client import Client
from cascade.settings.config import CascadeConfig
from deployments.app import build, tier_options
from deployments.launch.server import APPLICATION
from tests import small
from tests.conftest import LONG_S
from tests.links.conftest import Secure

PROMPT = "def read(path):\n    with open(path) as file:\n"
PARAMS = SamplingParams(max_tokens=32, temperature=0)


def config(ranks: int, **engine: Any) -> dict[str, Any]:
    """Tiny alone, full shared."""
    values = small.config().model_dump(mode="json")
    del values["tiers"][1]
    values["tiers"][-1]["engine_kwargs"] |= {"tensor_parallel_size": ranks, **engine}
    return values


def describe() -> dict[str, Any]:
    state: dict[str, Any] = serve.get_deployment_handle("full", APPLICATION).describe.remote().result(timeout_s=LONG_S)
    return state


def expected() -> tuple[int, ...]:
    with small.cascade() as cascade:
        return cascade.generate(PROMPT, PARAMS, Speculation("off")).token_ids


def lookups_draft(client: Client, text: tuple[int, ...]) -> None:
    """A drafter inside tiers changes no text, and is seen where it took part."""
    assert client.describe().drafters == ("lookup",)
    for tiers in (("lookup",), ("lookup", "tiny")):
        completion = client.generate(PROMPT, PARAMS, Speculation(tiers=tiers))
        assert completion.token_ids == text
        assert sum(edge.accepted for edge in completion.stats.edges if edge.drafter == "lookup")


def test_a_shared_tier_serves_and_outlives_a_rank(secure: Secure) -> None:
    """Guards the promise with a model in pieces, and the restart of a replica that lost one of them; and `drafters` of a
    configuration, in one replica and beside it."""
    text = expected()
    with secure.client() as client:
        assert client.generate(PROMPT, PARAMS).token_ids == text
        lookups_draft(client, text)
        info = client.describe().tiers[-1]
        assert info.pass_cost[0][0] == 1
        assert all(seconds > 0 for _, seconds in info.pass_cost)
        before = describe()
        assert len(before["rank_pids"]) == 1
        assert [os.sched_getaffinity(pid) for pid in (before["pid"], *before["rank_pids"])] == [{0}, {0}]
        os.kill(before["rank_pids"][0], signal.SIGKILL)
        assert client.generate(PROMPT, PARAMS).token_ids == text
        deadline = time.monotonic() + LONG_S
        while describe()["pid"] == before["pid"]:
            assert time.monotonic() < deadline, "the replica that lost a rank was not replaced"
            time.sleep(0.5)
        assert client.generate(PROMPT, PARAMS).token_ids == text


def test_ranks_have_bundles_of_their_own() -> None:
    """Guards placement: each rank takes what the replica's actor options say, side by side on a node if there is room."""
    values = config(4)
    values["tiers"][-1] |= {
        "accelerator_type": "H100",
        "deployment_config": {"ray_actor_options": {"num_gpus": 1, "num_cpus": 2}},
    }
    options = tier_options(CascadeConfig.parse(values).tiers[-1])
    assert options["placement_group_bundles"] == [{"CPU": 2, "GPU": 1, "accelerator_type:H100": 0.001}] * 4
    assert options["placement_group_strategy"] == "PACK"


@pytest.mark.parametrize(
    ("values", "words"),
    [
        (config(3), "The model of tier full cannot be shared: tensor_parallel_size is 3, which does not divide"),
        (config(2, quantization="nf4"), "tensor_parallel_size is 2, which quantization nf4 cannot be combined with: take int8"),
        (config(2, quantization="int8", lora_modules={"red": "x"}), "takes quantization or lora_modules, not both"),
        (config(2, device="cuda:1"), "device is 'cuda:1', but each of 2 ranks has a device of its own: say cpu or cuda"),
        (config(0), r"tensor_parallel_size is 0"),
    ],
)
def test_what_cannot_be_shared_is_refused(values: dict[str, Any], words: str) -> None:
    """Guards the start: before anything runs, in one sentence."""
    with pytest.raises(ConfigError, match=words):
        build(values)
