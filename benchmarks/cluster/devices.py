"""The tiers and their emulated devices: as they are served, and as the simulator has them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from operator import sub
from pathlib import Path
from typing import Any

import yaml

from benchmarks.cluster.emulated import Device, num_gpus
from cascade.engine.model_config import context_len, read_config
from cascade.engine.tokenizer import Tokenizer
from cascade.params import DEFAULT_WINDOW, SamplingParams, Speculation
from cascade.settings.config import CascadeConfig, TierConfig
from cascade.simulation.recording import Recording, fake
from cascade.simulation.scenario import Request, Scenario, SimTier
from cascade.simulation.simulate import simulate
from cascade.simulation.toy_tier import ToyTier

FILE = Path(__file__).parent / "emulated.yaml"
PAUSE_S = 1e4  # of virtual time, from one request to the next
HOP_S = 0.3e-3  # one way, as links between processes of one machine were measured


@dataclass(frozen=True, slots=True)
class Setup:
    """What is served: tiers on devices, each time so many times longer than it is, so many replicas of each, bottom to top.

    With a file of a `Recording` tiers say what was recorded, without one they are the toys of `FILE`. Without ``pass_ms``, the
    milliseconds of passes of each tier by tokens, passes take what `FILE` says.
    """

    stretch: float = 6.0
    replicas: tuple[int, ...] = (1, 1, 1)
    recording: Path | None = None
    pass_ms: tuple[Mapping[int, float], ...] = ()

    @property
    def values(self) -> dict[str, Any]:
        """The configuration, see `Server.start`."""
        values: dict[str, Any] = yaml.safe_load(FILE.read_text(encoding="utf-8"))
        agreement = None if self.recording is None else Recording.load(self.recording).agreement
        for level, tier in enumerate(values["tiers"]):
            device, deployment = tier["engine_kwargs"]["emulated"], tier["deployment_config"]
            device["stretch"] = self.stretch
            if agreement is not None:
                device |= {"agreement": agreement[level:], "recording": str(self.recording)}
            if self.pass_ms:
                device |= {"pass_ms": dict(self.pass_ms[level]), "context_ms": 0.0}
            deployment["num_replicas"] = self.replicas[level]
        return values

    @property
    def config(self) -> CascadeConfig:
        return CascadeConfig.parse(self.values)

    @property
    def ends(self) -> frozenset[int]:
        """Tokens that end a text."""
        return Tokenizer.from_pretrained(self.config.tiers[-1].model_loading_config.source).end_ids

    @property
    def full_pass_s(self) -> float:
        """Seconds of a pass of one token of the full tier."""
        return Device.of(self.config.tiers[-1]).cost.predict(1)

    @property
    def num_gpus(self) -> int:
        """That a Ray of its own is told of."""
        return num_gpus(self.config)

    def models(self) -> list[ToyTier]:
        """Of the tiers, as they are served."""
        return [_model(tier) for tier in self.config.tiers]

    def tiers(self) -> list[SimTier]:
        """The same tiers in the simulator, with a replica each."""
        found = []
        for tier, model in zip(self.config.tiers, self.models(), strict=True):
            found.append(SimTier(tier.name, model, Device.of(tier).cost.predict, HOP_S))
        return found


def _model(tier: TierConfig) -> ToyTier:
    device, config = Device.of(tier), read_config(tier.model_loading_config.source)
    assert device.agreement is not None
    vocab = config.get_text_config().vocab_size
    return fake(vocab, device.agreement, device.recording, context_len=context_len(config))


@dataclass(frozen=True, slots=True)
class Asked:
    """Requests that come one after the other."""

    prompts: Sequence[Sequence[int]]  # token ids
    params: SamplingParams
    ends: frozenset[int] = frozenset()  # tokens that end a text


@dataclass(frozen=True, slots=True)
class Simulated:
    """What the simulator says of requests that come one after the other."""

    each_s: tuple[float, ...]  # seconds of those that count
    texts: tuple[tuple[int, ...], ...]
    tokens_per_pass: float  # of the full tier

    @property
    def seconds(self) -> float:
        return sum(self.each_s)

    @property
    def tokens_per_second(self) -> float:
        return sum(map(len, self.texts)) / self.seconds


def simulated(tiers: Sequence[SimTier], asked: Asked, speculation: Speculation, warm_up: int) -> Simulated:
    """One request for each prompt, with the tiers that a ``speculation`` asks for; seeds number them.

    One more of ``warm_up`` tokens comes before and does not count: servers have learnt by then what guesses are worth.
    """
    lower = speculation.chosen(tuple(tier.name for tier in tiers))
    seeds = (len(asked.prompts), *range(len(asked.prompts)))
    prompts = (asked.prompts[0], *asked.prompts)
    sizes = (warm_up, *(asked.params.max_tokens for _ in asked.prompts))
    arrivals = [PAUSE_S * place for place in range(len(prompts))]
    requests = tuple(
        Request(tuple(prompt), replace(asked.params, seed=seed, max_tokens=tokens), asked.ends, at)
        for prompt, seed, tokens, at in zip(prompts, seeds, sizes, arrivals, strict=True)
    )
    scenario = Scenario(
        (*(tier for tier in tiers[:-1] if tier.name in lower), tiers[-1]),
        requests,
        window=speculation.draft_window(DEFAULT_WINDOW),
        branches=speculation.most_branches,
        adaptive=speculation.adaptive,
    )
    found = simulate(scenario)
    assert max(map(sub, found.finish_s, arrivals)) < PAUSE_S, "a request met the one before it"
    return Simulated(tuple(map(sub, found.finish_s[1:], arrivals[1:])), found.texts[1:], found.tokens_per_pass)
