"""The tiers and their emulated devices: as they are served, and as the simulator has them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from operator import sub
from pathlib import Path
from typing import Any

import yaml

from benchmarks.cluster.emulated import Device, num_gpus
from cascade.drafters import make, specs
from cascade.engine.model_config import context_len, read_config
from cascade.engine.tokenizer import Tokenizer
from cascade.params import DEFAULT_WINDOW, Speculation
from cascade.settings.config import CascadeConfig, TierConfig
from cascade.simulation.costs import H100, MOST_TOKENS, Load
from cascade.simulation.recording import Recording
from cascade.simulation.scenario import Request, Scenario, SimTier
from cascade.simulation.simulate import simulate
from cascade.simulation.toy_tier import ToyTier

FILE = Path(__file__).parent / "emulated.yaml"
PAUSE_S = 1e4  # of virtual time, from one request to the next
HOP_S = 0.3e-3  # one way, as links between processes of one machine were measured


def table(load: Load) -> dict[str, Any]:
    """What passes of a model take on an H100, for `Device`: of a token, of most that cost no more, of most of all."""
    sizes = (1, load.free_tokens(H100), MOST_TOKENS)
    pass_ms = {tokens: round(1e3 * load.seconds(tokens, H100), 2) for tokens in sizes}
    return {"pass_ms": pass_ms, "context_ms": round(1e6 * load.context_s(H100), 3)}


@dataclass(frozen=True, slots=True)
class Setup:
    """What is served: tiers on devices, each time so many times longer than it is, so many replicas of each, bottom to top.

    With a file of a `Recording` own tokens are the recorded ones, without one tiers are the toys of `FILE`. Without
    ``pass_ms``, the milliseconds of passes of each tier by tokens, passes take what `FILE` says. ``sources`` are models whose
    tokens were recorded, by tier; other tiers are left out then. ``drafters`` are inside the full tier.
    """

    stretch: float = 6.0
    replicas: tuple[int, ...] = (1, 1, 1)
    recording: Path | None = None
    pass_ms: tuple[Mapping[int, float], ...] = ()
    sources: Mapping[str, str] = field(default_factory=dict)
    drafters: tuple[str, ...] = ()

    @property
    def values(self) -> dict[str, Any]:
        """The configuration, see `Server.start`."""
        values: dict[str, Any] = yaml.safe_load(FILE.read_text(encoding="utf-8"))
        agreement = None if self.recording is None else Recording.load(self.recording).agreement
        if self.sources:
            values["tiers"] = [tier for tier in values["tiers"] if tier["name"] in self.sources]
        for level, tier in enumerate(values["tiers"]):
            device, deployment = tier["engine_kwargs"]["emulated"], tier["deployment_config"]
            device["stretch"] = self.stretch
            if self.sources:
                tier["model_loading_config"]["model_source"] = self.sources[tier["name"]]
            if agreement is not None:
                device |= {"agreement": agreement[level:], "recording": str(self.recording)}
            if self.pass_ms:
                device |= {"pass_ms": dict(self.pass_ms[level]), "context_ms": 0.0}
            deployment["num_replicas"] = self.replicas[level]
        values["tiers"][-1]["engine_kwargs"]["drafter"] = [*self.drafters]
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
        """The same tiers in the simulator, with a replica each and drafters that know no text yet."""
        *lower, full = (
            SimTier(tier.name, model, Device.of(tier).cost.predict, HOP_S)
            for tier, model in zip(self.config.tiers, self.models(), strict=True)
        )
        return [*lower, replace(full, drafters=tuple(make(specs(self.drafters), self.drafters, None)))]


def _model(tier: TierConfig) -> ToyTier:
    device, config = Device.of(tier), read_config(tier.model_loading_config.source)
    return device.toy(config.get_text_config().vocab_size, context_len=context_len(config))


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


def simulated(tiers: Sequence[SimTier], requests: Sequence[Request], speculation: Speculation, warm_up: int) -> Simulated:
    """The requests in turn, with the tiers and drafters that a ``speculation`` asks for; none reuses anything of another.

    One more of ``warm_up`` tokens comes before and does not count: servers have learnt by then what guesses are worth.
    """
    *below, full = tiers
    lower = speculation.chosen((*(drafter.name for drafter in full.drafters), *(tier.name for tier in tiers)))
    readers = tuple(drafter for drafter in full.drafters if drafter.name in lower)
    first = replace(requests[0], params=replace(requests[0].params, max_tokens=warm_up, seed=len(requests)))
    arrivals = [PAUSE_S * place for place in range(1 + len(requests))]
    scenario = Scenario(
        (*(tier for tier in below if tier.name in lower), replace(full, drafters=readers)),
        tuple(
            replace(request, arrive_s=at, cache_salt=str(at)) for request, at in zip((first, *requests), arrivals, strict=True)
        ),
        window=speculation.draft_window(DEFAULT_WINDOW),
        branches=speculation.most_branches,
        adaptive=speculation.adaptive,
    )
    outcome = simulate(scenario)
    seconds = tuple(map(sub, outcome.finish_s, arrivals))
    assert max(seconds) < PAUSE_S, "a request met the one before it"
    return Simulated(seconds[1:], outcome.texts[1:], outcome.tokens_per_pass)
