"""The files of cluster/serve: sizes that hold, places for all who are admitted, GPUs that tiers do not take from each other."""

import functools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from cascade.engine import checkpoint
from cascade.engine.memory import GIB
from cascade.settings.check import Need, needs, unpinned
from cascade.settings.config import CascadeConfig
from tests.cluster.demand import num_replicas

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


def sizes_of(parsed: CascadeConfig, folder: Path) -> list[Need]:
    """What `cascade check` finds, on GPUs of 80 GB where none is named."""
    values: dict[str, Any] = here(parsed, folder).model_dump(mode="json")
    for tier in values["tiers"]:
        tier["accelerator_type"] = tier["accelerator_type"] or ALIKE
    return needs(CascadeConfig.parse(values))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_sizes_hold(path: Path, folder: Path) -> None:
    """Guards tiers without room for what they admit: a text of the greatest length fits, and the comment is true."""
    parsed = config(path)
    for need, tier in zip(sizes_of(parsed, folder), parsed.tiers, strict=True):
        where = "" if tier.accelerator_type is None else f" on {need.device}"
        size = f"{need.weight_bytes / GIB:6.2f} GiB of weights, room for {need.cache_tokens:,} positions"
        assert f"\n#   {need.tier:<8}{size}{where}\n" in path.read_text()
        assert need.problem is None
        assert need.cache_tokens >= parsed.max_model_len


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_routers_admit_what_has_a_place(path: Path) -> None:
    """Guards requests that are admitted without a place at the full tier, and nodes with more replicas than processors."""
    parsed = config(path)
    full, router, deployment = parsed.tiers[-1], parsed.router, parsed.router.deployment_config
    routers = deployment.num_replicas or 1
    held = 2 * routers  # leases that wait to be used
    places = num_replicas(full, "max_replicas") * full.deployment_config.max_ongoing_requests
    assert routers * router.max_running + held <= places
    assert path.stem == "gpus" or (routers, deployment.max_replicas_per_node) == (2, 1)
    for chosen in (deployment, *(tier.deployment_config for tier in parsed.tiers)):
        assert chosen.ray_actor_options["num_cpus"] >= 1


@pytest.mark.parametrize("name", ["llama3", "qwen3", "qwen3-scaled", "twin"])
def test_a_tier_that_takes_any_gpu_is_told(name: str) -> None:
    """Guards configurations of machines that differ: `cascade check` finds what our own files once had wrong."""
    [path] = [path for path in FILES if path.stem == name]
    values: dict[str, Any] = config(path).model_dump(mode="json")
    assert unpinned(CascadeConfig.parse(values)) is None
    accelerator, values["tiers"][0]["accelerator_type"] = values["tiers"][0]["accelerator_type"], None
    warning = unpinned(CascadeConfig.parse(values))
    assert warning.startswith(f"Tier tiny takes a GPU of any kind, also the {values['tiers'][1]['accelerator_type']}")
    values["tiers"][0]["deployment_config"]["ray_actor_options"]["resources"] = {accelerator: 1}
    assert unpinned(CascadeConfig.parse(values)) is None


QWEN = {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "vocab_size": 151936, "max_position_embeddings": 40960}
LLAMA = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 128256, "max_position_embeddings": 131072}
WIDTHS = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "head_dim", "tie_word_embeddings")
SIZES = {  # family, and the widths by their names; all have 8 heads of keys and values
    "Qwen/Qwen3-0.6B": (QWEN, (1024, 3072, 28, 16, 128, True)),
    "Qwen/Qwen3-4B": (QWEN, (2560, 9728, 36, 32, 128, True)),
    "Qwen/Qwen3-32B": (QWEN, (5120, 25600, 64, 64, 128, False)),
    "meta-llama/Llama-3.2-1B-Instruct": (LLAMA, (2048, 8192, 16, 32, 64, True)),
    "meta-llama/Llama-3.1-8B-Instruct": (LLAMA, (4096, 14336, 32, 32, 128, False)),
    "meta-llama/Llama-3.1-70B-Instruct": (LLAMA, (8192, 28672, 80, 64, 128, False)),
}


def here(config: CascadeConfig, folder: Path) -> CascadeConfig:
    """``config`` with the models that it names in folders of ``folder``."""
    values: dict[str, Any] = config.model_dump(mode="json")
    for tier in values["tiers"]:
        source = tier["model_loading_config"]["model_id"]
        family, widths = SIZES[source]
        place = folder / source
        place.mkdir(parents=True, exist_ok=True)
        contents = {**family, **dict(zip(WIDTHS, widths, strict=True)), "num_key_value_heads": 8, "torch_dtype": "bfloat16"}
        (place / "config.json").write_text(json.dumps(contents))
        tier["model_loading_config"]["model_source"] = str(place)
    return CascadeConfig.parse(values)
