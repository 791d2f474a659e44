"""Inputs of the simulator (tiers with their costs, requests, faults) and its results (texts, times, totals)."""

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass, field

from cascade.messages import Edge
from cascade.params import DEFAULT_WINDOW, MOST_BRANCHES, SamplingParams
from cascade.planner.choice import Policy
from cascade.scorer import Drafter, Scorer
from cascade.tier.runner import GREEDY, GRID


@dataclass(frozen=True, slots=True)
class SimTier:
    name: str
    model: Scorer
    # seconds of a pass, by its tokens and the positions that its sessions hold, such as `Profile.predict`
    cost: Callable[[int, int], float]
    hop_s: float = 0.0  # delay, one way, to the tier above or the router
    policy: Policy = field(default_factory=Policy)
    device: str = ""  # tiers with the same name share a device; "" is a device of its own
    timed: tuple[int, ...] = GRID  # tokens of the passes whose costs the planner knows; with one entry all cost the same
    drafters: tuple[Drafter, ...] = ()  # drafters inside the tier
    scored_s: float = 0.0  # extra seconds for each token that needs logits and an own token


@dataclass(frozen=True, slots=True)
class Request:
    """A client's request."""

    prompt: tuple[int, ...] = (0,)
    params: SamplingParams = GREEDY
    ends: frozenset[int] = frozenset()
    arrive_s: float = 0.0
    cache_salt: str = ""  # prompts and texts are reused only among requests with the same salt


@dataclass(frozen=True, slots=True)
class Death:
    """The replica of ``tier`` loses everything at ``at_s`` and takes Opens again from ``back_s`` on."""

    tier: str
    at_s: float
    back_s: float = math.inf


@dataclass(frozen=True, slots=True)
class Faults:
    """Injected faults. Only guesses between tiers can be lost: commits and the answer travel on reliable, ordered links."""

    seed: int = 0
    jitter_s: float = 0.0  # every message is delayed at random by up to this; proposals may overtake each other
    loss: float = 0.0  # share of the proposals between tiers that are lost
    duplication: float = 0.0  # share of all proposals that come twice
    deaths: tuple[Death, ...] = ()


@dataclass(frozen=True, slots=True)
class Scenario:
    """Tiers, bottom to top, and requests to them."""

    tiers: tuple[SimTier, ...]
    requests: tuple[Request, ...]
    window: int = DEFAULT_WINDOW  # tokens that a lower tier may run ahead
    faults: Faults = field(default_factory=Faults)
    max_pass_tokens: int = 512
    deadline_s: float = math.inf  # virtual time after which the simulation raises `Stuck`
    adaptive: bool = False  # tiers that do not pay may be left out
    branches: int = MOST_BRANCHES  # branches that a lower tier may offer and prepare


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of a scenario."""

    texts: tuple[tuple[int, ...], ...]  # output tokens per request
    times: tuple[tuple[float, ...], ...]  # when the router had each token, per request
    edges: tuple[Edge, ...]  # totals over all requests, the full tier's first
    passes: tuple[int, ...]  # number of passes of each tier, bottom to top

    @property
    def finish_s(self) -> tuple[float, ...]:
        """When the router had each whole answer."""
        return tuple(times[-1] for times in self.times)

    @property
    def token_s(self) -> list[float]:
        """When each token of all requests came."""
        return sorted(itertools.chain.from_iterable(self.times))

    @property
    def elapsed_s(self) -> float:
        return max(self.finish_s)

    @property
    def tokens_per_pass(self) -> float:
        """Tokens per pass of the full tier."""
        return sum(map(len, self.texts)) / self.passes[-1]
