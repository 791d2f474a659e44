"""Where the models of a cascade are loaded: all in this process, or all but the full one in processes of their own."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import Any, Self

import torch

from cascade.chain.policy import Policy
from cascade.drafters import DrafterSpec, source_and_kind
from cascade.engine import budget
from cascade.engine.heads.mtp_formats import check_mtp
from cascade.engine.loading import check_room, common_room, find_device, load
from cascade.engine.model import Model
from cascade.engine.threads import apart
from cascade.engine.tokenizer import Tokenizer
from cascade.engine.vllm.model import VllmModel
from cascade.errors import ConfigError
from cascade.processes.child import TierSpec
from cascade.processes.lower_tiers import LowerTiers, pay

TIER_NAMES = {
    1: ("full",),
    2: ("tiny", "full"),
    3: ("tiny", "medium", "full"),
    4: ("tiny", "small", "medium", "full"),
    5: ("tiny", "small", "medium", "large", "full"),
}


@dataclass(frozen=True, slots=True)
class Placed:
    """Models that are loaded, bottom to top: those elsewhere, then those here."""

    lower: LowerTiers | None
    models: Sequence[Model | VllmModel]
    tokenizer: Tokenizer

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """Whoever takes them over closes them, but for an error on the way."""
        if error is not None and self.lower is not None:
            self.lower.close()


@dataclass(frozen=True, slots=True)
class Checkpoints:
    """What is loaded, bottom to top, each by a local path or a Hugging Face hub id; see `cascade.local.Cascade`."""

    sources: Sequence[str]
    names: Sequence[str]
    quantization: Sequence[str | None]
    options: Mapping[str, Any]  # dtype, device and trust_remote_code of `cascade.engine.loading.load`
    engine: str = "cascade"  # or "vllm"

    def place(self, processes: bool | None, policy: Policy, drafters: Sequence[DrafterSpec]) -> Placed:
        """Load them all; raises `ModelError`, or `ConfigError` if they do not belong together."""
        tokenizer = self._tokenizer()
        if self.engine == "vllm":
            return Placed(None, self._on_vllm(processes, drafters), tokenizer)
        if any(one.within for one in drafters):
            check_mtp(self.sources[-1], trust_remote_code=self.options["trust_remote_code"])
        device = find_device(self.sources[-1], self.options["device"])
        if processes and device.type != "cpu":
            raise ConfigError(f"processes is True and device is {device}: tiers share a device from one process, leave it out")
        if pay(len(self.sources), device, policy) if processes is None else processes:
            return self._spread(tokenizer, policy, drafters)
        return Placed(None, self._load(device, drafters), tokenizer)

    def _tokenizer(self) -> Tokenizer:
        """The one that all have."""
        trust: bool = self.options["trust_remote_code"]
        tokenizers = [Tokenizer.from_pretrained(source, trust_remote_code=trust) for source in self.sources]
        for source, tokenizer in zip(self.sources, tokenizers, strict=True):
            if tokenizer.fingerprint != tokenizers[-1].fingerprint:
                raise ConfigError(
                    f"{source} and {self.sources[-1]} have different tokenizers: the models of a cascade must share one"
                )
        return tokenizers[-1]

    def _load(self, device: torch.device, drafters: Sequence[DrafterSpec]) -> list[Model]:
        """All of them, into this process; caches when all weights are there."""
        networks = [
            apart(partial(load, source, quantization=method, **self.options))
            for source, method in zip(self.sources, self.quantization, strict=True)
        ]
        kinds = {key: self.options[key] for key in ("dtype", "trust_remote_code")}
        room = common_room(self.sources, device, **kinds)
        lower = [apart(partial(Model, network, cache_tokens=room)) for network in networks[:-1]]
        return [*lower, apart(partial(Model.drafting, networks[-1], *source_and_kind(drafters), cache_tokens=room))]

    def _on_vllm(self, processes: bool | None, drafters: Sequence[DrafterSpec]) -> list[VllmModel]:
        """All of them, on vLLM in this process; on a GPU they share its memory evenly."""
        if reads := next((one.kind for one in drafters if one.reads), None):
            raise ConfigError(f"drafter {reads!r} reads a model of our own engine: remove it, or set engine to 'cascade'")
        for name, given in {"processes": processes, "device": self.options["device"]}.items():
            if given:
                raise ConfigError(f"{name} is {given!r}, which is for our own engine: remove it, or set engine to 'cascade'")
        options = {name: self.options[name] for name in ("dtype", "trust_remote_code") if self.options[name]}
        if torch.cuda.is_available():
            options["gpu_memory_utilization"] = budget.UTILIZATION / len(self.sources)
        found: list[VllmModel] = []
        try:
            for source, method in zip(self.sources, self.quantization, strict=True):
                given = {"quantization": method} if method else {}
                found.append(VllmModel(source, options=options | given))
        except BaseException:
            for model in found:
                model.close()
            raise
        return found

    def _spread(self, tokenizer: Tokenizer, policy: Policy, drafters: Sequence[DrafterSpec]) -> Placed:
        """The full one into this process, while the others load into theirs."""
        check_room(self.sources, self.quantization, **self.options)
        lower = LowerTiers(self._specs(policy, drafters))
        try:
            network = apart(partial(load, self.sources[-1], quantization=self.quantization[-1], **self.options))
            lower.wait()
            model = apart(partial(Model.drafting, network, *source_and_kind(drafters)))
            return Placed(lower, [model], tokenizer)
        except BaseException:
            lower.close()
            raise

    def _specs(self, policy: Policy, drafters: Sequence[DrafterSpec]) -> list[TierSpec]:
        return [
            TierSpec(
                name,
                level,
                bottom=level == len(drafters),
                source=source,
                tokenizer=self.sources[-1],
                policy=policy,
                drafters=tuple(one for one in drafters if not one.reads),
                options={**self.options, "quantization": method},
            )
            for level, (name, source, method) in enumerate(
                zip(self.names[:-1], self.sources[:-1], self.quantization[:-1], strict=True), start=len(drafters)
            )
        ]


def check_models(models: Sequence[object], names: Sequence[str] | None) -> None:
    """Raise `ConfigError` if there are too few or too many, or if their names are not one for each."""
    if isinstance(models, str):
        raise ConfigError(f"models is {models!r}: give a list, bottom to top")
    if not 1 <= len(models) <= len(TIER_NAMES):
        raise ConfigError(f"models has {len(models)} entries: a cascade has 1 to {len(TIER_NAMES)} tiers")
    if names is not None and not len(set(names)) == len(names) == len(models):
        raise ConfigError(f"names is {names!r}: give each of the {len(models)} models a name of its own")


def each(quantization: str | Sequence[str | None] | None, num_models: int) -> list[str | None]:
    """One method for every model."""
    if quantization is None or isinstance(quantization, str):
        return [quantization] * num_models
    if len(quantization) != num_models:
        raise ConfigError(
            f"quantization has {len(quantization)} entries for {num_models} models: give one for each, or one name for all"
        )
    return list(quantization)
