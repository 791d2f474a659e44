"""Where a tier's model comes from, what guesses inside it, and how a replica runs it."""

from collections.abc import Iterator
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, ConfigDict, Field, field_validator, model_validator

from cascade import family
from cascade.drafters import AUTO, DrafterSpec, head_of, specs
from cascade.engine import vllm
from cascade.params import MAX_WINDOW
from cascade.planner.choice import Policy
from cascade.settings.section import Section

EMBEDDED = "embedded:"  # begins sources of the demonstration family, such as embedded:tiny


class ModelLoadingConfig(Section):
    """Where a tier's model comes from."""

    model_id: Annotated[str, Field(min_length=1)]  # name of the model, and its source unless `model_source` is given
    # path of a folder or a GGUF file, a hub id, or `embedded:tiny`, `embedded:medium`, `embedded:full`
    model_source: Annotated[str, Field(min_length=1)] | None = None

    @property
    def source(self) -> str:
        """What `from_pretrained` takes; raises `ModelError` if the demonstration family is meant and not there."""
        return resolved(self.model_source or self.model_id)

    @field_validator("model_id", "model_source")
    @classmethod
    def _known(cls, source: str | None) -> str | None:
        if source and source.startswith(EMBEDDED) and source.removeprefix(EMBEDDED) not in family.NAMES:
            raise ValueError(f"the embedded models are {', '.join(EMBEDDED + name for name in family.NAMES)}")
        return source


def resolved(source: str) -> str:
    """A path or hub id; that of the demonstration family if it is meant."""
    return family.path(source.removeprefix(EMBEDDED)) if source.startswith(EMBEDDED) else source


class DrafterConfig(Section):
    """What guesses inside a tier, see `cascade.drafters`."""

    kind: str = AUTO  # `auto`: drafters that read text; or one kind, or `head` to find out which head `source` is
    # text file of a `corpus`; path or hub id of a head, or `embedded:eagle3`; for `mtp` the model's own checkpoint by default
    source: Annotated[str, Field(min_length=1)] | None = None
    layers: int | None = None  # for `exit`: draft with the first so many layers of the model

    @model_validator(mode="after")
    def _makes_sense(self) -> Self:
        if self.kind != AUTO:
            self.spec  # noqa: B018  # finds out
        elif self.source or self.layers is not None:
            raise ValueError("source and layers need their kind beside them; 'head' finds out which head a source is")
        return self

    @property
    def spec(self) -> DrafterSpec:
        """The drafter, if it is not "auto"; raises `ConfigError`."""
        return DrafterSpec(self.kind, resolved(self.source or ""), self.layers)


def _listed(chosen: Any) -> Any:
    """A drafter may be named by its kind alone, and need not be a list of one."""
    several = [] if chosen is None else chosen if isinstance(chosen, list | tuple) else [chosen]
    return [{"kind": one} if isinstance(one, str) else one for one in several]


class EngineKwargs(Section):
    """How a replica runs its model. On vLLM it takes vLLM's engine arguments, too, by their own names."""

    model_config = ConfigDict(frozen=True, extra="allow", allow_inf_nan=False)

    # `cascade`, `vllm`, or MODULE:FUNCTION; by default `vllm` if it is installed and the tier has a GPU
    engine: str | None = None
    # of weights; by default the checkpoint's, or float32 on processors that are slow with 16 bits
    dtype: Literal["float32", "bfloat16", "float16"] | None = None
    device: str | None = None  # such as cuda:0 or cpu; by default the GPU if there is one
    revision: str | None = None  # branch, tag or commit of a model on the hub
    trust_remote_code: bool = False  # run code that comes with a model of the hub
    quantization: str | None = None  # of weights, by a method of vLLM's; what a checkpoint is quantised by needs none
    # LoRA adapters of the full tier by the name that requests use: paths or hub ids
    lora_modules: dict[Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]+$")], Annotated[str, Field(min_length=1)]] = Field(
        default_factory=dict
    )
    # in their place, a folder or bucket (s3://, gs://) of adapters, each of which is loaded when a request names it
    lora_path: Annotated[str, Field(min_length=1)] | None = None
    max_loras: Annotated[int, Field(ge=1)] = 16  # adapters of `lora_path` that a replica has loaded at a time
    tensor_parallel_size: Annotated[int, Field(ge=1)] = 1  # GPUs that share one replica's model; more than one needs vLLM
    num_threads: Annotated[int, Field(ge=1)] | None = None  # CPU threads of a pass; timed at load by default
    # cores that the replica is bound to
    cpu_affinity: Annotated[tuple[Annotated[int, Field(ge=0)], ...], Field(min_length=1)] | None = None
    max_pass_tokens: Annotated[int, Field(ge=1)] = 512  # tokens that one pass scores at most
    # positions of keys and values; by default what the device has room for
    cache_tokens: Annotated[int, Field(ge=16)] | None = None
    # share of a GPU for weights and cache; 0.9 of the replica's part by default
    gpu_memory_utilization: Annotated[float, Field(gt=0, le=1)] | None = None
    drafter: Annotated[tuple[DrafterConfig, ...], BeforeValidator(_listed)] = (DrafterConfig(),)  # what guesses inside the tier
    patience: Annotated[float, Field(ge=0)] | None = None  # longest wait for guesses, as a share of one pass; 1 by default
    # guesses of a session that one pass scores at most; 16 by default
    max_guesses: Annotated[int, Field(ge=1, le=MAX_WINDOW)] | None = None

    @model_validator(mode="after")
    def _belongs_together(self) -> Self:
        if problem := next(self._problems(), None):
            raise ValueError(problem)
        return self

    def _problems(self) -> Iterator[str]:
        """A sentence for each pair of options of which one excludes the other."""
        head, extra, only_ours = head_of(self.drafters), sorted(self.model_extra or ()), self._only_ours()
        if head and self.adapted:
            yield f"drafter {head.kind!r} reads a model without adapters, and {self.adapted}: remove one of the two"
        if self.lora_modules and self.lora_path:
            yield f"lora_modules are given and lora_path is {self.lora_path!r}: remove one of the two"
        if not (self.plugin or self.engine in (None, "cascade", "vllm")):
            yield f"engine is {self.engine!r}: it must be 'cascade', 'vllm' or MODULE:FUNCTION"
        if self.engine == "vllm":
            if only_ours:
                yield f"{only_ours[0]} is for our own engine: remove it, or set engine to 'cascade'"
            return
        if self.plugin:  # which knows what it takes
            return
        if extra:
            yield f"{extra[0]} is not a known key; remove it, mend its spelling, or set engine to 'vllm'"
        if self._only_vllms and (self.engine is not None or self._prefers_ours()):
            yield (
                f"{self._only_vllms}, which only vLLM can do: set engine to 'vllm', and remove what only our own engine takes"
            )

    @property
    def adapted(self) -> str:
        """The field that gives the model adapters, if one does."""
        return "lora_modules" if self.lora_modules else "lora_path" if self.lora_path else ""

    def _only_ours(self) -> list[str]:
        """What is given that vLLM cannot do."""
        head = head_of(self.drafters)
        return ["device"] * bool(self.device) + ([f"drafter {head.kind!r}"] if head else [])

    @property
    def _only_vllms(self) -> str:
        """What is given that our own engine cannot do, in words; "" if nothing is."""
        if self.tensor_parallel_size > 1:
            return f"tensor_parallel_size is {self.tensor_parallel_size}"
        return f"quantization is {self.quantization!r}" if self.quantization else ""

    def _prefers_ours(self) -> bool:
        """Whether anything is given that means our own engine where none is named."""
        return any((self._only_ours(), self.adapted, self.num_threads))

    @property
    def plugin(self) -> bool:
        """Whether its engine is neither ours nor vLLM."""
        return ":" in (self.engine or "")

    def runs_on(self, *, gpu: bool) -> str:
        """The engine of a tier: what is named, else vLLM where it is installed and the tier has a ``gpu``, else our own.

        What only one of them takes decides before that.
        """
        if self.engine is not None:
            return self.engine
        if self._only_vllms:
            return "vllm"
        return "vllm" if gpu and not self._prefers_ours() and vllm.installed() else "cascade"

    @property
    def vllm_options(self) -> dict[str, Any]:
        """vLLM's engine arguments, those that are given."""
        names = ("dtype", "revision", "quantization", "gpu_memory_utilization")
        given = {name: value for name in names if (value := getattr(self, name)) is not None}
        shared = {"trust_remote_code": self.trust_remote_code, "tensor_parallel_size": self.tensor_parallel_size}
        return {**given, **shared, **(self.model_extra or {})}

    @property
    def drafters(self) -> tuple[DrafterSpec, ...]:
        """What guesses inside the tier."""
        return specs(AUTO if one.kind == AUTO else one.spec for one in self.drafter)

    @property
    def policy(self) -> Policy:
        """When to start a pass."""
        chosen = {"patience": self.patience, "max_guesses": self.max_guesses}
        return Policy(**{name: value for name, value in chosen.items() if value is not None})  # type: ignore[arg-type]
