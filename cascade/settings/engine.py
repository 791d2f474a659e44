"""Where a tier's model comes from, its drafters, and how a replica runs it."""

from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, ConfigDict, Field, field_validator, model_validator

from cascade import family
from cascade.drafters import AUTO, DrafterSpec, head_of, specs
from cascade.engine import vllm
from cascade.engine.generation import AUTO as AUTO_CONFIG
from cascade.engine.layers import numbers, shown
from cascade.errors import ModelError, reason
from cascade.settings.section import NUMERIC, Count, Section, Text, did_you_mean

NOT_VLLMS = {  # vLLM's engine arguments that no tier takes, and what to use instead
    "speculative_config": "models that draft are tiers below, and drafter names what guesses without one",
    "kv_transfer_config": "a replica computes the prompt and the answer, and no keys and values travel",
    "enable_lora": "lora_modules or lora_path say so",
}
# fields that only vLLM supports; an engine of the user's own may take the last two
ONLY_VLLM = ("drafter", "lora_path", "lora_modules", "tensor_parallel_size", "quantization")
APART = {  # fields that cannot be combined
    "lora_modules": ("lora_path",),
    "drafter": ("lora_path", "lora_modules", "tensor_parallel_size"),
    "layers": ("drafter", "engine", "hf_overrides", "load_format", "lora_path", "lora_modules"),
}
EMBEDDED = "embedded:"  # prefix of sources of the demonstration family, such as embedded:tiny


class ModelLoadingConfig(Section):
    """Where a tier's model comes from."""

    model_id: Text  # name of the model, and its source by default
    # path of a folder or a GGUF file, a hub id, or `embedded:tiny`, `embedded:medium`, `embedded:full`
    model_source: Text | None = None

    @property
    def source(self) -> str:
        """The argument of `from_pretrained`; raises `ModelError` if a model of the demonstration family is not found."""
        source = self.model_source or self.model_id
        return family.path(source.removeprefix(EMBEDDED)) if source.startswith(EMBEDDED) else source

    @field_validator("model_id", "model_source")
    @classmethod
    def _known(cls, source: str | None) -> str | None:
        if source and source.startswith(EMBEDDED) and source.removeprefix(EMBEDDED) not in family.NAMES:
            raise ValueError(f"the embedded models are {', '.join(EMBEDDED + name for name in family.NAMES)}")
        return source


def generation_folder(chosen: str) -> str:
    """The argument of `sampling_defaults`: a switch or a folder; `embedded:...` is resolved."""
    return str(family.WEIGHTS / chosen.removeprefix(EMBEDDED)) if chosen.startswith(EMBEDDED) else chosen


def pinned(source: str, revision: str | None) -> str:
    """``source``, or with a revision its folder in the hub's cache; raises `ModelError` if that cannot be downloaded."""
    if revision is None or Path(source).exists():
        return source
    from huggingface_hub import snapshot_download

    try:
        return snapshot_download(source, revision=revision)
    except Exception as error:  # network, hub or disk
        raise ModelError(f"Revision {revision!r} of {source!r} cannot be loaded: {reason(error)}") from error


class DrafterConfig(Section):
    """A drafter inside a tier, see `cascade.drafters`."""

    kind: str = AUTO  # `auto` for the default, `suffix`; or one kind
    source: Text | None = None  # text file for `corpus`; path or hub id of a head

    @model_validator(mode="after")
    def _makes_sense(self) -> Self:
        if self.kind != AUTO:
            self.spec  # noqa: B018  # raises if they do not fit
        elif self.source:
            raise ValueError("source needs its kind beside it")
        return self

    @property
    def spec(self) -> DrafterSpec:
        """The drafter, unless its kind is "auto"; raises `ConfigError`."""
        return DrafterSpec(self.kind, self.source or "")


def _listed(chosen: Any) -> Any:
    """Drafters as a list of mappings: a single one needs no list, and one may be given by its kind."""
    several = [] if chosen is None else chosen if isinstance(chosen, list | tuple) else [chosen]
    return [{"kind": spec} if isinstance(spec, str) else spec for spec in several]


def _chosen(value: Any) -> Any:
    """`None` for "auto", vLLM's word for the default."""
    return None if value == AUTO else value


def _numbered(chosen: Any) -> Any:
    """Numbers of layers that are given by spans, or by the number of first ones."""
    return None if chosen is None else numbers(chosen)


class EngineKwargs(Section):
    """How a replica runs its model. A tier on vLLM also takes vLLM's engine arguments, by their own names."""

    model_config = ConfigDict(frozen=True, extra="allow", allow_inf_nan=False)

    # `cascade`, `vllm`, or MODULE:FUNCTION; by default `vllm` on a GPU, if installed
    engine: Annotated[str, Field(pattern=r"^(cascade|vllm|[\w.]+:\w+)$")] | None = None
    # by default, or with `auto`, the checkpoint's; on a CPU float32 in place of float16
    dtype: Annotated[Literal["float32", "bfloat16", "float16"] | None, BeforeValidator(_chosen)] = None
    # such as cuda:0 or cpu; by default, or with `auto`, the GPU if there is one
    device: Annotated[str | None, BeforeValidator(_chosen)] = None
    # defaults of requests, set at the full tier: `auto` for the model's own generation_config.json, `vllm` for none, or a
    # folder that holds one
    generation_config: Text = AUTO_CONFIG
    revision: str | None = None  # branch, tag or commit of a model on the hub
    trust_remote_code: bool = False  # run code that comes with a model on the hub
    # layers of its model that the tier keeps: `[0-11, 20-31]`, or the number of first ones; by default all
    layers: Annotated[tuple[Annotated[int, Field(ge=0), NUMERIC], ...] | None, BeforeValidator(_numbered)] = None
    quantization: str | None = None  # vLLM's method for quantising weights while they load
    # paths or hub ids of LoRA adapters by name, on vLLM; a lower tier uses its own adapter of the name that a request chooses
    lora_modules: dict[Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]+$")], Text] = Field(default_factory=dict)
    # folder of adapters, each loaded when the first request names it
    lora_path: Text | None = None
    max_loras: Count = 16  # adapters of `lora_path` loaded at a time
    tensor_parallel_size: Count = 1  # GPUs that share one replica's model; more than one needs vLLM
    # CPU threads of a pass; by default chosen by timing
    num_threads: Annotated[int, Field(ge=1, le=1024), NUMERIC] | None = None
    # cores to which the replica is bound
    cpu_affinity: Annotated[tuple[Annotated[int, Field(ge=0), NUMERIC], ...], Field(min_length=1)] | None = None
    max_pass_tokens: Count = 512  # tokens of one pass at most
    # positions of keys and values; by default as many as fit
    cache_tokens: Annotated[int, Field(ge=16), NUMERIC] | None = None
    # share of a GPU for weights and cache; by default 0.9 of the replica's `num_gpus`
    gpu_memory_utilization: Annotated[float, Field(gt=0, le=1), NUMERIC] | None = None
    drafter: Annotated[tuple[DrafterConfig, ...], BeforeValidator(_listed)] = (DrafterConfig(),)  # drafters inside the tier

    @model_validator(mode="after")
    def _belongs_together(self) -> Self:
        given, extra = self._given, self.model_extra or {}
        for name, others in APART.items():
            if name in given and (other := next((other for other in others if other in given), None)):
                raise ValueError(f"{given[name]} and {given[other]}, which do not go together: remove one of the two")
        only_vllm = next((given[name] for name in (ONLY_VLLM[:3] if self.plugin else ONLY_VLLM) if name in given), None)
        problem = f"{only_vllm}, which only vLLM can do: set engine to 'vllm', or remove it"
        if self.plugin:
            if only_vllm:
                raise ValueError(problem)
            return self
        for name in sorted(NOT_VLLMS.keys() & extra.keys()):
            raise ValueError(f"{name} is given: {NOT_VLLMS[name]}; remove it")
        if self.engine == "vllm":
            if self.device:
                raise ValueError("device is for our own engine: remove it, or set engine to 'cascade'")
        elif extra:
            near = did_you_mean(min(extra), type(self).model_fields)
            way_out = near or "; remove it, correct its spelling, or set engine to 'vllm'"
            raise ValueError(f"{min(extra)} is not a known key{way_out}")
        elif only_vllm and (self.engine is not None or self._prefers_ours):
            raise ValueError(problem)
        return self

    @property
    def _given(self) -> dict[str, str]:
        """The given fields that not every tier supports, and their values in words."""
        head = head_of(self.drafters)
        words = {
            "drafter": f"drafter is {head.kind!r}" if head else "",
            "lora_path": f"lora_path is {self.lora_path!r}" if self.lora_path else "",
            "lora_modules": f"lora_modules are {', '.join(self.lora_modules)}" if self.lora_modules else "",
            "tensor_parallel_size": f"tensor_parallel_size is {ranks}" if (ranks := self.tensor_parallel_size) > 1 else "",
            "quantization": f"quantization is {self.quantization!r}" if self.quantization else "",
            "layers": f"layers are {shown(self.layers)}" if self.layers else "",
            "engine": f"engine is {self.engine!r}" if self.plugin else "",
        }
        words |= {name: f"{name} is given" for name in self.model_extra or {}}
        return {name: phrase for name, phrase in words.items() if phrase}

    @property
    def _prefers_ours(self) -> bool:
        """Whether a given field selects our own engine, if ``engine`` is not set."""
        return bool(self.device or self.num_threads)

    @property
    def hub(self) -> dict[str, Any]:
        """Options for reading files of a model on the hub."""
        return {"revision": self.revision, "trust_remote_code": self.trust_remote_code}

    @property
    def plugin(self) -> bool:
        """Whether the engine is MODULE:FUNCTION, neither our own nor vLLM."""
        return ":" in (self.engine or "")

    def runs_on(self, *, gpu: bool) -> str:
        """The engine of a tier: the named one, else the only one that supports all given fields.

        Else vLLM if it is installed and the tier has a ``gpu``, or our own.
        """
        if self.engine is not None:
            return self.engine
        prefers_vllm = gpu and not self._prefers_ours and vllm.installed()
        return "vllm" if prefers_vllm or not self._given.keys().isdisjoint(ONLY_VLLM) else "cascade"

    @property
    def vllm_options(self) -> dict[str, Any]:
        """The given engine arguments of vLLM."""
        names = ("dtype", "revision", "quantization", "gpu_memory_utilization")
        given = {name: value for name in names if (value := getattr(self, name)) is not None}
        shared = {"trust_remote_code": self.trust_remote_code, "tensor_parallel_size": self.tensor_parallel_size}
        return {**given, **shared, **(self.model_extra or {})}

    @property
    def drafters(self) -> tuple[DrafterSpec, ...]:
        """The drafters inside the tier."""
        return specs(AUTO if entry.kind == AUTO else entry.spec for entry in self.drafter)
