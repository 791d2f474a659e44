"""Configuration of a served cascade. Names are those of Ray Serve LLM.

tiers:                                # bottom to top; the last is the full one
  - name: tiny
    model_loading_config: {model_id: Qwen/Qwen3-0.6B}
    deployment_config: {ray_actor_options: {num_gpus: 1}}
  - name: full
    model_loading_config: {model_id: qwen3-32b, model_source: /models/qwen3-32b}
    engine_kwargs: {dtype: bfloat16}
    accelerator_type: H100
"""

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import Field, ValidationError, model_validator

from cascade import family
from cascade.engine.generation import AUTO
from cascade.errors import ConfigError
from cascade.params import DEFAULT_WINDOW, MAX_WINDOW
from cascade.settings.deployment import ActorOptions, DeploymentConfig, resources
from cascade.settings.engine import EMBEDDED, EngineKwargs, ModelLoadingConfig, pinned
from cascade.settings.router import RouterConfig
from cascade.settings.section import NUMERIC, Count, Number, Port, Seconds, Section, Text, Variable, sentence
from cascade.training.reservoir import Reservoir
from cascade.training.versions import Versions


class AlignmentConfig(Section):
    """Drafters that learn from answers while they serve. Without this section no answers are kept, and no drafter learns.

    alignment: {folder: /shared/cascade}
    """

    folder: Text  # folder for new weights, shared by all nodes
    # names of the lower tiers that learn; by default all that can
    students: tuple[Text, ...] = ()
    rows: Annotated[int, Field(ge=16), NUMERIC] = 2000  # answers that are kept, half of them the newest
    row_tokens: Annotated[int, Field(ge=32), NUMERIC] = 512  # last tokens kept of each prompt with its answer
    max_age_s: Seconds = 7 * 86_400.0  # seconds until an answer is dropped
    on_disk: bool = False  # keep answers also in the folder, not only in memory
    # environment variable with a Fernet key that encrypts answers on disk
    key_env: Variable | None = None
    every_s: Annotated[float, Field(ge=0), NUMERIC] = 900.0  # seconds between two rounds; falling acceptance starts one at once
    round_s: Seconds = 300.0  # seconds that each drafter trains in a round
    min_rows: Count = 128  # new answers that a round needs
    canary_s: Annotated[float, Field(ge=0), NUMERIC] = 60.0  # seconds that one replica tries new weights
    device: str | None = None  # device of the learner, such as cuda:0; by default the GPU if there is one
    num_workers: Count = 1  # processes that train a drafter together, by Ray Train
    # resources of the learner, or of each of several workers: `num_gpus`, ...
    ray_actor_options: ActorOptions = Field(default_factory=ActorOptions)

    @model_validator(mode="after")
    def _settings_agree(self) -> Self:
        if self.key_env is not None and not self.on_disk:
            raise ValueError(f"key_env is {self.key_env!r}, but nothing is on disk: set on_disk to true, or remove it")
        if self.num_workers > 1 and self.device is not None:
            raise ValueError(
                f"device is {self.device!r} of {self.num_workers} workers: remove it, as num_gpus of ray_actor_options gives "
                "each its own"
            )
        return self

    def versions(self, student: str) -> Versions:
        """The weights that a student has learned so far."""
        return Versions(Path(self.folder) / student)

    def reservoir(self) -> Reservoir:
        """The store of answers, with those on disk; raises `ConfigError` if these cannot be read."""
        key = os.environ.get(self.key_env) if self.key_env is not None else None
        if self.key_env is not None and not key:
            raise ConfigError(f"alignment.key_env is {self.key_env!r}, which is not set where the learner runs: set it there")
        return Reservoir(
            Path(self.folder), key, rows=self.rows, row_tokens=self.row_tokens, max_age_s=self.max_age_s, on_disk=self.on_disk
        )


def obstacle(engine: EngineKwargs) -> str:
    """Why a lower tier cannot get new weights while it runs; "" if it can."""
    if engine.quantization is not None:
        return f"whose quantization is {engine.quantization!r}, and learned weights are not quantized: remove one of the two"
    if engine.layers:
        return "which is some layers of its model, and learns nothing by itself: remove its layers or the name"
    if engine.lora_modules:
        return "whose adapters would not fit new weights: remove them or the name"
    if any(spec.reads for spec in engine.drafters):
        return "whose head would not fit new weights: remove the head or the name"
    return ""


MAX_TIERS = 5
RESERVED = ("router", "learner")  # names of deployments that are not tiers
GPU_MEMORY = 0.9  # share for weights and caches; the rest is for passes


class PlacementConfig(Section):
    """The Ray placement group of a replica."""

    bundles: Annotated[list[dict[str, Number]], Field(min_length=1)]  # resources of each bundle
    strategy: Literal["PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD"] = "PACK"  # where bundles go
    bundle_label_selector: list[dict[str, str]] | None = None  # labels of the nodes for each bundle


class TierConfig(Section):
    """One tier: a model and its deployment."""

    # name of the tier and its deployment; letters, digits, `_` and `-`
    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_-]{0,31}$")]
    model_loading_config: ModelLoadingConfig  # where the model comes from
    engine_kwargs: EngineKwargs = EngineKwargs()  # how a replica runs the model
    accelerator_type: str | None = None  # GPU that a replica asks Ray for, such as L4, A100 or H100
    placement_group_config: PlacementConfig | None = None  # by default the resources of `ray_actor_options`
    deployment_config: DeploymentConfig = DeploymentConfig()  # replicas, resources and health checks

    @property
    def actor_options(self) -> dict[str, Any]:
        """Ray's options of a replica, with the GPUs that ``accelerator_type`` and ``tensor_parallel_size`` ask for."""
        kind = self.accelerator_type
        actor: dict[str, Any] = {} if kind is None else {"num_gpus": 1, "accelerator_type": kind}
        actor |= self.deployment_config.ray_actor_options
        if self.placement_group_config is None and actor.get("num_gpus"):
            # vLLM starts its ranks as processes of the replica, which must see all of their GPUs
            ranks = self.engine_kwargs.tensor_parallel_size
            actor["num_gpus"] = max(ranks, actor["num_gpus"]) if ranks > 1 else actor["num_gpus"]
        return actor

    @property
    def resources(self) -> dict[str, float]:
        """Ray's resources that one replica takes, including its placement group."""
        placement = self.placement_group_config
        return resources(self.actor_options, None if placement is None else placement.bundles)

    @property
    def gpu_memory_utilization(self) -> float:
        """Share of a GPU's memory for weights and cache; by default 0.9 of the replica's part of the GPU."""
        num_gpus = self.actor_options.get("num_gpus") or 1
        return self.engine_kwargs.gpu_memory_utilization or GPU_MEMORY * min(num_gpus, 1)


class LinkTLS(Section):
    """Mutual TLS between the processes of the cascade. Paths of PEM files, the same on all nodes with a tier or a router."""

    certificate: Text  # certificate and its chain
    key: Text  # private key of the certificate
    authority: Text  # certificate authority; no other one is trusted
    server_name: Text = "cascade-link"  # name for which all certificates are issued


class CascadeConfig(Section):
    """A whole cascade."""

    # models bottom to top, the full one last
    tiers: Annotated[tuple[TierConfig, ...], Field(min_length=1, max_length=MAX_TIERS)]
    router: RouterConfig = RouterConfig()  # the ingress
    # tokens that a tier may run ahead of the tier above; requests may set their own
    window: Annotated[int, Field(ge=1, le=MAX_WINDOW), NUMERIC] = DEFAULT_WINDOW
    # tokens of prompt and output together; by default the shortest context of all models
    max_model_len: Annotated[int, Field(ge=2), NUMERIC] | None = None
    link_tls: LinkTLS | None = None  # encrypts links between tiers
    # first and last port for links between replicas; by default any free port
    link_ports: Annotated[tuple[Port, ...], Field(min_length=2, max_length=2)] | None = None
    alignment: AlignmentConfig | None = None  # lower tiers learn from answers while they serve
    verify: bool = True  # compare tokenizers and contexts of all tiers before the start

    @model_validator(mode="after")
    def _belongs_together(self) -> Self:
        if problem := next(self._problems(), None):
            raise ValueError(problem)
        return self

    def _problems(self) -> Iterator[str]:
        """One sentence for each reason why these tiers cannot form a cascade."""
        names = self.names
        for name in names:
            if names.count(name) > 1:
                yield f"two tiers are named {name!r}; give each its own name"
            if name in self.drafters:
                yield f"a tier is named {name!r}, as one of its drafters is; give the tier another name"
            if name in RESERVED:
                yield f"no tier can be named {name!r}, as another deployment is; give the tier another name"
        for tier in self.tiers[:-1]:
            if tier.engine_kwargs.lora_path:
                yield f"lora_path of tier {tier.name!r}: only the full tier, the last one, takes a folder; give lora_modules"
            if tier.engine_kwargs.generation_config != AUTO:
                yield f"generation_config of tier {tier.name!r}: requests get the full tier's, which is the last one; remove it"
        if self.link_ports is not None and self.link_ports[0] > self.link_ports[1]:
            yield f"link_ports are {list(self.link_ports)}: name the lower port first"
        lower = {tier.name: obstacle(tier.engine_kwargs) for tier in self.tiers[:-1]}
        for name in () if self.alignment is None else self.alignment.students:
            if reason := lower.get(name, f"which is no lower tier: it takes {', '.join(lower) or 'none'}"):
                yield f"alignment.students names {name!r}, {reason}"
        if self.alignment is not None and not self.students:
            yield "alignment has no drafter to train: give a lower tier that is not quantized"

    @property
    def affine(self) -> bool:
        """Whether requests that begin alike go to the same replica of the full tier, if it has several."""
        return self.router.prefix_affinity and self.tiers[-1].deployment_config.several

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(tier.name for tier in self.tiers)

    def tier(self, name: str) -> TierConfig:
        """The tier of that name; raises `ValueError` if there is none."""
        return self.tiers[self.names.index(name)]

    @property
    def drafters(self) -> tuple[str, ...]:
        """Kinds of the drafters inside tiers, each once."""
        return tuple(dict.fromkeys(spec.kind for tier in self.tiers for spec in tier.engine_kwargs.drafters))

    @property
    def chain_names(self) -> tuple[str, ...]:
        """Names of the drafters inside tiers and of the tiers, bottom to top."""
        return (*self.drafters, *self.names)

    @property
    def students(self) -> tuple[str, ...]:
        """Names of the tiers that learn while they serve: those that are chosen, or all that can."""
        if self.alignment is None:
            return ()
        return self.alignment.students or tuple(tier.name for tier in self.tiers[:-1] if not obstacle(tier.engine_kwargs))

    def lesson(self, student: str) -> tuple[str, str, tuple[int, ...]]:
        """Sources of a student's verifier and of the student, the latest weights of both, and layers that the verifier keeps.

        Raises `ModelError`.
        """
        assert self.alignment is not None
        verifier = self.names[self.names.index(student) + 1]
        latest = {name: self.alignment.versions(name).current for name in self.students}  # what others have does not serve
        teacher, learner = (latest.get(name) or self.beginning(name) for name in (verifier, student))
        return str(teacher), str(learner), self.tier(verifier).engine_kwargs.layers or ()

    def beginning(self, student: str) -> str:
        """Source of a tier's original weights; raises `ModelError`.

        For a pinned revision of a model on the hub it is a folder in the hub's cache.
        """
        tier = self.tier(student)
        return pinned(tier.model_loading_config.source, tier.engine_kwargs.revision)

    @property
    def model_names(self) -> tuple[str, ...]:
        """Names by which clients may call the full model; answers have the first one."""
        return self.router.served_model_name or (self.tiers[-1].model_loading_config.model_id,)

    @classmethod
    def parse(cls, values: Mapping[str, Any], origin: str = "The configuration") -> Self:
        """Check ``values``; raises `ConfigError` with one sentence that names the field, the value and the fix."""
        if not isinstance(values, Mapping):
            raise ConfigError(f"{origin} must be a mapping with the key 'tiers'")
        try:
            return cls.model_validate(values)
        except ValidationError as error:
            raise ConfigError(f"{origin}: {sentence(error, cls)}") from None

    @classmethod
    def demo(cls) -> Self:
        """The demonstration family on CPUs; lower tiers have one thread each."""
        full = {"num_threads": 2, "generation_config": EMBEDDED + family.NAMES[-1]}
        tiers = [
            {
                "name": name,
                "model_loading_config": {"model_id": model_id, "model_source": EMBEDDED + name},
                "engine_kwargs": full if model_id == family.MODEL else {"num_threads": 1},
                "deployment_config": {"ray_actor_options": {"num_cpus": 0.5}},
            }
            for name, model_id in zip(family.NAMES, ("cascade-tiny", "cascade-medium", family.MODEL), strict=True)
        ]
        return cls.parse({"tiers": tiers})


# Ray Serve replaces the replicas of a deployment when its version changes, a digest of the values that are *fixed*.
# Ray Serve compares these parts of a tier itself: changes of ray_actor_options replace replicas, others do not
COMPARED_BY_SERVE = ("deployment_config", "accelerator_type", "placement_group_config")
# the full tier's engine_kwargs that routers read
READ_BY_ROUTERS = {"revision", "trust_remote_code", "lora_modules", "lora_path", "generation_config"}


def fixed_of_tier(config: CascadeConfig, tier: TierConfig) -> dict[str, Any]:
    """Values whose change replaces the replicas of ``tier``."""
    names = config.names
    below = names[: names.index(tier.name)]
    exclude: dict[str, Any] = {**dict.fromkeys(COMPARED_BY_SERVE, True), "engine_kwargs": {"generation_config"}}
    return config.model_dump(mode="json", include={"link_tls", "link_ports"}) | {
        "tier": tier.model_dump(mode="json", exclude=exclude),
        "lower": below,
        "top": tier is config.tiers[-1],
        "drafters": config.drafters,
    }


def fixed_of_router(config: CascadeConfig) -> dict[str, Any]:
    """Values whose change replaces the routers; of tiers little more than their names."""
    values = config.model_dump(mode="json", exclude={"tiers": True, "verify": True, "router": {"deployment_config"}})
    full = config.tiers[-1]
    values["tiers"] = [(tier.name, tier.model_loading_config.model_id) for tier in config.tiers]
    values["full"] = {
        **full.model_loading_config.model_dump(mode="json"),
        **full.engine_kwargs.model_dump(mode="json", include=READ_BY_ROUTERS),
        "max_ongoing_requests": full.deployment_config.max_ongoing_requests,  # whether leases are held ahead
    }
    scaling = {tier.name: tier.deployment_config.autoscaling_config or {} for tier in config.tiers}
    values["asleep"] = [name for name, bounds in scaling.items() if bounds.get("min_replicas") == 0]  # may have no replica
    values["drafters"] = config.drafters
    return values
