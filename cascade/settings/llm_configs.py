"""Reads configurations from files, also those of Ray Serve LLM (`ray.serve.llm:build_openai_app`) with tiers below a model."""

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, with_config
from typing_extensions import TypedDict

from cascade.errors import ConfigError
from cascade.settings.config import CascadeConfig
from cascade.settings.deployment import ActorOptions
from cascade.settings.engine import EngineKwargs, ModelLoadingConfig
from cascade.settings.section import NUMERIC, Count, Number, Section, sentence

Values = dict[str, Any]
FULL = "full"  # name of the tier that runs the model itself
KEPT = {"enable_prefix_caching": True, "pipeline_parallel_size": 1}  # fields of which only this value is supported
# fields without effect: calls are found by the model's chat template, and metrics are those of the cascade
NO_EFFECT = ("enable_auto_tool_choice", "tool_call_parser", "log_engine_metrics")
TOOL_FORMATS = {"hermes": "hermes", "mistral": "mistral", "llama3_json": "llama3"}  # tool_format by vLLM's tool_call_parser

log = logging.getLogger(__name__)


@with_config(ConfigDict(extra="allow"))
class VllmOptions(TypedDict, total=False):
    """`engine_kwargs`, as far as this package reads them."""

    tensor_parallel_size: Count


@with_config(ConfigDict(extra="allow"))
class ServeOptions(TypedDict, total=False):
    """`deployment_config`, as far as this package reads it."""

    ray_actor_options: ActorOptions | None


class Loading(ModelLoadingConfig):
    """`ModelLoadingConfig` of Ray Serve LLM."""

    tokenizer_source: str | None = None


class Accelerator(Section):
    """`accelerator_config`."""

    kind: Literal["gpu", "cpu"]


class Lora(Section):
    """`LoraConfig`; adapters are subfolders of a folder."""

    dynamic_lora_loading_path: str | None = None
    max_num_adapters_per_replica: Count = 16


class Experimental(Section):
    """`experimental_configs`."""

    num_ingress_replicas: Count | None = None
    stream_batching_interval_ms: Annotated[int, Field(ge=0, le=0), NUMERIC] | None = None  # pieces are never held back


class Placement(Section):
    """`placement_group_config`."""

    bundle_per_worker: dict[str, Number] | None = None
    bundles: list[dict[str, Number]] | None = None
    strategy: str = "PACK"


class TierBelow(Section):
    """A smaller model that drafts; also the keys that it shares with `Model`."""

    name: str | None = None  # by default tier0, tier1, ... bottom to top
    model_loading_config: Loading
    engine_kwargs: VllmOptions = Field(default_factory=VllmOptions)
    accelerator_type: str | None = None
    accelerator_config: Accelerator | None = None
    placement_group_config: Placement | None = None
    deployment_config: ServeOptions = Field(default_factory=ServeOptions)
    runtime_env: Values | None = None


class Model(TierBelow):
    """`LLMConfig`, and the ``tiers`` below the model."""

    tiers: tuple[TierBelow, ...] = ()
    llm_engine: Literal["vLLM"] | None = None
    lora_config: Lora | None = None
    experimental_configs: Experimental = Experimental()
    log_engine_metrics: bool = True


class Serving(Section):
    """`LLMServingArgs`."""

    llm_configs: Annotated[tuple[Model, ...], Field(min_length=1)]
    ingress_deployment_config: Values = Field(default_factory=dict)


def cascades(args: Mapping[str, Any]) -> tuple[dict[str, CascadeConfig], Values]:
    """The cascade of each model by its ``model_id``, and the options of the common ingress of several models."""
    if not isinstance(args, Mapping) or not isinstance(args.get("llm_configs"), Sequence):
        raise ConfigError("build_openai_app takes a mapping with the key 'llm_configs', a list of models")
    listed = [args["llm_configs"]] if isinstance(args["llm_configs"], str) else args["llm_configs"]
    models = [_values(entry) for entry in listed]
    try:
        serving = Serving.model_validate({**args, "llm_configs": models})
    except ValidationError as error:
        numbers = [part for part in error.errors()[0]["loc"][1:2] if isinstance(part, int)]
        files = [listed[number] for number in numbers if isinstance(listed[number], str)]
        raise ConfigError(f"{files[0] if files else 'build_openai_app'}: {sentence(error, Serving)}") from None
    names = [model.model_loading_config.model_id for model in serving.llm_configs]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise ConfigError(f"Two of llm_configs have the model_id {twice!r}: give each its own")
    replicas = [model.experimental_configs.num_ingress_replicas for model in serving.llm_configs]
    num = max((number for number in replicas if number is not None), default=None)
    ingress = ({} if num is None else {"num_replicas": num}) | serving.ingress_deployment_config
    router = {"deployment_config": ingress} if len(names) == 1 else {}
    return {name: _cascade(model, router) for name, model in zip(names, serving.llm_configs, strict=True)}, ingress


def _values(model: Any) -> Any:
    """A model as a mapping; read from a file if it is a path."""
    if isinstance(model, BaseModel):
        return model.model_dump(mode="json", exclude_unset=True)
    return read_yaml(Path(model)) if isinstance(model, str) else model


class _Loader(yaml.SafeLoader):
    """Refuses keys that are given twice; YAML's own loader would silently take the last value."""

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        node = super().compose_mapping_node(anchor)
        keys = [key.value for key, _ in node.value]
        for place, (key, _) in enumerate(node.value):
            if key.value in keys[:place]:
                raise yaml.constructor.ConstructorError(None, None, f"{key.value!r} is given twice", key.start_mark)
        return node


def read_yaml(path: Path) -> Any:
    """The values in a file; raises `ConfigError`."""
    try:
        return yaml.load(path.read_text(encoding="utf-8"), _Loader)
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from None
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        place = "" if mark is None else f", line {mark.line + 1}, column {mark.column + 1}"
        problem = f"{error.context} {error.problem}" if str(error.problem).startswith("but ") else error.problem
        raise ConfigError(f"{path} is not YAML: {problem}{place}") from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is not YAML: {' '.join(str(error).split())}") from None


def _cascade(model: Model, router: Values) -> CascadeConfig:
    """The cascade of one model and its tiers below."""
    name, given = model.model_loading_config.model_id, dict[str, Any](model.engine_kwargs)
    full = _tier(model, FULL)
    engine = full["engine_kwargs"]
    if model.llm_engine is not None:
        engine["engine"] = "vllm"
    if model.lora_config is not None and (path := model.lora_config.dynamic_lora_loading_path):
        engine |= {"lora_path": path, "max_loras": model.lora_config.max_num_adapters_per_replica}
    parser = given.get("tool_call_parser")
    router = router | ({"tool_format": TOOL_FORMATS[parser]} if parser in TOOL_FORMATS else {})
    lower = [_tier(tier, tier.name or f"tier{level}") for level, tier in enumerate(model.tiers)]
    values: Values = {"tiers": [*lower, full], "router": router}
    if "max_model_len" in given:
        values["max_model_len"] = given["max_model_len"]
    return CascadeConfig.parse(values, f"Model {name!r}")


def _tier(model: TierBelow, name: str) -> Values:
    """Values of a tier. As in Ray Serve LLM, it takes a GPU for each rank by default."""
    loading, engine = model.model_loading_config, dict[str, Any](model.engine_kwargs)
    source = loading.model_source or loading.model_id
    if loading.tokenizer_source not in (None, source):
        raise ConfigError(
            f"tokenizer_source of {loading.model_id!r} is {loading.tokenizer_source!r}: remove it, a model has its own"
        )
    for key, value in KEPT.items():
        if (given := engine.pop(key, value)) != value:
            raise ConfigError(f"{key} of {loading.model_id!r} is {given!r}: a cascade takes only {value!r}")
    lora = getattr(model, "lora_config", None)
    if engine.pop("enable_lora", True) is False and lora is not None:
        raise ConfigError(f"enable_lora of {loading.model_id!r} is False beside its lora_config: remove one of the two")
    unused = [key for key in NO_EFFECT if engine.pop(key, None) is not None]
    if unused:
        log.warning("engine_kwargs of %r without effect here: %s", loading.model_id, ", ".join(unused))
    longest = engine.pop("max_model_len", None)
    if set(engine) - set(EngineKwargs.model_fields):  # other keys are vLLM's
        engine.setdefault("engine", "vllm")
    if engine.get("engine") == "vllm" and longest is not None:
        engine["max_model_len"] = longest
    ranks = engine.get("tensor_parallel_size", 1)
    deployment = dict[str, Any](model.deployment_config)
    actor = dict[str, Any](deployment.get("ray_actor_options") or {})
    if model.runtime_env is not None:
        if "runtime_env" in actor:
            raise ConfigError(f"{loading.model_id!r} has runtime_env twice, also in ray_actor_options: remove one of them")
        actor["runtime_env"] = model.runtime_env
    placement: Values | None = None
    if (group := model.placement_group_config) is not None:
        if (group.bundles is None) == (group.bundle_per_worker is None):
            raise ConfigError("placement_group_config: give either bundles or bundle_per_worker")
        bundles: list[Any] = group.bundles or [group.bundle_per_worker] * ranks  # one for each rank
        placement = {"bundles": bundles, "strategy": group.strategy}
    cpu = model.accelerator_config is not None and model.accelerator_config.kind == "cpu"
    if not (cpu or placement or engine.get("device") == "cpu" or engine.get("emulated")):
        actor.setdefault("num_gpus", ranks)
    accelerator = {"A10": "A10G"}.get(model.accelerator_type or "", model.accelerator_type)
    return {
        "name": name,
        "model_loading_config": {"model_id": loading.model_id, "model_source": source},
        "engine_kwargs": engine,
        "accelerator_type": accelerator,
        "placement_group_config": placement,
        "deployment_config": deployment | {"ray_actor_options": actor},
    }


def load_config(path: Path) -> CascadeConfig:
    """Read a YAML file, also one of Ray Serve LLM, or one for ``serve deploy`` with one cascade. Raises `ConfigError`."""
    values = read_yaml(path)
    if isinstance(values, Mapping) and isinstance(values.get("applications"), list):
        arguments = [value.get("args") for value in values["applications"] if isinstance(value, Mapping)]
        found = [value for value in arguments if isinstance(value, Mapping) and {"tiers", "llm_configs"} & value.keys()]
        if len(found) != 1:
            raise ConfigError(f"{path} has {len(found)} applications with tiers or llm_configs: give a file with one")
        [values] = found
    if not (isinstance(values, Mapping) and "llm_configs" in values):
        return CascadeConfig.parse(values, str(path))
    try:
        [config, *others] = cascades(values)[0].values()
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None
    if others:
        raise ConfigError(
            f"{path} has {1 + len(others)} llm_configs: give a file with one, or deploy it by `serve deploy` with "
            "import_path deployments.llm:build_openai_app"
        )
    return config
