"""What a machine without vLLM says."""

from pathlib import Path

import pytest

from cascade.engine.memory import GIB
from cascade.engine.vllm.engine import BESIDE, cache_bytes, pass_options
from cascade.engine.vllm.model import VllmModel
from cascade.errors import ConfigError, ModelError
from cascade.settings.check import needs
from cascade.settings.config import CascadeConfig
from cascade.settings.engine import EngineKwargs
from tests.architectures import config


def test_vllm_is_asked_for_where_it_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards users against an ImportError: the sentence says what to install."""
    monkeypatch.setattr("cascade.engine.vllm.engine.installed", lambda: False)
    with pytest.raises(ConfigError, match=r"engine is 'vllm', which is not installed here: pip install '\.\[vllm\]'"):
        VllmModel("anything")


def test_tiers_that_share_a_gpu_get_memory_by_arithmetic() -> None:
    """Guards three tiers that start at once on one GPU: measured, each took the memory of the others for its own."""
    total = 80 * GIB
    shares, weights = (0.18, 0.27, 0.45), (1 * GIB, 8 * GIB, 16 * GIB)
    caches = [cache_bytes(total, share, held) for share, held in zip(shares, weights, strict=True)]
    assert sum(caches) + sum(weights) + len(caches) * BESIDE <= sum(shares) * total
    assert min(caches) > 4 * GIB
    with pytest.raises(ModelError, match=r"weights of 16\.0 GiB .* leave no room .* raise num_gpus or"):
        cache_bytes(total, 0.18, 16 * GIB)


def test_vllm_makes_room_for_the_passes_of_a_tier() -> None:
    """Guards `max_pass_tokens`, which never reached vLLM, and tiers of many sessions, whose rows replayed no graph."""
    usual, long, short = (pass_options(tokens, 256, {}) for tokens in (512, 4096, 100))
    assert (usual["max_num_batched_tokens"], long["max_num_batched_tokens"]) == (2048, 4096)
    assert usual["max_num_seqs"] > 256
    assert [made["cudagraph_capture_sizes"][-1] for made in (usual, long, short)] == [512, 512, 100]
    given = pass_options(512, 256, {"max_num_batched_tokens": 64, "compilation_config": {"max_cudagraph_capture_size": 32}})
    assert given == {"max_num_batched_tokens": 64, "max_num_seqs": 64}


def test_architectures_are_vllms_to_know(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Guards tiers on vLLM against what our own engine cannot serve: `cascade check` refused them for that."""
    monkeypatch.setattr("cascade.settings.check.installed", lambda: False)
    config("bloom").save_pretrained(tmp_path)
    tier = {"name": "full", "model_loading_config": {"model_id": str(tmp_path)}}
    [need] = needs(CascadeConfig.parse({"tiers": [{**tier, "engine_kwargs": {"engine": "vllm"}}]}))
    assert need.anatomy.cache_bytes_per_token > 0
    with pytest.raises(ConfigError, match="BloomForCausalLM cannot be served"):
        needs(CascadeConfig.parse({"tiers": [tier]}))


@pytest.mark.parametrize(
    ("given", "gpu", "there", "expected"),
    [
        ({}, True, True, "vllm"),
        ({}, True, False, "cascade"),
        ({}, False, True, "cascade"),
        ({"engine": "cascade"}, True, True, "cascade"),
        ({"engine": "vllm"}, False, False, "vllm"),
        ({"quantization": "fp8"}, False, False, "vllm"),
        ({"drafter": {"kind": "eagle3", "source": "a/b"}}, False, False, "vllm"),
        ({"drafter": "mtp"}, False, False, "vllm"),
        ({"tensor_parallel_size": 2}, False, False, "vllm"),
        ({"lora_modules": {"red": "a/b"}}, False, False, "vllm"),
    ],
)
def test_the_engine_is_chosen(
    given: dict[str, object], gpu: bool, there: bool, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards the default: vLLM where it is installed and there is a GPU, unless only our own engine takes what is given."""
    monkeypatch.setattr("cascade.engine.vllm.installed", lambda: there)
    assert EngineKwargs.model_validate(given).runs_on(gpu=gpu) == expected
