"""Ray Serve LLM's configurations: what becomes of each key of theirs, and several models behind one API."""

from asyncio import run
from collections.abc import Iterator
from contextlib import AsyncExitStack
from functools import partial
from operator import attrgetter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import openai
import pytest
import yaml
from openai import OpenAI
from pydantic import BaseModel
from ray import serve

from cascade import Cascade, SamplingParams
from cascade.errors import ConfigError
from cascade.settings.config import CascadeConfig
from cascade.settings.llm_configs import cascades, load_config
from cascade.settings.router import ListenConfig, RequestLimits
from deployments.gateway.admission.admission import Admission
from deployments.gateway.http.server import HttpServer
from deployments.llm import build_openai_app
from deployments.ops.launch import free_port
from deployments.router import Models
from tests import small
from tests.conftest import Cluster
from tests.http.test_http import ask
from tests.in_process import House, house, living
from tests.served.test_serve import PROMPT
from tests.tier.test_tier import CountingModel
from tests.waiting import LONG_S, wait_until

Values = dict[str, Any]
GPU = {"num_gpus": 1}


def theirs(**more: Any) -> Values:
    """As their quick start has it."""
    return {
        "model_loading_config": {"model_id": "qwen-0.5b", "model_source": "Qwen/Qwen2.5-0.5B-Instruct"},
        "deployment_config": {"autoscaling_config": {"min_replicas": 1, "max_replicas": 2}},
        "accelerator_type": "A10G",
        **more,
    }


def parsed(**more: Any) -> CascadeConfig:
    [config] = cascades({"llm_configs": [theirs(**more)]})[0].values()
    return config


def test_their_configuration_works_unchanged() -> None:
    """Guards users of Ray Serve LLM on their first day: one model by itself, on a GPU, and the suffix drafter."""
    config = parsed(engine_kwargs={"tensor_parallel_size": 2, "max_model_len": 8192, "enable_prefix_caching": True})
    [tier] = config.tiers
    assert (config.model_names, config.drafters, config.max_model_len) == (("qwen-0.5b",), ("suffix",), 8192)
    assert tier.accelerator_type == "A10G"
    assert tier.deployment_config.ray_actor_options == {"num_gpus": 2}
    assert tier.deployment_config.autoscaling_config == {"min_replicas": 1, "max_replicas": 2}
    assert tier.model_loading_config.source == "Qwen/Qwen2.5-0.5B-Instruct"


# as in KubeRay's sample and vLLM's recipes
SAMPLE: Values = {"engine_kwargs": {"device": "auto", "dtype": "auto", "max_model_len": 8192}, "log_engine_metrics": False}
SAMPLE["engine_kwargs"] |= {"enable_auto_tool_choice": True, "tool_call_parser": "hermes", "enable_lora": False}


def test_published_files_are_taken(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Guards keys that stand in every sample: they were refused, or meant vLLM. `check` and `serve` take the file as it is."""
    config = parsed(**SAMPLE)
    engine = config.tiers[-1].engine_kwargs
    assert (engine.device, engine.dtype, engine.engine, engine.model_extra) == (None, None, None, {})
    assert (config.max_model_len, config.router.tool_format) == (8192, "hermes")
    assert "engine_kwargs of 'qwen-0.5b' without effect here: enable_auto_tool_choice, tool_call_parser" in caplog.text
    path = tmp_path / "serve.yaml"
    models = {"llm_configs": [theirs(**SAMPLE)]}
    for values in (models, {"applications": [{"import_path": "ray.serve.llm:build_openai_app", "args": models}]}):
        path.write_text(yaml.safe_dump(values))
        assert load_config(path) == config
    path.write_text(yaml.safe_dump({"llm_configs": [theirs(), {"model_loading_config": {"model_id": "other"}}]}))
    with pytest.raises(ConfigError, match="has 2 llm_configs: give a file with one"):
        load_config(path)


ENV = {"env_vars": {"A": "1"}}
SPREAD = {"bundles": [{"CPU": 1}], "strategy": "SPREAD"}
OPTIONS = "deployment_config.ray_actor_options"
HONOURED: list[tuple[Values, str, Any]] = [  # what is given, where it goes, what is there
    ({"accelerator_type": None}, OPTIONS, GPU),
    ({"accelerator_type": None, "accelerator_config": {"kind": "cpu"}}, OPTIONS, {}),
    ({"accelerator_type": "A10"}, "accelerator_type", "A10G"),
    ({"runtime_env": ENV}, OPTIONS, {**GPU, "runtime_env": ENV}),
    (
        {"placement_group_config": {"bundle_per_worker": {"GPU": 1}}, "engine_kwargs": {"tensor_parallel_size": 2}},
        "placement_group_config",
        {"bundles": [{"GPU": 1}] * 2, "strategy": "PACK"},
    ),
    ({"placement_group_config": SPREAD}, "placement_group_config", SPREAD),
    ({"llm_engine": "vLLM"}, "engine_kwargs.engine", "vllm"),
    (
        {"engine_kwargs": {"max_num_seqs": 8, "max_model_len": 512}},
        "engine_kwargs.vllm_options",
        {"max_num_seqs": 8, "max_model_len": 512, "trust_remote_code": False, "tensor_parallel_size": 1},
    ),
    ({"experimental_configs": {"num_ingress_replicas": 3}}, "router.deployment_config.num_replicas", 3),
    ({"lora_config": {"dynamic_lora_loading_path": "/shared/adapters"}}, "engine_kwargs.lora_path", "/shared/adapters"),
    ({"lora_config": {"dynamic_lora_loading_path": "/a", "max_num_adapters_per_replica": 4}}, "engine_kwargs.max_loras", 4),
    (
        {"tiers": [{"model_loading_config": {"model_id": "a/b"}}, {"name": "mid", "model_loading_config": {"model_id": "c"}}]},
        "names",
        ("tier0", "mid", "full"),
    ),
]


@pytest.mark.parametrize(("given", "path", "expected"), HONOURED)
def test_keys_are_honoured(given: Values, path: str, expected: Any) -> None:
    """Guards keys of theirs against being read and forgotten."""
    config = parsed(**given)
    place = attrgetter(path)(config if path.startswith(("router", "names")) else config.tiers[-1])
    assert (place.model_dump(exclude_none=True) if isinstance(place, BaseModel) else place) == expected


REFUSED: list[tuple[Values, str]] = [
    ({"model_loading_config": {"model_id": "a", "model_source": {"bucket_uri": "s3://b"}}}, "model_source: input should be"),
    ({"model_loading_config": {"model_id": "a", "tokenizer_source": "b"}}, "tokenizer_source of 'a' is 'b': remove it"),
    ({"lora_config": {"download_timeout_s": 3}}, "lora_config.download_timeout_s is not a known key"),
    ({"engine_kwargs": {"enable_prefix_caching": False}}, "enable_prefix_caching of 'qwen-0.5b' is False"),
    ({"accelerator_config": {"kind": "tpu"}}, "accelerator_config.kind is 'tpu'"),
    ({"llm_engine": "SGLang"}, "llm_engine is 'SGLang'"),
    ({"server_cls": "a:B"}, "server_cls is not a known key"),
    ({"experimental_configs": {"stream_batching_interval_ms": 50}}, "stream_batching_interval_ms is 50"),
    ({"engine_kwargs": {"speculative_config": {"method": "ngram"}}}, "speculative_config is given: models that draft are"),
    ({"engine_kwargs": {"kv_transfer_config": {}}}, "kv_transfer_config is given: a replica"),
    ({"engine_kwargs": {"enable_lora": False}, "lora_config": {"dynamic_lora_loading_path": "/x"}}, "False beside its lora"),
    ({"runtime_env": {"a": 1}, "deployment_config": {"ray_actor_options": {"runtime_env": {}}}}, "has runtime_env twice"),
    ({"engine_kwargs": {"tensor_parallel_size": "two"}}, "engine_kwargs.tensor_parallel_size is 'two': input should be"),
    ({"deployment_config": {"ray_actor_options": 5}}, "deployment_config.ray_actor_options is 5: input should be"),
    ({"placement_group_config": {"strategy": "PACK"}}, "either bundles or bundle_per_worker"),
    ({"deployment_config": {"name": "x"}}, "name is not a known key"),
    ({"acelerator_type": "L4"}, "acelerator_type is not a known key"),
]


@pytest.mark.parametrize(("given", "sentence"), REFUSED)
def test_what_is_not_honoured_is_refused(given: Values, sentence: str) -> None:
    """Guards against keys of theirs that change nothing here without a word."""
    with pytest.raises(ConfigError) as caught:
        parsed(**given)
    assert sentence in str(caught.value)


def test_models_are_read_from_files(tmp_path: Path) -> None:
    """Guards paths in llm_configs; and names that two models share."""
    path = tmp_path / "model.yaml"
    path.write_text(yaml.safe_dump(theirs()))
    for files in (str(path), [str(path)]):
        assert cascades({"llm_configs": files})[0]["qwen-0.5b"] == parsed()
    for args, sentence in (
        ({"llm_configs": [theirs(), theirs()]}, "the model_id 'qwen-0.5b'"),
        ({"llm_configs": []}, "at least 1"),
        ({"models": []}, "the key 'llm_configs'"),
        ({"llm_configs": ["/nowhere.yaml"]}, "/nowhere.yaml cannot be read"),
        ({"llm_configs": [theirs()], "ingress_cls_config": {"ingress_cls": "a:B"}}, "ingress_cls_config is not a known key"),
    ):
        with pytest.raises(ConfigError, match=sentence):
            cascades(args)
    (tmp_path / "wrong.yaml").write_text(yaml.safe_dump(theirs(colour="red")))
    (tmp_path / "serve.yaml").write_text(yaml.safe_dump({"llm_configs": [theirs(), str(tmp_path / "wrong.yaml")]}))
    with pytest.raises(ConfigError, match=r"/serve.yaml: .*/wrong.yaml: llm_configs.1.colour is not a known key"):
        load_config(tmp_path / "serve.yaml")


@pytest.fixture(scope="module")
def models() -> Iterator[tuple[SimpleNamespace, dict[str, House]]]:
    """A server of two models whose languages differ, and the house of each, without Ray."""
    listen, stack = ListenConfig(http_port=free_port()), AsyncExitStack()
    with house(served_model_name="full") as full:
        one = living(pace=(1, 1, 1), model=partial(CountingModel, seed=1), served_model_name="other")
        other = full.call(stack.enter_async_context(one))
        houses = {"full": full, "other": other}
        application = Models({name: built.router for name, built in houses.items()})
        server = HttpServer(application, listen, RequestLimits())
        full.call(server.open())
        yield SimpleNamespace(url=f"http://{listen.host}:{listen.http_port}"), houses
        full.call(server.close(0))
        full.call(stack.aclose())


def test_bodies_that_no_router_takes_are_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards the common ingress: it read 16 MiB of anybody's body, whatever the routers' limits, and before it saw the key."""
    monkeypatch.setenv("CASCADE_API_KEYS", "ann=a-secret-key")
    values = small.config().model_dump(mode="json")
    configs = [CascadeConfig.parse(values | {"router": {"limits": {"max_body_bytes": most}}}) for most in (2048, 4096)]
    routers: Any = {str(number): SimpleNamespace(admission=Admission(config)) for number, config in enumerate(configs)}
    application = Models(routers)

    def answered(length: int, **headers: str) -> int:
        raw_headers = [(name.encode(), value.encode()) for name, value in {**headers, "content-length": str(length)}.items()]
        sent: list[Any] = []

        async def send(message: Any) -> None:
            sent.append(message)

        async def receive() -> Any:
            raise AssertionError("nothing of the body may be asked for")

        scope = {"type": "http", "method": "POST", "path": "/v1/completions", "headers": raw_headers}
        run(application(scope, receive, send))
        return int(sent[0]["status"])

    assert answered(9) == 401
    assert answered(9, authorization="Bearer another-key") == 401
    assert answered(4097, authorization="Bearer a-secret-key") == 413
    assert answered(4097, **{"x-api-key": "a-secret-key"}) == 413


ASKED: Values = {"prompt": PROMPT, "max_tokens": 32, "temperature": 0.8, "seed": 11}


def test_each_model_writes_its_own_text(models: tuple[Any, dict[str, House]]) -> None:
    """Guards requests against the model of somebody else, whole and streamed."""
    server, houses = models
    expected = {name: ask(built, "/v1/completions", ASKED)[2]["choices"][0]["text"] for name, built in houses.items()}
    assert expected["full"] != expected["other"]
    with OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        for name, text in expected.items():
            assert client.completions.create(model=name, **ASKED).choices[0].text == text
            pieces = client.completions.create(model=name, **ASKED, stream=True)
            assert "".join(piece.choices[0].text for piece in pieces) == text
            assert client.models.retrieve(name).id == name


def test_what_names_no_model_is_told(models: tuple[Any, dict[str, House]]) -> None:
    """Guards the list of models, and sentences for requests that name none of them."""
    server, _ = models
    with OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        assert [model.id for model in client.models.list()] == ["full", "other"]
        with pytest.raises(openai.NotFoundError, match="model is 'third': this server has 'full', 'other'"):
            client.completions.create(model="third", prompt="x")
        with pytest.raises(openai.BadRequestError, match="max_tokens"):  # what a router refuses, as it does
            client.completions.create(model="full", prompt="x", max_tokens=-1)
    for body in ({"prompt": "x"}, {"prompt": "x", "model": 3}, b"{"):
        status, _, answer = ask(server, "/v1/completions", body)
        assert (status, answer["error"]["type"]) == (400, "invalid_request_error")
    for path in ("/v1/messages", "/v1/messages/count_tokens"):  # told in its own form, by whoever refuses
        for body, status, kind in (
            (b"{", 400, "invalid_request_error"),
            ({"model": "third"}, 404, "not_found_error"),
            ({"model": "full", "messages": 3}, 400, "invalid_request_error"),
        ):
            code, _, answer = ask(server, path, body)
            assert (code, answer["type"], answer["error"]["type"], len(answer["error"])) == (status, "error", kind, 2)
    assert [ask(server, path)[0] for path in ("/health", "/", "/metrics")] == [200, 200, 404]


def test_a_client_that_leaves_frees_the_tiers(models: tuple[Any, dict[str, House]]) -> None:
    """Guards against work for clients that are gone: the request ends at the router of its model, too."""
    server, houses = models
    request: Any = {"model": "other", "prompt": PROMPT, "max_tokens": 900, "extra_body": {"ignore_eos": True}}
    with OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        with client.completions.create(**request, stream=True) as stream:
            next(iter(stream))
        with pytest.raises(openai.APITimeoutError):
            client.with_options(timeout=0.1).completions.create(**request)
    houses["other"].settle()


@pytest.mark.slow
def test_models_are_served_side_by_side(cluster: Cluster) -> None:
    """Guards the same behind Ray Serve: names of deployments, handles of routers, one of two models with a tier below."""

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
    with OpenAI(base_url=f"{cluster.url}/models/v1", api_key="none", max_retries=0) as client:
        for number in (2, 1):
            with Cascade.from_pretrained([small.paths()[number]], dtype="float32", device="cpu") as alone:
                expected = alone.generate(PROMPT, SamplingParams(max_tokens=32, temperature=0.8, seed=11)).text
            pieces = client.completions.create(model=f"small/{small.NAMES[number]}", **ASKED, stream=True)
            assert "".join(piece.choices[0].text for piece in pieces) == expected
    handles = [serve.get_deployment_handle(f"small--{name}", "models") for name in ("full:tier0", "full:full", "medium:full")]

    def left() -> list[int]:
        states = [handle.describe.remote().result(timeout_s=LONG_S) for handle in handles]
        return [state["sessions"] + state["leases"] for state in states]

    wait_until(lambda: not any(left()), left, every_s=0.1)
    serve.delete("models")
