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

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import Field, ValidationError, model_validator

from cascade import family
from cascade.engine.generation import AUTO
from cascade.errors import ConfigError
from cascade.params import DEFAULT_WINDOW, MAX_WINDOW
from cascade.settings.alignment import AlignmentConfig, obstacle
from cascade.settings.deployment import DeploymentConfig, resources
from cascade.settings.engine import EMBEDDED, EngineKwargs, ModelLoadingConfig, pinned
from cascade.settings.router import RouterConfig
from cascade.settings.section import Port, Section, Text, sentence

MAX_TIERS = 5
RESERVED = ("router", "learner")  # names of deployments that are not tiers
GPU_MEMORY = 0.9  # share for weights and caches; the rest is for passes


class PlacementConfig(Section):
    """The Ray placement group of a replica."""

    bundles: Annotated[list[dict[str, float]], Field(min_length=1)]  # resources of each bundle
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
    window: Annotated[int, Field(ge=1, le=MAX_WINDOW)] = DEFAULT_WINDOW
    # tokens of prompt and output together; by default the shortest context of all models
    max_model_len: Annotated[int, Field(ge=2)] | None = None
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
