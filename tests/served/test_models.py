"""Ray Serve LLM's configurations: what becomes of each key of theirs, and several models behind one API."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
import yaml
from openai import OpenAI
from ray import serve

from cascade import Cascade, SamplingParams
from cascade.errors import ConfigError
from cascade.settings.config import CascadeConfig
from deployments.llm import build_openai_app, cascades
from tests import small
from tests.conftest import Cluster
from tests.http.test_http import ask
from tests.served.test_serve import PROMPT
from tests.waiting import LONG_S, wait_until

Values = dict[str, Any]
PARAMS = SamplingParams(max_tokens=32, temperature=0.8, seed=11)
GPU = {"num_gpus": 1}


def theirs(**more: Any) -> Values:
    """As their quick start has it."""
    return {
        "model_loading_config": {"model_id": "qwen-0.5b", "model_source": "Qwen/Qwen2.5-0.5B-Instruct"},
        "deployment_config": {"autoscaling_config": {"min_replicas": 1, "max_replicas": 2}},
        "accelerator_type": "A10G",
        **more,
    }


def one(**more: Any) -> CascadeConfig:
    [config] = cascades({"llm_configs": [theirs(**more)]})[0].values()
    return config


def test_their_configuration_works_unchanged() -> None:
    """Guards users of Ray Serve LLM on their first day: one model by itself, on a GPU, and the suffix drafter."""
    config = one(engine_kwargs={"tensor_parallel_size": 2, "max_model_len": 8192, "enable_prefix_caching": True})
    [tier] = config.tiers
    assert (config.model_names, config.drafters, config.max_model_len) == (("qwen-0.5b",), ("suffix",), 8192)
    assert tier.accelerator_type == "A10G"
    assert tier.deployment_config.ray_actor_options == {"num_gpus": 2}
    assert tier.deployment_config.autoscaling_config == {"min_replicas": 1, "max_replicas": 2}
    assert tier.model_loading_config.source == "Qwen/Qwen2.5-0.5B-Instruct"


HONOURED: dict[str, tuple[Values, Callable[[CascadeConfig], Any], Any]] = {  # what is given, where it goes, what is there
    "a GPU unless told": ({"accelerator_type": None}, lambda c: c.tiers[0].deployment_config.ray_actor_options, GPU),
    "accelerator_config": (
        {"accelerator_type": None, "accelerator_config": {"kind": "cpu"}},
        lambda c: c.tiers[0].deployment_config.ray_actor_options,
        {},
    ),
    "accelerator_type": ({"accelerator_type": "A10"}, lambda c: c.tiers[0].accelerator_type, "A10G"),
    "runtime_env": (
        {"runtime_env": {"env_vars": {"A": "1"}}},
        lambda c: c.tiers[0].deployment_config.ray_actor_options,
        {**GPU, "runtime_env": {"env_vars": {"A": "1"}}},
    ),
    "bundle_per_worker": (
        {"placement_group_config": {"bundle_per_worker": {"GPU": 1}}, "engine_kwargs": {"tensor_parallel_size": 2}},
        lambda c: c.tiers[0].placement_group_config,
        {"bundles": [{"GPU": 1}] * 2, "strategy": "PACK"},
    ),
    "bundles": (
        {"placement_group_config": {"bundles": [{"CPU": 1}], "strategy": "SPREAD"}},
        lambda c: c.tiers[0].placement_group_config,
        {"bundles": [{"CPU": 1}], "strategy": "SPREAD"},
    ),
    "llm_engine": ({"llm_engine": "vLLM"}, lambda c: c.tiers[0].engine_kwargs.engine, "vllm"),
    "vLLM's arguments": (
        {"engine_kwargs": {"max_num_seqs": 8, "max_model_len": 512}},
        lambda c: c.tiers[0].engine_kwargs.vllm_options,
        {"max_num_seqs": 8, "max_model_len": 512, "trust_remote_code": False, "tensor_parallel_size": 1},
    ),
    "num_ingress_replicas": (
        {"experimental_configs": {"num_ingress_replicas": 3}},
        lambda c: c.router.deployment_config.num_replicas,
        3,
    ),
    "adapters": (
        {"lora_config": {"dynamic_lora_loading_path": "s3://b/c", "max_num_adapters_per_replica": 4}},
        lambda c: (c.tiers[0].engine_kwargs.lora_path, c.tiers[0].engine_kwargs.max_loras),
        ("s3://b/c", 4),
    ),
    "tiers": (
        {"tiers": [{"model_loading_config": {"model_id": "a/b"}}, {"name": "mid", "model_loading_config": {"model_id": "c"}}]},
        lambda c: c.names,
        ("tier0", "mid", "full"),
    ),
}


@pytest.mark.parametrize(("given", "place", "expected"), HONOURED.values(), ids=HONOURED)
def test_keys_are_honoured(given: Values, place: Callable[[CascadeConfig], Any], expected: Any) -> None:
    """Guards keys of theirs against being read and forgotten."""
    assert place(one(**given)) == expected


REFUSED: dict[str, tuple[Values, str]] = {
    "a bucket": (
        {"model_loading_config": {"model_id": "a", "model_source": {"bucket_uri": "s3://b"}}},
        "is a bucket: mount it",
    ),
    "another tokenizer": (
        {"model_loading_config": {"model_id": "a", "tokenizer_source": "b"}},
        "tokenizer_source of 'a' is 'b': remove it",
    ),
    "downloads": ({"lora_config": {"download_timeout_s": 3}}, "lora_config.download_timeout_s is not a known key"),
    "no prefixes": ({"engine_kwargs": {"enable_prefix_caching": False}}, "enable_prefix_caching of 'qwen-0.5b' is False"),
    "TPUs": ({"accelerator_config": {"kind": "tpu"}}, "accelerator_config.kind is 'tpu'"),
    "another engine": ({"llm_engine": "SGLang"}, "llm_engine is 'SGLang'"),
    "another server": ({"server_cls": "a:B"}, "server_cls cannot be given"),
    "batches of pieces": ({"experimental_configs": {"stream_batching_interval_ms": 50}}, "stream_batching_interval_ms is 50"),
    "no metrics": ({"log_engine_metrics": False}, "log_engine_metrics is False"),
    "two runtime_envs": (
        {"runtime_env": {"a": 1}, "deployment_config": {"ray_actor_options": {"runtime_env": {}}}},
        "has runtime_env twice",
    ),
    "no bundles": ({"placement_group_config": {"strategy": "PACK"}}, "either bundles or bundle_per_worker"),
    "a name of the deployment": ({"deployment_config": {"name": "x"}}, "name cannot be given here"),
    "a key that nobody knows": ({"acelerator_type": "L4"}, "acelerator_type is not a known key"),
}


@pytest.mark.parametrize(("given", "sentence"), REFUSED.values(), ids=REFUSED)
def test_what_is_not_honoured_is_refused(given: Values, sentence: str) -> None:
    """Guards against keys of theirs that change nothing here without a word."""
    with pytest.raises(ConfigError) as caught:
        one(**given)
    assert sentence in str(caught.value)


def test_models_are_read_from_files(tmp_path: Path) -> None:
    """Guards paths in llm_configs; and names that two models share."""
    path = tmp_path / "model.yaml"
    path.write_text(yaml.safe_dump(theirs()))
    for said in (str(path), [str(path)]):
        assert cascades({"llm_configs": said})[0]["qwen-0.5b"] == one()
    for args, sentence in (
        ({"llm_configs": [theirs(), theirs()]}, "the model_id 'qwen-0.5b'"),
        ({"llm_configs": []}, "at least 1"),
        ({"models": []}, "the key 'llm_configs'"),
        ({"llm_configs": ["/nowhere.yaml"]}, "'/nowhere.yaml', which cannot be read"),
        ({"llm_configs": [theirs()], "ingress_cls_config": {"ingress_cls": "a:B"}}, "ingress_cls_config cannot be given"),
    ):
        with pytest.raises(ConfigError, match=sentence):
            cascades(args)


@pytest.fixture(scope="module")
def url(cluster: Cluster) -> Iterator[str]:
    """Two models: one with a tier below, one by itself; their keys are as Ray Serve LLM has them."""

    def model(number: int, **more: Any) -> Values:
        return {
            "model_loading_config": {"model_id": f"small/{small.NAMES[number]}", "model_source": small.paths()[number]},
            "engine_kwargs": {"dtype": "float32", "num_threads": 1},
            "accelerator_config": {"kind": "cpu"},
            "deployment_config": {"ray_actor_options": {"num_cpus": 0.5}},
            **more,
        }

    application = build_openai_app({"llm_configs": [model(2, tiers=[model(0)]), model(1)]})
    serve.run(application, name="models", route_prefix="/models")
    yield f"{cluster.url}/models"
    serve.delete("models")


def settle() -> None:
    """Wait until no tier of either model has a session or a lease."""
    handles = [serve.get_deployment_handle(f"small--{name}", "models") for name in ("full:tier0", "full:full", "medium:full")]

    def left() -> list[int]:
        states = [handle.describe.remote().result(timeout_s=LONG_S) for handle in handles]
        return [state["sessions"] + state["leases"] for state in states]

    wait_until(lambda: not any(left()), left, every_s=0.1)


@pytest.mark.parametrize("number", [2, 1])
def test_each_model_writes_its_own_text(url: str, number: int) -> None:
    """Guards requests against the model of somebody else, whole and streamed."""
    with Cascade.from_pretrained([small.paths()[number]], dtype="float32", device="cpu") as alone:
        expected = alone.generate(PROMPT, PARAMS).text
    asked: Any = {"model": f"small/{small.NAMES[number]}", "prompt": PROMPT, "max_tokens": 32, "temperature": 0.8, "seed": 11}
    with OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        assert client.completions.create(**asked).choices[0].text == expected
        assert "".join(piece.choices[0].text for piece in client.completions.create(**asked, stream=True)) == expected
        assert client.models.retrieve(asked["model"]).id == asked["model"]
    settle()


def test_what_names_no_model_is_told(url: str, cluster: Cluster) -> None:
    """Guards the list of models, and sentences for requests that name none of them."""
    with OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        assert [one.id for one in client.models.list()] == ["small/full", "small/medium"]
        with pytest.raises(openai.NotFoundError, match="model is 'other': this server has 'small/full', 'small/medium'"):
            client.completions.create(model="other", prompt="x")
        with pytest.raises(openai.BadRequestError, match="max_tokens"):  # what a router refuses, as it does
            client.completions.create(model="small/full", prompt="x", max_tokens=-1)
    for body in ({"prompt": "x"}, {"prompt": "x", "model": 3}, b"{"):
        status, _, answer = ask(cluster, "/models/v1/completions", body)
        assert (status, answer["error"]["type"]) == (400, "invalid_request_error")
    for path in ("/v1/messages", "/v1/messages/count_tokens"):  # told in its own form, by whoever refuses
        for body, status, kind in (
            (b"{", 400, "invalid_request_error"),
            ({"model": "other"}, 404, "not_found_error"),
            ({"model": "small/full", "messages": 3}, 400, "invalid_request_error"),
        ):
            found, _, answer = ask(cluster, f"/models{path}", body)
            assert (found, answer["type"], answer["error"]["type"], len(answer["error"])) == (status, "error", kind, 2)
    assert [ask(cluster, f"/models{path}")[0] for path in ("/health", "/", "/metrics")] == [200, 200, 404]


def test_a_client_that_leaves_frees_the_tiers(url: str) -> None:
    """Guards against work for clients that are gone: the request ends at the router of its model, too."""
    with OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        with client.completions.create(
            model="small/full", prompt=PROMPT, max_tokens=900, stream=True, extra_body={"ignore_eos": True}
        ) as stream:
            next(iter(stream))
        with pytest.raises(openai.APITimeoutError):
            client.with_options(timeout=0.3).completions.create(
                model="small/full", prompt=PROMPT, max_tokens=900, extra_body={"ignore_eos": True}
            )
    settle()
