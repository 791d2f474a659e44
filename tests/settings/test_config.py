"""Configurations: what is wrong is refused before anything starts, and what is right reaches Ray Serve."""

import contextlib
import json
import os
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated, Any

import pytest
import yaml
from pydantic import TypeAdapter, ValidationError
from ray import serve
from ray.serve._private.api import call_user_app_builder_with_args_if_necessary as call_builder
from ray.serve.schema import ServeDeploySchema

from cascade.drafters import DrafterSpec
from cascade.engine.tokenizer import pretrained
from cascade.errors import ConfigError, ModelError
from cascade.settings.check import needs, verify
from cascade.settings.config import CascadeConfig
from cascade.settings.deployment import ActorOptions, Scaling
from cascade.settings.engine import EngineKwargs
from cascade.settings.llm_configs import VllmOptions
from cascade.settings.section import Section
from cascade.training.versions import Versions
from deployments import app, ray_compat
from deployments.app import ENVIRONMENT, SURGE_PERCENT, build, parse, tier_options
from deployments.gateway.grpc.ingress import SERVICER
from deployments.tier import bind_threads
from tests import small

CLUSTER = Path(__file__).parents[2] / "cluster"
SERVE_FILES = sorted((CLUSTER / "serve").glob("*.yaml"))


def tier(name: str = "full", model_id: str = "some/model", **fields: Any) -> dict[str, Any]:
    return {"name": name, "model_loading_config": {"model_id": model_id}, **fields}


def single(**fields: Any) -> dict[str, Any]:
    return {"tiers": [tier(**fields)]}


def engine(**options: Any) -> dict[str, Any]:
    return single(engine_kwargs=options)


def head(kind: str, **options: Any) -> dict[str, Any]:
    return engine(drafter={"kind": kind, "source": "a/b"}, **options)


def deploying(**fields: Any) -> dict[str, Any]:
    return single(deployment_config=fields)


def routing(**fields: Any) -> dict[str, Any]:
    return {"tiers": [tier()], "router": fields}


def loading(**fields: Any) -> dict[str, Any]:
    return single(model_loading_config={"model_id": "m", **fields})


def acting(**options: Any) -> dict[str, Any]:
    return deploying(ray_actor_options=options)


# what is wrong


def learning(student: str, **engine_kwargs: Any) -> dict[str, Any]:
    """Two tiers, of which one is asked to learn."""
    values = aligned(students=[student])
    values["tiers"][0]["engine_kwargs"] = engine_kwargs
    return values


def aligned(**fields: Any) -> dict[str, Any]:
    return {"tiers": [tier("tiny"), tier("full")], "alignment": {"folder": "/shared", **fields}}


VLLM, CONFLICT = r", which only vLLM can do: set engine to 'vllm'", r", which do not go together"
FULL, OWN = tier("full"), "a.module:load"
WRONG: list[tuple[Any, str]] = [
    ({"window": 3}, r"tiers is missing; add it"),
    ({"tiers": [tier(f"t{i}") for i in range(6)]}, r"tiers: list should have at most 5 items"),
    ({"tiers": [tier("a"), tier("a")]}, r"two tiers are named 'a'"),
    ({"tiers": [tier("suffix"), FULL]}, r"give the tier another name"),
    ({"tiers": [tier("router"), FULL]}, r"no tier can be named 'router'"),
    (engine(drafter="eagle3"), r"'eagle3' needs a source: the path or hub id"),
    (head("mtp"), r"'a/b', but 'mtp' needs none: remove"),
    (head("eagle3", engine="cascade"), f"drafter is 'eagle3'{VLLM}"),
    (head("medusa", engine=OWN), f"drafter is 'medusa'{VLLM}, or remove it"),
    (head("eagle3", lora_modules={"red": "a/b"}), f"drafter is 'eagle3' and lora_modules are red{CONFLICT}"),
    (head("eagle", tensor_parallel_size=2), f"drafter is 'eagle' and tensor_parallel_size is 2{CONFLICT}"),
    (engine(drafter="dflash"), r"drafter.kind is 'dflash': it must be one of auto, suffix"),
    (engine(drafter="corpus"), r"needs a source: the path of a text file"),
    (engine(engine="cascade", lora_modules={"red": "a/b"}), f"lora_modules are red{VLLM}"),
    (engine(engine=OWN, lora_path="/x"), r"lora_path is '/x', which only vLLM can do: set engine to 'vllm', or remove it"),
    ({"tiers": [tier("tiny", engine_kwargs={"lora_path": "x"}), FULL]}, r"lora_path of tier 'tiny': only the full tier"),
    (engine(engine="cascade", tensor_parallel_size=2), f"tensor_parallel_size is 2{VLLM}"),
    (engine(engine="llama.cpp"), r"engine is 'llama\.cpp': string should match"),
    (engine(num_threads=100_000), r"num_threads is 100000: input should be less than or equal to 1024"),
    (engine(enforce_eager=True), r"enforce_eager is not a known key; remove it, correct its spelling, or set engine to 'vllm'"),
    (engine(quantization="awq", num_threads=2), f"quantization is 'awq'{VLLM}, or remove it"),
    (learning("full"), r"names 'full', which is no lower tier: it takes tiny"),
    (learning("tiny", quantization="int8"), r"names 'tiny', whose quantization is 'int8', .*remove one"),
    (learning("tiny", drafter={"kind": "eagle3", "source": "a/b"}), r"names 'tiny', whose head would not fit new weights"),
    (learning("tiny", layers=8), r"names 'tiny', which is some layers of its model, and learns nothing by"),
    (engine(layers=0), r"engine_kwargs\.layers is 0: there are no layers: give those to keep"),
    (engine(layers=["0-4", "3-6"]), r"layers: '3-6' overlaps with layers before it"),
    (head("eagle3", layers=8), f"layers are 0-7 and drafter is 'eagle3'{CONFLICT}: remove one of the two"),
    (engine(layers=[0, "2-3"], lora_path="x"), r"layers are 0,2-3 and lora_path is 'x', which do not"),
    (engine(layers=8, engine=OWN), r"layers are 0-7 and engine is 'a.module:l"),
    (engine(layers=8, engine="vllm", hf_overrides={"x": 1}), f"layers are 0-7 and hf_overrides is given{CONFLICT}"),
    (aligned(key_env="KEY"), r"key_env is 'KEY', but nothing is on disk: set on_disk to true, or remove it"),
    (aligned(device="cuda:0", num_workers=2), r"device is 'cuda:0' of 2 workers: remove it"),
    ({"tiers": [tier()], "wide": 3}, r"wide is not a known key; remove it"),
    ({"tiers": [tier()], "windw": 3}, r"windw is not a known key; did you mean 'window'\?"),
    (loading(modl_source="x"), r"tiers\.0\.model_loading_config\.modl_source is not a known key; .* 'model_source'\?"),
    (engine(dtyp="float32"), r"dtyp is not a known key; did you mean 'dtype'\?"),
    (routing(access={"limits": {"gold": {"max_runing": 3}}}), r"router\.access\.limits\.gold\.max_runing is .*'max_running'\?"),
    (engine(dtype="int4"), r"dtype is 'int4': .*'bfloat16' or 'float16'$"),
    (deploying(num_replicas=0), r"num_replicas is 0: input should be greater than or equal to 1$"),
    ({"tiers": [tier()], "window": True}, r": window is True: input should be a number, not a boolean$"),
    (deploying(num_replicas=True), r"\.num_replicas is True: input should be a number, not a boolean$"),
    ({"tiers": [5]}, r"tiers\.0 is 5: input should be a valid mapping$"),
    ({"tiers": [tier()], 5: 3}, r": 5 is not a known key"),
    (routing(access={"keys": {}}), r"router\.access\.keys is not a known key"),
    (loading(model_source="embedded:x"), r"model_source is 'embedded:x': .*embedded:tiny, embedded:medium, embedded:full"),
    ([tier()], r"mapping"),
    (single(placement_group_config={"bundle": [{"CPU": 1}]}), r"placement_group_config\.bundles is missing"),
    (deploying(request_router_config={"backoff": 1}), r"request_router_config of tier full has the unknown key 'backoff'"),
    (deploying(num_replicas=2, autoscaling_config={"max_replicas": 3}), r"tier full.*num_replicas.*autoscaling_config"),
    (deploying(autoscaling_config={"max_replicas": -3}), r"tier full.*max_replicas"),
    (routing(deployment_config={"ray_actor_options": {"gpus": 1}}), r"router.*gpus"),
    (acting(runtime_env=5), r"runtime_env"),
    (acting(runtime_env={"env_vars": {"A": [1]}}), r"runtime_env\.env_vars\.A: input should be a valid string"),
    (acting(num_gpus="one"), r"ray_actor_options\.num_gpus is 'one': input should be a valid number"),
    (acting(resources={"disk": "much"}), r"resources\.disk is 'much'"),
    (deploying(autoscaling_config={"max_replicas": "many"}), r"autoscaling_config\.max_replicas is 'many': input should be"),
    (aligned(ray_actor_options={"num_gpus": "one"}), r"alignment\.ray_actor_options\.num_gpus is 'one'"),
]


def one_sentence(error: pytest.ExceptionInfo[ConfigError]) -> str:
    text = str(error.value)
    assert "\n" not in text
    assert "Traceback" not in text
    assert "pydantic" not in text
    assert len(text) < 500
    return text


@pytest.mark.parametrize(("values", "words"), WRONG)
def test_wrong_configurations_are_refused(values: Any, words: str) -> None:
    """Guards users against errors of pydantic or Ray: one sentence with field, value and fix, before anything starts."""
    if isinstance(values, dict):
        values = {"verify": False, **values}  # or the hub would be asked for models that do not exist
    with pytest.raises(ConfigError, match=words) as caught:
        build(values)
    one_sentence(caught)


def numbers(value: Any) -> list[Any]:
    """The numbers inside a value."""
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ()
    return [value] * (type(value) in (int, float)) + [number for each in inner for number in numbers(each)]


def test_no_field_takes_a_boolean_for_a_number() -> None:
    """Guards `window: yes`, which was a window of 1."""
    sections, names = [Section], {"x", *ActorOptions.__annotations__, *Scaling.__annotations__, *VllmOptions.__annotations__}
    for section in sections:
        sections += section.__subclasses__()
        for field in section.model_fields.values():
            adapter = TypeAdapter(Annotated[field.annotation, field])
            for value in (True, False):
                for given in (value, [value] * 2, [{"x": value}], *({name: value} for name in names)):
                    with contextlib.suppress(ValidationError, ConfigError):
                        assert not numbers(adapter.validate_python(given)), field


FILES: list[tuple[Callable[[Path], object], str]] = [
    (lambda path: None, r"cannot be read: No such file"),
    (lambda path: path.write_text(""), r"must be a mapping"),
    (lambda path: path.write_text("tiers:\n\t- a"), r"is not YAML: .*, line 2, column 1"),
    (lambda path: path.write_text("tiers: !!python/object/apply:os.getcwd []"), r"is not YAML"),
    (lambda path: path.write_text("a: 1\n---\nb: 1"), r"expected a single document in the stream but found another"),
    (lambda path: path.write_text("tiers: 5"), r"tiers is 5: input should be a valid list$"),
    (lambda path: path.write_text("[" * 600), r"is not YAML"),
    (lambda path: path.write_text("window: 3\ntiers: []\nwindow: 4"), r"is not YAML: 'window' is given twice.*line 3"),
]


@pytest.mark.parametrize(("write", "words"), FILES)
def test_wrong_files_are_refused(tmp_path: Path, write: Callable[[Path], object], words: str) -> None:
    """Guards users against errors of YAML or the file system; the sentence names the file."""
    path = tmp_path / "my.yaml"
    write(path)
    with pytest.raises(ConfigError, match=words) as caught:
        build({"config": str(path)})
    assert one_sentence(caught).startswith(str(path))


@pytest.mark.parametrize(
    ("args", "words"),
    [({"config": 5}, "config is 5"), ({"config": None}, "config is None"), ({"config": "a", "window": 3}, "config is a path")],
)
def test_wrong_arguments_are_refused(args: dict[str, Any], words: str) -> None:
    """Guards `serve run deployments.app:build` and YAML's args: a path that is none, keys that would be ignored beside it."""
    with pytest.raises(ConfigError, match=words) as caught:
        parse(args)
    one_sentence(caught)


# what is right


def test_options_reach_serve() -> None:
    """Guards against options of a deployment that are dropped, renamed or replaced by a default."""
    deployment_config: dict[str, Any] = {
        "num_replicas": 3,
        "ray_actor_options": {"num_cpus": 0.5, "num_gpus": 0.25, "runtime_env": {"env_vars": {"A": "1"}, "pip": ["x"]}},
        "max_ongoing_requests": 7,
        "max_queued_requests": 8,
        "health_check_period_s": 3.0,
        "health_check_timeout_s": 4.0,
        "graceful_shutdown_timeout_s": 5.0,
        "graceful_shutdown_wait_loop_s": 6.0,
    }
    bundles = [{"CPU": 1.0, "GPU": 1.0}, {"GPU": 1.0}]
    first = tier("tiny", deployment_config=deployment_config, placement_group_config={"bundles": bundles, "strategy": "SPREAD"})
    second = tier(deployment_config={"autoscaling_config": {"min_replicas": 2, "max_replicas": 5}, "max_replicas_per_node": 1})
    config = CascadeConfig.parse(
        {"tiers": [first, second], "router": {"deployment_config": {"num_replicas": 2}}, "verify": False}
    )
    tiny, full, router = deployments(config)
    assert (tiny.name, full.name, router.name) == ("tiny", "full", "router")
    actor = deployment_config.pop("ray_actor_options") | {"runtime_env": {"pip": ["x"], "env_vars": {**ENVIRONMENT, "A": "1"}}}
    assert actor.items() <= tiny.ray_actor_options.items()
    assert {name: getattr(tiny._deployment_config, name) for name in deployment_config} == deployment_config
    assert tiny._replica_config.placement_group_bundles == bundles
    assert tiny._replica_config.placement_group_strategy == "SPREAD"
    assert full._deployment_config.autoscaling_config.max_replicas == 5
    assert full._replica_config.max_replicas_per_node == 1
    assert (router.num_replicas, router.ray_actor_options["num_cpus"]) == (2, 0)
    assert router.max_queued_requests == 256


def deployments(config: CascadeConfig | dict[str, Any]) -> list[serve.Deployment]:
    """Those of the application, tiers bottom to top, then the router."""
    application = call_builder(build, config)
    router = application._bound_deployment
    handles = router.init_args[1]
    return [*(handle._bound_deployment for handle in handles.values()), router]


@pytest.mark.parametrize(
    ("deployment", "router", "prefers"),
    [({}, {}, False), ({"num_replicas": 2}, {}, True), ({"num_replicas": 2}, {"prefix_affinity": False}, False)],
)
def test_only_full_tiers_of_several_replicas_are_preferred(
    deployment: dict[str, Any], router: dict[str, Any], prefers: bool
) -> None:
    """Guards Serve's own choice everywhere else, and the switch."""
    values = {"tiers": [tier("tiny", deployment_config={"num_replicas": 3}), tier(deployment_config=deployment)]}
    tiny, full, _ = deployments(CascadeConfig.parse({**values, "router": router, "verify": False}))
    chosen = [router_class._deployment_config.request_router_config.request_router_class for router_class in (tiny, full)]
    assert ["Preferring" in str(router_class) for router_class in chosen] == [False, prefers]


def test_tiers_get_handles_of_those_below() -> None:
    """Guards the shape of the application: every tier can lease every lower one, and none above."""
    *tiers, _ = deployments(CascadeConfig.parse({"tiers": [tier("a"), tier("b"), tier("c")], "verify": False}))
    assert [deployment.init_args[1] for deployment in tiers] == ["a", "b", "c"]
    assert [list(deployment.init_args[2]) for deployment in tiers] == [[], ["a"], ["a", "b"]]


THIRD = {"deployment_config": {"ray_actor_options": {"num_gpus": 0.3}}}


@pytest.mark.parametrize(
    ("fields", "num_gpus", "memory"),
    [
        ({}, None, 0.9),
        ({"accelerator_type": "L4"}, 1, 0.9),
        ({"accelerator_type": "L4", **THIRD}, 0.3, 0.27),
        ({**THIRD, "engine_kwargs": {"gpu_memory_utilization": 0.5}}, 0.3, 0.5),
    ],
)
def test_replicas_take_what_they_have_of_a_gpu(fields: dict[str, Any], num_gpus: float | None, memory: float) -> None:
    """Guards GPUs: a type brings one unless the actor says otherwise; tiers that share one took nine tenths of it each."""
    [parsed] = CascadeConfig.parse(single(**fields)).tiers
    actor = tier_options(parsed)["ray_actor_options"]
    assert (actor.get("num_gpus"), actor.get("accelerator_type")) == (num_gpus, fields.get("accelerator_type"))
    assert parsed.gpu_memory_utilization == pytest.approx(memory)


@pytest.mark.parametrize(
    ("first", "second", "shared"),
    [
        (acting(), acting(), True),
        (acting(), acting(num_gpus=1), False),
        (acting(), acting(num_gpus=0.5), False),
        (acting(num_gpus=0.5), acting(num_gpus=0.5), True),
        (acting(num_gpus=0.7), acting(num_gpus=0.5), False),
        (acting(num_cpus=6), acting(num_cpus=2), True),
        (acting(num_cpus=7), acting(num_cpus=2), False),
        (acting(num_cpus=9), acting(num_cpus=2), True),
        (acting(resources={"left": 1}), acting(resources={"right": 1}), False),
        # whole GPUs and engines that compute elsewhere
        (acting(), single(placement_group_config={"bundles": [{"GPU": 2}]}), False),
        (acting(), engine(engine="package.module:load"), False),
    ],
)
def test_processors_are_shared_by_those_that_fit_one_device(first: Any, second: Any, *, shared: bool) -> None:
    """Guards where drafting begins: a tier below with a device of its own was taken to slow this one, or another not to."""
    [first], [second] = (CascadeConfig.parse(values).tiers for values in (first, second))
    nodes = [{"CPU": 8.0, "left": 1.0}, {"CPU": 8.0, "right": 1.0}]
    assert app.shares_processors(first, second, nodes) is shared
    assert app.shares_processors(second, first, nodes) is shared


# models that do not belong together


def trio(*sources: str, **fields: Any) -> dict[str, Any]:
    return {"tiers": [tier(f"t{i}", source) for i, source in enumerate(sources)], **fields}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Models without weights, by what is special about them."""
    folder = tmp_path_factory.mktemp("models")
    for name in ("plain", "short", "other", "broken"):
        shutil.copytree(small.paths()[0], folder / name, ignore=shutil.ignore_patterns("*.safetensors"))
    config = json.loads((folder / "plain" / "config.json").read_text())
    (folder / "short" / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 32}))
    (folder / "broken" / "config.json").write_text("{")
    backend = pretrained(str(folder / "plain"))
    backend.add_tokens(["surprise"])
    backend.save_pretrained(folder / "other")
    (folder / "empty").mkdir()
    return folder


def test_tiers_that_belong_together_are_taken(folder: Path) -> None:
    """Guards against refusing what works."""
    plain, short = str(folder / "plain"), str(folder / "short")
    for values in (trio(plain, plain), trio(short, plain), trio(short, plain, max_model_len=32)):
        assert len(deployments(values)) == 3


@pytest.mark.parametrize("engine", ["cascade", "vllm"])
def test_layers_that_a_model_has_not_are_refused(folder: Path, engine: str) -> None:
    """Guards the start of a server: layers of a larger model are told before anything starts; a model's own are taken."""

    def parsed(layers: Any) -> CascadeConfig:
        values = trio(str(folder / "plain"), str(folder / "plain"))
        values["tiers"][0]["engine_kwargs"] = {"layers": layers, "engine": engine}
        return CascadeConfig.parse(values)

    whole, part = needs(parsed(["0-1"]))[::-1]
    assert part.anatomy.parameters < whole.anatomy.parameters
    with pytest.raises(ConfigError, match=r"tier t0 cannot be used: layers are 0-40, and the model has \d+: they go from 0 to"):
        verify(parsed(["0-40"]))


APART: list[tuple[tuple[str, ...], dict[str, Any], str]] = [  # folders of models, more of the configuration, words
    (("other", "plain"), {}, r"Tier t0 .*other.* tier t1 .*plain.* different tokenizers: choose"),
    (("short", "plain"), {"max_model_len": 33}, r"max_model_len is 33, but tier t0 takes 32 tokens: lower it"),
    (("empty", "plain"), {}, r"tier t0 .*empty"),
    (("broken", "plain"), {}, r"tier t0 .*broken"),
    (("/no/such/model",), {}, r"tier t0 cannot be used: .*There is no folder.*folder"),
]


@pytest.mark.parametrize(("sources", "fields", "words"), APART)
def test_models_that_do_not_belong_together_are_refused(
    folder: Path, sources: tuple[str, ...], fields: dict[str, Any], words: str
) -> None:
    """Guards the start of a server: drafts that mean other texts, broken promises, folders that are no models."""
    with pytest.raises(ConfigError, match=words) as caught:
        build(trio(*(str(folder / source) for source in sources), **fields))
    one_sentence(caught)


# the files of cluster/


def applications(path: Path) -> ServeDeploySchema:
    return ServeDeploySchema.model_validate(yaml.safe_load(path.read_text()))


@pytest.mark.parametrize("path", SERVE_FILES, ids=lambda path: path.stem)
def test_serve_files_can_be_deployed(small_demo: None, path: Path) -> None:
    """Guards the files of cluster/serve: Ray Serve's schema takes them and the builder takes their args."""
    schema = applications(path)
    assert schema.grpc_options.grpc_servicer_functions == [SERVICER]
    [application] = schema.applications
    assert application.import_path == f"{app.__name__}:{build.__name__}"
    is_demo = all(tier["model_loading_config"].get("model_source") for tier in application.args["tiers"])
    args = dict(application.args) if is_demo else {**application.args, "verify": False}
    assert [deployment.name for deployment in deployments(args)] == ["tiny", "medium", "full", "router"]
    assert CascadeConfig.parse(application.args).verify


def test_demo_file_is_the_demo() -> None:
    """Guards `cascade demo` and cluster/serve/demo.yaml against drifting apart."""
    [application] = applications(CLUSTER / "serve" / "demo.yaml").applications
    assert CascadeConfig.parse(application.args) == CascadeConfig.demo()


def test_routers_are_told_the_limits_of_all_models() -> None:
    """Guards the longest text against depending on which tiers answer: it is known when the application is built."""
    *_, limits = build(small.config())._bound_deployment.init_args
    assert limits == {name: {"context_len": 1024, "vocab_size": 4096} for name in small.NAMES}
    *_, limits = build({"tiers": [tier()], "verify": False})._bound_deployment.init_args
    assert limits == {}


def test_routers_must_have_keys_where_their_builder_has(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards a cluster whose nodes were not told the keys of the process that deploys: its routers answered everybody."""

    def required() -> bool:
        values, *_ = build(small.config())._bound_deployment.init_args
        return bool(values["router"]["access"]["required"])

    monkeypatch.delenv("CASCADE_API_KEYS", raising=False)
    assert not required()
    monkeypatch.setenv("CASCADE_API_KEYS", "alice=alice-0123456789abcdef")
    assert required()


@pytest.mark.parametrize(("free", "expected"), [(None, 0), (0.25, 0), (0.5, SURGE_PERCENT)])
def test_new_replicas_start_before_old_ones_go(monkeypatch: pytest.MonkeyPatch, free: float | None, expected: int) -> None:
    """Guards requests while a configuration is exchanged: old replicas went first; where there is no room they must."""
    monkeypatch.setattr(app.ray, "is_initialized", lambda: free is not None)
    monkeypatch.setattr(app.ray, "available_resources", lambda: {"CPU": free})
    monkeypatch.setattr(app.ray, "nodes", list)
    monkeypatch.setattr(ray_compat, "ray", SimpleNamespace(is_initialized=lambda: False))
    values = small.config().model_dump(mode="json")
    values["tiers"][-1]["deployment_config"]["max_surge_percent"] = 50
    surges = [deployment._deployment_config.max_surge_percent for deployment in deployments(values)]
    assert surges == [expected, expected, 50, 100]


def test_drafters_are_named_in_many_ways() -> None:
    """Guards the short forms of `drafter`: a kind, a list, a mapping, nothing."""

    def named(drafter: Any) -> tuple[DrafterSpec, ...]:
        return CascadeConfig.parse(single(engine_kwargs={"drafter": drafter})).tiers[0].engine_kwargs.drafters

    assert named("auto") == named(["suffix"]) == CascadeConfig.parse(single()).tiers[0].engine_kwargs.drafters
    assert named([]) == named(None) == ()
    corpus = {"kind": "corpus", "source": "a.txt"}
    assert named(["suffix", corpus]) == (DrafterSpec("suffix"), DrafterSpec("corpus", "a.txt"))
    config = CascadeConfig.parse({"tiers": [tier("a", "x/y"), tier("b") | {"engine_kwargs": {"drafter": ["auto", corpus]}}]})
    assert config.drafters == ("suffix", "corpus")
    assert config.chain_names == ("suffix", "corpus", "a", "b")
    assert CascadeConfig.parse(json.loads(json.dumps(config.model_dump(mode="json")))) == config  # on its way to a replica


def test_drafters_begin_at_the_revision_that_is_pinned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards drafters that learn: learner and rollback took the newest weights of the hub, not those that serve."""
    model = tmp_path / "models--some--model"
    folders = {name: model / "snapshots" / (name * 40) for name in "ab"}
    for ref, folder in zip(("v1", "main"), folders.values(), strict=True):
        folder.mkdir(parents=True)
        (folder / "config.json").write_text("{}")
        (model / "refs").mkdir(exist_ok=True)
        (model / "refs" / ref).write_text(folder.name)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    below = tier("tiny", model_loading_config={"model_id": "some/model"}, engine_kwargs={"revision": "v1"})
    above = tier("full", engine_kwargs={"layers": 2})
    config = CascadeConfig.parse({"tiers": [below, above], "alignment": {"folder": str(tmp_path / "learnt")}})
    no_student = Versions(tmp_path / "learnt" / "full")  # its weights do not serve
    no_student.choose(no_student.add(lambda folder: None))
    assert config.lesson("tiny") == ("some/model", config.beginning("tiny"), (0, 1))
    assert config.beginning("tiny") == str(folders["a"])
    lost = CascadeConfig.parse({"tiers": [below | {"engine_kwargs": {"revision": "v2"}}, tier("full")]})
    with pytest.raises(ModelError, match="Revision 'v2' of 'some/model' cannot be loaded"):
        lost.beginning("tiny")


def test_cores_that_are_not_there_are_named() -> None:
    """Guards `cpu_affinity`: Linux says "Invalid argument" if no core is there, and binds to the others if one is."""
    core = max(os.sched_getaffinity(0)) + 1
    for cores in ([core], [min(os.sched_getaffinity(0)), core]):
        with pytest.raises(ConfigError, match=f"cpu_affinity names core {core}, and this process has"):
            bind_threads(EngineKwargs(cpu_affinity=cores))


def test_threads_that_have_ended_need_no_core(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards the start of a tier with `cpu_affinity`: a thread that ended while all were bound made it fail."""
    ended = threading.Thread()
    ended.start()
    ended.join()
    monkeypatch.setattr(Path, "iterdir", lambda folder: iter([folder / str(ended.native_id)]))
    bind_threads(EngineKwargs(cpu_affinity=sorted(os.sched_getaffinity(0))))
