"""Whether the tiers of a configuration belong together and fit on their devices, told before any weight is loaded."""

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedConfig

from cascade.drafters import EXIT, head_of
from cascade.engine.checkpoint import Anatomy, anatomy
from cascade.engine.devices import ACCELERATORS, default_device, free_bytes
from cascade.engine.heads.checkpoint import num_weights
from cascade.engine.heads.mtp import check_mtp
from cascade.engine.memory import GIB
from cascade.engine.model_config import context_len, read_config
from cascade.engine.tokenizer import Tokenizer
from cascade.engine.vllm import batch_invariant, installed
from cascade.errors import ConfigError, ModelError
from cascade.settings.config import CascadeConfig, TierConfig

MIN_TOKENS = 4096  # of cache, or the model's context if that is shorter: below that a tier is of no use


@dataclass(frozen=True, slots=True)
class Need:
    """What a tier's replica takes, and what its device has."""

    tier: str
    model: str
    anatomy: Anatomy
    quantization: str | None
    ranks: int  # devices that share the weights and the cache
    drafter_weights: int  # of its head, beside the model's
    device: str  # such as cuda, cpu or H100
    device_bytes: int  # of each rank, for weights and cache; free now on a device of this machine
    engine: str = "cascade"  # that runs its passes

    @property
    def weight_bytes(self) -> int:
        """Of each rank."""
        return -(-self.anatomy.weight_bytes // self.ranks) + self.drafter_bytes

    @property
    def drafter_bytes(self) -> int:
        """Of the weights of its head, as they will be held."""
        return self.drafter_weights * self.anatomy.dtype.itemsize

    @property
    def cache_tokens(self) -> int:
        """Positions of keys and values that fit beside the weights; negative if these do not fit themselves."""
        return (self.device_bytes - self.weight_bytes) * self.ranks // self.anatomy.cache_bytes_per_token

    @property
    def problem(self) -> str | None:
        """One sentence if the tier cannot run there."""
        wanted = min(MIN_TOKENS, self.anatomy.context_len)
        if self.cache_tokens >= wanted:
            return None
        return (
            f"Tier {self.tier} takes {self.weight_bytes / GIB:.2f} GiB of weights and {self.device} offers "
            f"{self.device_bytes / GIB:.2f} GiB, which leaves no room for {wanted} tokens of "
            "cache: take a larger device, quantization, or tensor_parallel_size"
        )


@contextlib.contextmanager
def _named(what: str) -> Iterator[None]:
    """Raise `ConfigError`, which begins with ``what``, for a `ModelError`."""
    try:
        yield
    except ModelError as error:
        raise ConfigError(f"{what} cannot be used: {error}") from None


def _hub(tier: TierConfig) -> dict[str, Any]:
    """How the files of its model are read, wherever they are."""
    engine = tier.engine_kwargs
    return {"revision": engine.revision, "trust_remote_code": engine.trust_remote_code}


def needs(config: CascadeConfig) -> list[Need]:
    """What every tier will take, bottom to top; raises `ConfigError` if a model cannot be served at all."""
    return [_need(tier) for tier in config.tiers]


def remarks(found: Sequence[Need]) -> list[str]:
    """What is worth knowing of tiers that fit: sentences."""
    said = [
        f"Tier {need.tier} was saved in {_name(need.anatomy.widened)}, which is slow on this processor: it will be held in "
        f"{_name(need.anatomy.dtype)}, in twice the memory; set dtype to choose."
        for need in found
        if need.anatomy.widened is not None
    ]
    for below, above in pairwise(found):
        if below.anatomy.parameters >= above.anatomy.parameters:
            said.append(f"Tier {below.tier} is not smaller than tier {above.tier}, which it drafts for: is the order right?")
    full = found[-1]
    if not (batch_invariant() if full.engine == "vllm" else full.anatomy.same_bits):
        said.append(
            f"Logits of tier {full.tier} may differ in their last bits from pass to pass: where two tokens are as near as "
            "that, texts may part (docs/explanation/shared-noise.md)."
        )
    return said


def unpinned(config: CascadeConfig) -> str | None:
    """One sentence if a tier that takes any GPU may take the one that another tier names, which then waits for ever."""
    named = next((tier for tier in config.tiers if _accelerator(tier)), None)
    free = [tier.name for tier in config.tiers if _takes_any_gpu(tier)]
    if named is None or not free:
        return None
    return (
        f"Tier {free[0]} takes a GPU of any kind, also the {_accelerator(named)} that tier {named.name} waits for: "
        "give it an accelerator_type, too"
    )


def _accelerator(tier: TierConfig) -> str | None:
    return tier.accelerator_type or tier.deployment_config.ray_actor_options.get("accelerator_type")


def _takes_any_gpu(tier: TierConfig) -> bool:
    """Whether neither an accelerator nor a label or resource of their own says which node it needs."""
    actor = tier.deployment_config.ray_actor_options
    said = _accelerator(tier) or actor.get("resources") or actor.get("label_selector")
    return bool(actor.get("num_gpus")) and not said


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def verify(config: CascadeConfig) -> None:
    """Compare tokenizers, contexts and vocabularies of all tiers; raises `ConfigError`."""
    full = config.tiers[-1]
    tokenizers = {tier.name: _tokenizer(tier) for tier in config.tiers}
    fingerprint = tokenizers[full.name].fingerprint
    for tier in config.tiers:
        if tokenizers[tier.name].fingerprint != fingerprint:
            raise ConfigError(
                f"Tier {tier.name} ({tier.model_loading_config.source}) and tier {full.name} "
                f"({full.model_loading_config.source}) have different tokenizers: choose models of one family"
            )
        text = _config(tier).get_text_config()
        _check_engine(tier)
        _drafter_weights(tier)
        context = getattr(text, "max_position_embeddings", None)
        if config.max_model_len is not None and context is not None and context < config.max_model_len:
            raise ConfigError(
                f"max_model_len is {config.max_model_len}, but tier {tier.name} takes {context} tokens: "
                "lower it or choose another model"
            )
        num_ids = tokenizers[full.name].num_ids
        if text.vocab_size < num_ids:
            raise ConfigError(
                f"Tier {tier.name} has {text.vocab_size} token ids and the tokenizer {num_ids}: choose models of one family"
            )


def limits(config: CascadeConfig) -> dict[str, dict[str, int]]:
    """Positions and token ids that each tier takes, by its name; without those whose configuration is not to be had here.

    If nothing is to be verified, the hub is not asked.
    """
    found = {}
    for tier in config.tiers:
        if not (config.verify or Path(tier.model_loading_config.source).exists()):
            continue
        with contextlib.suppress(ConfigError):
            read = _config(tier)
            found[tier.name] = {"context_len": context_len(read), "vocab_size": int(read.get_text_config().vocab_size)}
    return found


def _need(tier: TierConfig) -> Need:
    engine = tier.engine_kwargs
    ranks = engine.tensor_parallel_size
    device, size = _device(tier)
    ours = _engine(tier) == "cascade"
    with _named(f"The model of tier {tier.name}"):
        found = anatomy(
            tier.model_loading_config.source,
            dtype=engine.dtype,
            device=None if device in ACCELERATORS else torch.device(device),
            quantization=engine.quantization,
            sizes_only=not ours,
            **_hub(tier),
        )
    model, weights = tier.model_loading_config.model_id, _drafter_weights(tier) or 0
    return Need(tier.name, model, found, engine.quantization, ranks, weights, device, size, _engine(tier))


def _check_engine(tier: TierConfig) -> None:
    """Its arguments and architectures are vLLM's to know: it is asked where it is installed, else the replica finds out."""
    if _engine(tier) != "vllm" or not installed():
        return
    from cascade.engine.vllm.model import check_architectures, check_options

    options = tier.engine_kwargs.vllm_options
    try:
        check_options(options)
        if not (options["trust_remote_code"] or "model_impl" in options):
            check_architectures(_config(tier).architectures or ())
    except ConfigError as error:
        raise ConfigError(f"Tier {tier.name}: {error}") from None


def _drafter_weights(tier: TierConfig) -> int | None:
    """Numbers that its head adds, None if that is not to be known; raises `ConfigError` if it has no files."""
    head = head_of(tier.engine_kwargs.drafters)
    if head is None or head.kind == EXIT:
        return 0
    with _named(f"The drafter of tier {tier.name}"):
        return check_mtp(tier.model_loading_config.source, **_hub(tier)) if head.within else num_weights(head.source)


def _engine(tier: TierConfig) -> str:
    """What runs its passes, as far as this machine can tell."""
    gpu = bool(_accelerator(tier) or tier.deployment_config.ray_actor_options.get("num_gpus")) or default_device() == "cuda"
    return tier.engine_kwargs.runs_on(gpu=gpu)


def _device(tier: TierConfig) -> tuple[str, int]:
    """Name and memory: of the accelerator if its size is known, else of this machine's device."""
    kind = tier.accelerator_type or ""
    if tier.engine_kwargs.device is None and kind in ACCELERATORS:
        return kind, int(ACCELERATORS[kind] * GIB * tier.gpu_memory_utilization)
    name = tier.engine_kwargs.device or default_device()
    try:
        return name, free_bytes(torch.device(name))
    except (RuntimeError, AssertionError):
        raise ConfigError(
            f"device of tier {tier.name} is {name!r}, which this machine does not have: name another, or leave it out"
        ) from None


def _tokenizer(tier: TierConfig) -> Tokenizer:
    with _named(f"The model of tier {tier.name}"):
        return Tokenizer.from_pretrained(tier.model_loading_config.source, **_hub(tier))


def _config(tier: TierConfig) -> PreTrainedConfig:
    with _named(f"The model of tier {tier.name}"):
        return read_config(tier.model_loading_config.source, **_hub(tier))
