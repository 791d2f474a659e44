"""What the simulator is told and what it tells: tiers with their costs, requests, faults; texts, times, totals."""

import math
from collections.abc import Callable
from dataclasses import dataclass

from cascade.messages import COUPLED, Edge, Rules
from cascade.params import DEFAULT_WINDOW, MOST_BRANCHES, SamplingParams
from cascade.planner.choice import Policy
from cascade.scorer import Scorer

GREEDY = SamplingParams(temperature=0, seed=0)
DEFAULT_POLICY = Policy()


@dataclass(frozen=True, slots=True)
class SimTier:
    name: str
    model: Scorer
    cost: Callable[[int], float]  # seconds of a pass that scores so many tokens, where it is served: caches are colder there
    hop_s: float = 0.0  # one way between it and the tier above, or the router
    policy: Policy = DEFAULT_POLICY
    device: str = ""  # tiers that name the same one share it; one of its own if it names none


@dataclass(frozen=True, slots=True)
class Request:
    """What a client asks."""

    prompt: tuple[int, ...] = (0,)
    params: SamplingParams = GREEDY
    ends: frozenset[int] = frozenset()
    arrive_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Death:
    """The replica of ``tier`` loses everything at ``at_s`` and takes Opens again from ``back_s`` on."""

    tier: str
    at_s: float
    back_s: float = math.inf


@dataclass(frozen=True, slots=True)
class Faults:
    """What goes wrong. Only guesses between tiers are ever lost: commits and the answer travel on reliable, ordered links."""

    seed: int = 0
    jitter_s: float = 0.0  # every message is late by 0 to so much more; proposals overtake each other
    loss: float = 0.0  # share of the proposals between tiers
    duplication: float = 0.0  # share of all proposals that come twice
    deaths: tuple[Death, ...] = ()


NO_FAULTS = Faults()


@dataclass(frozen=True, slots=True)
class Scenario:
    """Tiers bottom to top, and what is asked of them."""

    tiers: tuple[SimTier, ...]
    requests: tuple[Request, ...]
    window: int = DEFAULT_WINDOW  # tokens a lower tier may run ahead
    lockstep: bool = False
    faults: Faults = NO_FAULTS
    max_pass_tokens: int = 512
    deadline_s: float = math.inf  # virtual time after which it is `Stuck`
    adaptive: bool = False  # tiers that do not pay may be left out
    branches: int = MOST_BRANCHES  # that a lower tier may offer and prepare
    rules: Rules = COUPLED  # of the full tier: others than the coupled one are for lockstep


@dataclass(slots=True)
class Usage:
    """What a tier did; seconds are virtual."""

    tier: str
    passes: int = 0
    tokens: int = 0  # positions scored
    busy_s: float = 0.0
    waited_s: float = 0.0  # sum over sessions of the time from being ready to being scored
    corrections: int = 0  # passes that left a session without a guess
    bubble_s: float = 0.0  # sum of the times from there to the session's next pass

    @property
    def mean_bubble_s(self) -> float:
        return self.bubble_s / self.corrections if self.corrections else 0.0


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a scenario led to."""

    texts: tuple[tuple[int, ...], ...]  # output tokens per request
    finish_s: tuple[float, ...]  # when the router had them all
    token_s: tuple[float, ...]  # when each token came, of all requests together
    edges: tuple[Edge, ...]  # totals over all requests, the full tier's first
    usage: tuple[Usage, ...]  # bottom to top

    @property
    def elapsed_s(self) -> float:
        return max(self.finish_s)

    @property
    def num_tokens(self) -> int:
        return sum(map(len, self.texts))

    @property
    def tokens_per_s(self) -> float:
        return self.num_tokens / self.elapsed_s

    @property
    def tokens_per_pass(self) -> float:
        """Of the full tier."""
        return self.num_tokens / self.usage[-1].passes
