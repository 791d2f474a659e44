"""Configuration of a served cascade. Names are those that users of Ray Serve LLM know.

tiers:                                # bottom to top; the last is the full one
  - name: tiny
    model_loading_config: {model_id: Qwen/Qwen3-0.6B}
    deployment_config: {ray_actor_options: {num_gpus: 1}}
  - name: full
    model_loading_config: {model_id: qwen3-32b, model_source: /models/qwen3-32b}
    engine_kwargs: {dtype: bfloat16}
    accelerator_type: H100
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import yaml
from pydantic import BeforeValidator, Field, ValidationError, field_validator, model_validator
from pydantic_core import ErrorDetails

from cascade import family
from cascade.chain.planner import Policy
from cascade.drafters import AUTO, DrafterSpec, head_of, specs
from cascade.engine.sharing import sharing_problem
from cascade.errors import ConfigError
from cascade.params import DEFAULT_WINDOW, MAX_WINDOW
from cascade.settings.emulated import EmulatedConfig, emulation_problem
from cascade.settings.section import Section

MAX_PROMPTS = 4096  # of one request, whatever a server's limits
MAX_ANSWERS = 1024  # for each prompt
KINDS_OF_VALUES = ("constrained-", "literal[")  # begin the names that pydantic adds to the places of values of several kinds
EMBEDDED = "embedded:"  # begins sources of the embedded family, such as embedded:tiny
MAX_TIERS = 5
GPU_MEMORY = 0.9  # that weights and caches take, the rest is for passes
RANK_DEVICES = ("cpu", "cuda")  # each rank has its own, so no number is named
OF_MODELS = ("dtype", "quantization", "lora_modules", "gpu_memory_utilization")  # of engine_kwargs, not for toys


class ModelLoadingConfig(Section):
    """Where a tier's model comes from."""

    model_id: Annotated[str, Field(min_length=1)]  # its name, and its source unless one is given
    model_source: Annotated[str, Field(min_length=1)] | None = (
        None  # local path, hub id, or embedded:tiny, embedded:medium, embedded:full
    )

    @property
    def source(self) -> str:
        """What `from_pretrained` takes."""
        source = self.model_source or self.model_id
        return resolved(source)

    @field_validator("model_id", "model_source")
    @classmethod
    def _known(cls, source: str | None) -> str | None:
        if source and source.startswith(EMBEDDED) and source.removeprefix(EMBEDDED) not in family.NAMES:
            raise ValueError(f"the embedded models are {', '.join(EMBEDDED + name for name in family.NAMES)}")
        return source


def resolved(source: str) -> str:
    """A path or hub id; that of the embedded family if it is meant."""
    return str(family.WEIGHTS / source.removeprefix(EMBEDDED)) if source.startswith(EMBEDDED) else source


class DrafterConfig(Section):
    """What guesses inside a tier, see `cascade.drafters`."""

    kind: Literal[
        "auto",
        "lookup",
        "suffix",
        "recycling",
        "lookahead",
        "corpus",
        "head",
        "medusa",
        "eagle",
        "eagle3",
        "mtp",
        "dflash",
        "dspark",
        "exit",
    ] = "auto"
    # of a corpus a text file, of a head a path or hub id, or embedded:eagle3; of mtp the model's own checkpoint if not given
    source: Annotated[str, Field(min_length=1)] | None = None
    # of "exit": it runs the first so many of its model, or all but some; those that pay best if neither is named
    layers: Annotated[int, Field(ge=1)] | None = None
    skip: Annotated[tuple[Annotated[int, Field(ge=0)], ...], Field(min_length=1)] | None = None

    @model_validator(mode="after")
    def _makes_sense(self) -> Self:
        if self.kind != AUTO:
            try:
                self.spec  # noqa: B018  # finds out
            except ConfigError as error:
                raise ValueError(str(error)) from None
        elif self.source:
            raise ValueError("a source needs its kind beside it; 'head' finds out which one it is")
        elif self.layers or self.skip:
            raise ValueError("layers and skip need their kind beside them, 'exit'")
        return self

    @property
    def spec(self) -> DrafterSpec:
        """The drafter, if it is not "auto"."""
        return DrafterSpec(self.kind, resolved(self.source or ""), self.layers, self.skip or ())


def _listed(chosen: Any) -> Any:
    """A drafter may be named by its kind alone, and need not be a list of one."""
    several = [] if chosen is None else chosen if isinstance(chosen, list | tuple) else [chosen]
    return [{"kind": one} if isinstance(one, str) else one for one in several]


class EngineKwargs(Section):
    """How a replica runs its model."""

    # the checkpoint's if not given, or float32 on processors that are slow with 16 bits
    dtype: Literal["float32", "bfloat16", "float16"] | None = None
    device: str | None = None  # the GPU if there is one
    revision: str | None = None
    trust_remote_code: bool = False
    quantization: Literal["int8", "int4", "fp8", "nf4"] | None = None  # of the weights, see docs/models.md
    lora_modules: dict[Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]+$")], Annotated[str, Field(min_length=1)]] = Field(
        default_factory=dict
    )  # adapters of the full tier that requests may name: paths or hub ids
    tensor_parallel_size: Annotated[int, Field(ge=1)] = 1  # ranks that share the model, each with its own resources
    num_threads: Annotated[int, Field(ge=1)] | None = None  # CPU threads of a pass
    cpu_affinity: Annotated[tuple[Annotated[int, Field(ge=0)], ...], Field(min_length=1)] | None = (
        None  # cores the replica is bound to, each of its ranks
    )
    max_pass_tokens: Annotated[int, Field(ge=1)] = 512
    cache_tokens: Annotated[int, Field(ge=16)] | None = None  # positions of keys and values; what the device has room for
    gpu_memory_utilization: Annotated[float, Field(gt=0, le=1)] | None = None  # see `TierConfig.gpu_memory_utilization`
    drafter: Annotated[tuple[DrafterConfig, ...], BeforeValidator(_listed)] = (DrafterConfig(),)  # kinds that guess here
    patience: Annotated[float, Field(ge=0)] | None = None  # longest wait for guesses, as a share of one pass
    max_guesses: Annotated[int, Field(ge=1, le=MAX_WINDOW)] | None = None  # scored in one pass at most
    emulated: EmulatedConfig | None = None  # a fake device, for benchmarks alone

    @model_validator(mode="after")
    def _drafts_plainly(self) -> Self:
        try:
            head = head_of(self.drafters)
        except ConfigError as error:
            raise ValueError(str(error)) from None
        if head and (self.tensor_parallel_size > 1 or self.lora_modules):
            other = "lora_modules" if self.lora_modules else f"tensor_parallel_size is {self.tensor_parallel_size}"
            raise ValueError(f"drafter {head.kind!r} reads a whole model without adapters, and {other}: remove one of the two")
        return self

    @model_validator(mode="after")
    def _emulated_plainly(self) -> Self:
        if self.emulated is None:
            return self
        if self.device not in (None, "cpu"):
            raise ValueError(f"device is {self.device!r}, and an emulated one is beside the CPU: remove one of the two")
        if self.tensor_parallel_size > 1:
            raise ValueError(
                f"tensor_parallel_size is {self.tensor_parallel_size}, and emulated is the only device of a replica: "
                "remove one of the two"
            )
        given = [name for name in OF_MODELS if getattr(self, name)] + ["drafter"] * bool(head_of(self.drafters))
        if self.is_toy and given:
            raise ValueError(f"{given[0]} is for a model, and emulated.agreement makes the tier a toy: remove one of the two")
        return self

    @property
    def is_toy(self) -> bool:
        """Whether the tier runs no model, see `EmulatedConfig`."""
        return self.emulated is not None and self.emulated.agreement is not None

    @property
    def drafters(self) -> tuple[DrafterSpec, ...]:
        """What guesses inside the tier."""
        return specs(AUTO if one.kind == AUTO else one.spec for one in self.drafter)

    @model_validator(mode="after")
    def _shared_plainly(self) -> Self:
        if problem := sharing_problem(self.tensor_parallel_size, self.quantization, self.lora_modules):
            raise ValueError(problem)
        if self.tensor_parallel_size > 1 and self.device not in (None, *RANK_DEVICES):
            raise ValueError(
                f"device is {self.device!r}, but each of {self.tensor_parallel_size} ranks has a device of its own: "
                f"say {' or '.join(RANK_DEVICES)}, or nothing"
            )
        return self

    @property
    def policy(self) -> Policy:
        """When to start a pass."""
        chosen = {"patience": self.patience, "max_guesses": self.max_guesses}
        return Policy(**{name: value for name, value in chosen.items() if value is not None})  # type: ignore[arg-type]


class DeploymentConfig(Section):
    """Options of the Ray Serve deployment, handed on as they are."""

    num_replicas: Annotated[int, Field(ge=1)] | Literal["auto"] | None = None
    autoscaling_config: dict[str, Any] | None = None
    ray_actor_options: dict[str, Any] = Field(default_factory=dict)
    max_ongoing_requests: Annotated[int, Field(ge=1)] = 256
    max_queued_requests: Annotated[int, Field(ge=-1)] = -1
    max_replicas_per_node: Annotated[int, Field(ge=1)] | None = None
    health_check_period_s: Annotated[float, Field(gt=0)] = 2.0
    health_check_timeout_s: Annotated[float, Field(gt=0)] = 30.0
    graceful_shutdown_timeout_s: Annotated[float, Field(ge=0)] = 20.0
    graceful_shutdown_wait_loop_s: Annotated[float, Field(gt=0)] = 0.2
    max_surge_percent: Annotated[int, Field(ge=0, le=100)] = 0  # replicas that start before old ones go, where there is room


class TierConfig(Section):
    """One tier: a model and its deployment."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_-]{0,31}$")]
    model_loading_config: ModelLoadingConfig
    engine_kwargs: EngineKwargs = EngineKwargs()
    accelerator_type: str | None = None  # such as L4, A100, H100
    placement_group_config: dict[str, Any] | None = None  # bundles, strategy
    deployment_config: DeploymentConfig = DeploymentConfig()

    @property
    def gpu_memory_utilization(self) -> float:
        """What the replica may take of a GPU's memory, weights and cache together: by default 0.9 of what it has of the GPU."""
        num_gpus = self.deployment_config.ray_actor_options.get("num_gpus") or 1
        return self.engine_kwargs.gpu_memory_utilization or GPU_MEMORY * min(num_gpus, 1)


class RouterDeploymentConfig(DeploymentConfig):
    """The same for the router, which refuses what it cannot take."""

    max_queued_requests: Annotated[int, Field(ge=-1)] = 256
    graceful_shutdown_timeout_s: Annotated[float, Field(ge=0)] = 60.0  # for what it writes to end; behind it Serve kills it
    max_surge_percent: Annotated[int, Field(ge=0, le=100)] = 100  # takes no GPU


class KeyLimits(Section):
    """What the requests of one API key may take together."""

    max_running: Annotated[int, Field(ge=1)] | None = None  # answers at once
    tokens_per_minute: Annotated[int, Field(ge=1)] | None = None  # of prompts and answers


class AccessConfig(Section):
    """Who may ask. Keys stand in a file or an environment variable of the router, one NAME=KEY a line; never in here."""

    keys_file: Annotated[str, Field(min_length=1)] | None = None
    keys_env: Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")] = "CASCADE_API_KEYS"  # open to all if neither is set
    limits: dict[str, KeyLimits] = Field(default_factory=dict)  # by the name of the key
    default_limits: KeyLimits = KeyLimits()  # of keys that are not named there
    log: bool = True  # one line for each request that is over, without its words


class RequestLimits(Section):
    """How much one request may ask for."""

    max_body_bytes: Annotated[int, Field(ge=1024)] = 16 * 2**20  # of an HTTP body or a gRPC message
    max_prompt_chars: Annotated[int, Field(ge=1)] = 4_000_000
    max_prompts: Annotated[int, Field(ge=1, le=MAX_PROMPTS)] = 64  # in one HTTP request
    max_n: Annotated[int, Field(ge=1, le=MAX_ANSWERS)] = 16  # answers for each prompt
    max_tokens: Annotated[int, Field(ge=1)] | None = None  # output tokens of each answer; the models' context if not given
    body_timeout_s: Annotated[float, Field(gt=0)] = 30.0  # to send a request's head and body
    read_timeout_s: Annotated[float, Field(gt=0)] = 60.0  # a client that takes nothing for so long is dropped


class DoorTLS(Section):
    """TLS towards clients. Paths of PEM files where the router runs."""

    certificate: Annotated[str, Field(min_length=1)]  # and the chain behind it, for the name or address that clients use
    key: Annotated[str, Field(min_length=1)]


class ListenConfig(Section):
    """Servers in the router's own process, instead of Ray Serve's proxies."""

    host: Annotated[str, Field(min_length=1)] = "127.0.0.1"
    grpc_port: Annotated[int, Field(ge=1, le=65535)] = 9000
    http_port: Annotated[int, Field(ge=1, le=65535)] = 8000
    tls: DoorTLS | None = None  # both doors; plain unless given


class RouterConfig(Section):
    """The ingress: gRPC and HTTP."""

    deployment_config: RouterDeploymentConfig = RouterDeploymentConfig()
    stall_timeout_s: Annotated[float, Field(gt=0)] = 120.0  # a request without progress for so long is given up
    max_running: Annotated[int, Field(ge=1)] = 256  # answers that one router writes at once
    max_waiting: Annotated[int, Field(ge=0)] = 256  # that wait for their turn; more are refused
    held_lease_s: Annotated[float, Field(ge=0, le=8)] = 5.0  # how long a full replica is held for the next request; 0: never
    tool_format: Literal["hermes", "mistral", "mistral11", "llama3", "json"] | None = (
        None  # of calls; what the chat template writes
    )
    listen: ListenConfig | None = None  # Ray Serve's proxies alone unless given; `cascade serve` gives it
    access: AccessConfig = AccessConfig()
    limits: RequestLimits = RequestLimits()


class LinkTLS(Section):
    """Mutual TLS between the processes of the cascade. Paths of PEM files, the same wherever a tier or a router runs."""

    certificate: Annotated[str, Field(min_length=1)]  # and the chain behind it; each process shows it, as server and as client
    key: Annotated[str, Field(min_length=1)]
    authority: Annotated[str, Field(min_length=1)]  # whose certificates are trusted, and no others
    server_name: Annotated[str, Field(min_length=1)] = (
        "cascade-link"  # all certificates are for it: replicas have no host names
    )


class CascadeConfig(Section):
    """A whole cascade."""

    tiers: Annotated[tuple[TierConfig, ...], Field(min_length=1, max_length=MAX_TIERS)]
    router: RouterConfig = RouterConfig()
    window: Annotated[int, Field(ge=1, le=MAX_WINDOW)] = DEFAULT_WINDOW  # tokens a lower tier may run ahead
    max_model_len: Annotated[int, Field(ge=2)] | None = None  # prompt and output, tokens; the shortest context if not given
    link_tls: LinkTLS | None = None  # without it links are not encrypted; secrets guard them either way
    lossy: bool = False  # requests may ask for rules that change the law of texts, such as "typical"
    verify: bool = True  # compare tokenizers and contexts before anything starts

    @model_validator(mode="after")
    def _unique_names(self) -> Self:
        names = [tier.name for tier in self.tiers]
        twice = next((name for name in names if names.count(name) > 1), None)
        if twice:
            raise ValueError(f"two tiers are named {twice!r}; give each its own name")
        lower = next((tier for tier in self.tiers[:-1] if tier.engine_kwargs.lora_modules), None)
        if lower:
            raise ValueError(
                f"lora_modules of tier {lower.name!r}: only the full tier, the last one, takes adapters; remove them"
            )
        if common := {*names} & {*self.drafters}:
            raise ValueError(f"a tier is named {common.pop()!r}, as one of its drafters is; give the tier another name")
        if "router" in names:
            raise ValueError("no tier can be named 'router'; that is the name of the ingress")
        return self

    @model_validator(mode="after")
    def _emulated_together(self) -> Self:
        if problem := emulation_problem({tier.name: tier.engine_kwargs.emulated for tier in self.tiers}):
            raise ValueError(problem)
        return self

    @property
    def names(self) -> tuple[str, ...]:
        """Of the tiers, bottom to top."""
        return tuple(tier.name for tier in self.tiers)

    @property
    def drafters(self) -> tuple[str, ...]:
        """Kinds of the drafters inside tiers, each once."""
        return tuple(dict.fromkeys(spec.kind for tier in self.tiers for spec in tier.engine_kwargs.drafters))

    @property
    def chain_names(self) -> tuple[str, ...]:
        """Of the drafters inside tiers and the tiers, bottom to top."""
        return (*self.drafters, *self.names)

    @classmethod
    def parse(cls, values: Mapping[str, Any], origin: str = "The configuration") -> Self:
        """Check ``values``; raises `ConfigError` with one sentence that names the field, the value and the fix."""
        if not isinstance(values, Mapping):
            raise ConfigError(f"{origin} must be a mapping with the key 'tiers'")
        try:
            return cls.model_validate(values)
        except ValidationError as error:
            raise ConfigError(f"{origin}: {sentence(error)}") from None

    @classmethod
    def load(cls, path: Path) -> Self:
        """Read a YAML file; raises `ConfigError`."""
        try:
            values = yaml.safe_load(path.read_text(encoding="utf-8"))
        except OSError as error:
            raise ConfigError(f"{path} cannot be read: {error.strerror}") from None
        except (yaml.YAMLError, ValueError, RecursionError) as error:
            raise ConfigError(f"{path} is not YAML: {_fault(error)}") from None
        return cls.parse(values, str(path))

    @classmethod
    def demo(cls) -> Self:
        """The embedded family on CPU, one thread each."""
        tiers = [
            {
                "name": name,
                "model_loading_config": {"model_id": f"cascade-{name}", "model_source": EMBEDDED + name},
                "engine_kwargs": {"dtype": "float32", "num_threads": 1},
                "deployment_config": {"ray_actor_options": {"num_cpus": 0.5}},
            }
            for name in family.NAMES
        ]
        return cls.parse({"tiers": tiers})


def sentence(error: ValidationError) -> str:
    """The first problem: where, what it is, what it must be."""
    first = error.errors()[0]
    where = ".".join(str(part) for part in first["loc"] if not str(part).startswith(KINDS_OF_VALUES))
    if first["type"] == "extra_forbidden":
        return f"{where} is not a known key; remove it or mend its spelling"
    if first["type"] == "missing":
        return f"{where} is missing; add it"
    value = first["input"]
    shown = f" is {value!r}" if isinstance(value, str | int | float | bool | None) else ""
    more = f" (and {error.error_count() - 1} more)" if error.error_count() > 1 else ""
    return f"{where}{shown}: {_rule(first)}{more}" if where else _rule(first)


def _rule(error: ErrorDetails) -> str:
    """What a value must be, in the words of YAML."""
    kind, numbers = error["type"], error.get("ctx", {})
    if kind in ("model_type", "dict_type"):
        return "it must be a mapping"
    if kind == "tuple_type":
        return "it must be a list"
    if kind == "too_long":
        return f"it has {numbers['actual_length']} entries, but may have at most {numbers['max_length']}"
    if kind == "too_short":
        return f"it has {numbers['actual_length']} entries, but must have at least {numbers['min_length']}"
    message = error["msg"].removeprefix("Value error, ")
    return message[0].lower() + message[1:]


def _fault(error: Exception) -> str:
    """What is wrong with a YAML file, and where."""
    if isinstance(error, yaml.MarkedYAMLError) and error.problem_mark is not None:
        return f"{error.problem}, line {error.problem_mark.line + 1}, column {error.problem_mark.column + 1}"
    return " ".join(str(error).split())
