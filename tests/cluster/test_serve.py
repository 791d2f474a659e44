"""The files of cluster/serve: sizes that hold, places for all who are admitted, GPUs that tiers do not take from each other."""

import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from ray.serve.config import AutoscalingConfig

from cascade.engine import checkpoint
from cascade.engine.memory import GIB
from cascade.settings.check import Need, needs, unpinned
from cascade.settings.config import CascadeConfig
from tests.cluster.demand import num_replicas
from tests.cluster.published import here

FILES = sorted(path for path in (Path(__file__).parents[2] / "cluster" / "serve").glob("*.yaml") if path.stem != "demo")
ALIKE = "H100"  # of the machines that gpus.yaml is computed for: 80 GB


def config(path: Path) -> CascadeConfig:
    [application] = yaml.safe_load(path.read_text())["applications"]
    return CascadeConfig.parse(application["args"])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Where the models are; each is looked at once, whatever files name it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checkpoint, "anatomy", functools.cache(checkpoint.anatomy))
        yield tmp_path_factory.mktemp("models")


def found(parsed: CascadeConfig, folder: Path) -> list[Need]:
    """What `cascade check` finds, on GPUs of 80 GB where none is named."""
    values: dict[str, Any] = here(parsed, folder).model_dump(mode="json")
    for tier in values["tiers"]:
        tier["accelerator_type"] = tier["accelerator_type"] or ALIKE
    return needs(CascadeConfig.parse(values))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_sizes_hold(path: Path, folder: Path) -> None:
    """Guards tiers without room for what they admit: a text of the greatest length fits, and the comment is true."""
    parsed = config(path)
    assert parsed.max_model_len is not None
    for need, tier in zip(found(parsed, folder), parsed.tiers, strict=True):
        where = "" if tier.accelerator_type is None else f" on {need.device}"
        size = f"{need.weight_bytes / GIB:6.2f} GiB of weights, room for {need.cache_tokens:,} positions"
        assert f"\n#   {need.tier:<8}{size}{where}\n" in path.read_text()
        assert need.problem is None
        assert need.cache_tokens >= parsed.max_model_len


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_routers_admit_what_has_a_place(path: Path) -> None:
    """Guards requests that are admitted and then wait for a place at the full tier, which others might have had; answers
    against a router, or its node, that dies: a client goes on at the other one at once; and nodes with more replicas than
    processors: whatever computes says how many it needs."""
    parsed = config(path)
    full, router, deployment = parsed.tiers[-1], parsed.router, parsed.router.deployment_config
    routers = deployment.num_replicas or 1
    assert isinstance(routers, int)
    held = 2 * routers  # leases that wait to be used
    places = num_replicas(full, "max_replicas") * full.deployment_config.max_ongoing_requests
    assert routers * router.max_running + held <= places
    assert path.stem == "gpus" or (routers, deployment.max_replicas_per_node) == (2, 1)
    for one in (deployment, *(tier.deployment_config for tier in parsed.tiers)):
        assert one.ray_actor_options["num_cpus"] >= 1


@pytest.mark.parametrize("name", ["llama3", "qwen3", "qwen3-scaled", "twin"])
def test_a_tier_that_takes_any_gpu_is_told(name: str) -> None:
    """Guards configurations of machines that differ: `cascade check` finds what our own files once had wrong."""
    [path] = [path for path in FILES if path.stem == name]
    values: dict[str, Any] = config(path).model_dump(mode="json")
    assert unpinned(CascadeConfig.parse(values)) is None
    accelerator, values["tiers"][0]["accelerator_type"] = values["tiers"][0]["accelerator_type"], None
    said = unpinned(CascadeConfig.parse(values))
    assert said is not None
    assert said.startswith(f"Tier tiny takes a GPU of any kind, also the {values['tiers'][1]['accelerator_type']}")
    values["tiers"][0]["deployment_config"]["ray_actor_options"]["resources"] = {accelerator: 1}
    assert unpinned(CascadeConfig.parse(values)) is None


def test_a_file_scales() -> None:
    """Guards the example: Ray Serve's default starts a replica for every two sessions, and idle drafters give GPUs back."""
    [path] = [path for path in FILES if path.stem == "qwen3-scaled"]
    *drafts, full = config(path).tiers
    scaling = [tier.deployment_config.autoscaling_config or {} for tier in (*drafts, full)]
    assert all(AutoscalingConfig.model_validate(one).target_ongoing_requests >= 16 for one in scaling)
    assert [one["min_replicas"] for one in scaling] == [0] * len(drafts) + [1]
