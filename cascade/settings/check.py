"""Checks whether the tiers of a configuration belong together and fit on their devices. No weight is loaded.

Code of models takes seconds to import, so it is imported where it is needed: the start of a server does not need it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from cascade.drafters import head_of
from cascade.engine.devices import ACCELERATORS, default_device, free_bytes
from cascade.engine.generation import sampling_defaults
from cascade.engine.memory import GIB
from cascade.engine.model_config import context_len, read_config
from cascade.engine.tokenizer import Tokenizer
from cascade.engine.vllm import batch_invariant, installed
from cascade.errors import ConfigError, ModelError
from cascade.settings.config import CascadeConfig, TierConfig
from cascade.settings.engine import generation_folder

if TYPE_CHECKING:
    from cascade.engine.checkpoint import Anatomy
    from cascade.engine.model_config import Config

WEIGHTS = (".safetensors", ".bin")  # suffixes of their files
MIN_TOKENS = 4096  # the fewest useful cache positions of a tier; its model's context if that is shorter


@dataclass(frozen=True, slots=True)
class Need:
    """The needs of a tier's replica, and what its device has."""

    tier: str
    anatomy: Anatomy
    quantization: str | None
    ranks: int  # devices that share the weights and the cache
    drafter_bytes: int  # weights of its head, all on each rank
    cache_bytes_per_token: int  # keys and values of all layers, and of a head's
    device: str  # such as cuda, cpu or H100
    device_bytes: int  # each rank's memory for weights and cache; on a device of this machine, what is free now
    engine: str

    @property
    def weight_bytes(self) -> int:
        """Bytes of weights on each rank, with the head."""
        return -(-self.anatomy.weight_bytes // self.ranks) + self.drafter_bytes

    @property
    def cache_tokens(self) -> int:
        """Positions of keys and values that fit beside the weights; negative if not even the weights fit."""
        return (self.device_bytes - self.weight_bytes) * self.ranks // self.cache_bytes_per_token

    @property
    def problem(self) -> str | None:
        """One sentence if the tier does not fit on its device."""
        wanted = min(MIN_TOKENS, self.anatomy.context_len)
        if self.cache_tokens >= wanted:
            return None
        return (
            f"Tier {self.tier} takes {self.weight_bytes / GIB:.2f} GiB of weights and {self.device} offers "
            f"{self.device_bytes / GIB:.2f} GiB, which leaves no room for {wanted} tokens of "
            "cache: take a larger device, quantization, or tensor_parallel_size"
        )


def needs(config: CascadeConfig) -> list[Need]:
    """The needs of every tier, bottom to top; raises `ConfigError` if a model cannot be served at all."""
    return [_need(tier) for tier in config.tiers]


def _need(tier: TierConfig) -> Need:
    from cascade.engine.checkpoint import anatomy

    engine = tier.engine_kwargs
    device, size = _device(tier)
    runs_on = _engine(tier)
    with _naming(f"The model of tier {tier.name}"):
        sizes = anatomy(
            tier.model_loading_config.source,
            dtype=engine.dtype,
            device=None if device in ACCELERATORS else torch.device(device),
            quantization=engine.quantization,
            layers=engine.layers or (),
            sizes_only=runs_on != "cascade",
            **tier.engine_kwargs.hub,
        )
    ranks = engine.tensor_parallel_size
    head = _head_weights(tier) * sizes.dtype.itemsize
    each = sizes.cache_bytes_per_token
    if head:  # its keys and values are at most those of one more layer
        each += each // _config(tier).get_text_config().num_hidden_layers
    return Need(tier.name, sizes, engine.quantization, ranks, head, each, device, size, runs_on)


def remarks(tiers: Sequence[Need]) -> list[str]:
    """Remarks on tiers that fit."""
    notes = []
    for below, above in pairwise(tiers):
        if below.anatomy.parameters >= above.anatomy.parameters:
            notes.append(f"Tier {below.tier} is not smaller than tier {above.tier}, which it drafts for: is the order right?")
    full = tiers[-1]
    if not (batch_invariant() if full.engine == "vllm" else full.anatomy.same_bits):
        notes.append(
            f"Logits of tier {full.tier} may differ in their last bits from pass to pass: where two tokens are nearly as "
            "likely, texts may differ (docs/explanation/shared-noise.md)."
        )
    return notes


def unpinned(config: CascadeConfig) -> str | None:
    """One sentence if a tier that takes any GPU may take one that another tier needs, and so block that tier for ever."""
    named = next((tier for tier in config.tiers if _accelerator(tier)), None)
    for tier in config.tiers:
        named_by = ("accelerator_type", "resources", "label_selector")
        pinned = tier.placement_group_config or any(tier.actor_options.get(name) for name in named_by)
        if named is not None and _has_gpu(tier) and not pinned:
            return (
                f"Tier {tier.name} takes a GPU of any kind, also the {_accelerator(named)} that tier {named.name} waits for: "
                "give it an accelerator_type, too"
            )
    return None


def weightless(config: CascadeConfig) -> str | None:
    """One sentence if the folder of a tier's model has no weights, where its engine loads them from."""
    for tier in config.tiers:
        folder, engine = Path(tier.model_loading_config.source), tier.engine_kwargs
        elsewhere = engine.plugin or "load_format" in (engine.model_extra or {})
        if not elsewhere and folder.is_dir() and not any(file.suffix in WEIGHTS for file in folder.iterdir()):
            return (
                f"model_source of tier {tier.name} is {str(folder)!r}, a folder without weights (*{' or *'.join(WEIGHTS)}): "
                "download them, or name another"
            )
    return None


def verify(config: CascadeConfig) -> None:
    """Compare tokenizers, contexts and vocabularies of all tiers, and check their heads; raises `ConfigError`."""
    full = config.tiers[-1]
    tokenizers = {tier.name: _tokenizer(tier) for tier in config.tiers}
    with _naming(f"The model of tier {full.name}"):
        engine = full.engine_kwargs
        source, chosen = full.model_loading_config.source, generation_folder(engine.generation_config)
        sampling_defaults(source, chosen, revision=engine.revision)
    fingerprint, num_ids = tokenizers[full.name].fingerprint, tokenizers[full.name].num_ids
    for tier in config.tiers:
        if tokenizers[tier.name].fingerprint != fingerprint:
            raise ConfigError(
                f"Tier {tier.name} ({tier.model_loading_config.source}) and tier {full.name} "
                f"({full.model_loading_config.source}) have different tokenizers: choose models of one family"
            )
        text = _config(tier).get_text_config()
        _ask_vllm(tier)
        _head_weights(tier)
        context = getattr(text, "max_position_embeddings", None)
        if config.max_model_len is not None and context is not None and context < config.max_model_len:
            raise ConfigError(
                f"max_model_len is {config.max_model_len}, but tier {tier.name} takes {context} tokens: "
                "lower it or choose another model"
            )
        if text.vocab_size < num_ids:
            raise ConfigError(
                f"Tier {tier.name} has {text.vocab_size} token ids and the tokenizer {num_ids}: choose models of one family"
            )


def limits(config: CascadeConfig) -> dict[str, dict[str, int]]:
    """Positions and token ids that each tier takes, without tiers whose model's configuration cannot be read here.

    Does not query the hub if ``verify`` is off in ``config``.
    """
    facts = {}
    for tier in config.tiers:
        if config.verify or Path(tier.model_loading_config.source).exists():
            with contextlib.suppress(ConfigError):
                read = _config(tier)
                facts[tier.name] = {"context_len": context_len(read), "vocab_size": int(read.get_text_config().vocab_size)}
    return facts


def _ask_vllm(tier: TierConfig) -> None:
    """Ask vLLM, if it is installed here, whether it takes the tier's arguments and architecture; else only a replica can."""
    if not installed() or _engine(tier) != "vllm":
        return
    from cascade.engine.vllm.engine import check_architectures, check_options

    options = tier.engine_kwargs.vllm_options
    try:
        check_options(options)
        if not (options["trust_remote_code"] or "model_impl" in options):
            check_architectures(_config(tier).architectures or ())
    except ConfigError as error:
        raise ConfigError(f"Tier {tier.name}: {error}") from None


def _head_weights(tier: TierConfig) -> int:
    """Weights of the tier's head, as far as that can be told; raises `ConfigError` if it has no files."""
    head = head_of(tier.engine_kwargs.drafters)
    if head is None:
        return 0
    from cascade.engine.vllm.heads import head_weights

    num_layers = _config(tier).get_text_config().num_hidden_layers
    with _naming(f"The drafter of tier {tier.name}"):
        return head_weights(head, tier.model_loading_config.source, num_layers) or 0


def _device(tier: TierConfig) -> tuple[str, int]:
    """Name and memory of the accelerator if its size is known, else of this machine's device."""
    kind = _accelerator(tier) or ""
    if tier.engine_kwargs.device is None and kind in ACCELERATORS:
        return kind, int(ACCELERATORS[kind] * GIB * tier.gpu_memory_utilization)
    name = tier.engine_kwargs.device or default_device()
    try:
        return name, free_bytes(torch.device(name))
    except (RuntimeError, AssertionError):
        raise ConfigError(
            f"device of tier {tier.name} is {name!r}, which this machine does not have: name another, or leave it out"
        ) from None


def _accelerator(tier: TierConfig) -> str | None:
    return tier.actor_options.get("accelerator_type")


def _has_gpu(tier: TierConfig) -> bool:
    return bool(tier.resources.get("GPU"))


def _engine(tier: TierConfig) -> str:
    return tier.engine_kwargs.runs_on(gpu=_has_gpu(tier) or default_device() == "cuda")


def _tokenizer(tier: TierConfig) -> Tokenizer:
    with _naming(f"The model of tier {tier.name}"):
        return Tokenizer.from_pretrained(tier.model_loading_config.source, **tier.engine_kwargs.hub)


def _config(tier: TierConfig) -> Config:
    with _naming(f"The model of tier {tier.name}"):
        return read_config(tier.model_loading_config.source, layers=tier.engine_kwargs.layers or (), **tier.engine_kwargs.hub)


@contextlib.contextmanager
def _naming(what: str) -> Iterator[None]:
    """Turn a `ModelError` into a `ConfigError` that begins with ``what``."""
    try:
        yield
    except ModelError as error:
        raise ConfigError(f"{what} cannot be used: {error}") from None
