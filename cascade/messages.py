"""The vocabulary of the link between two neighbouring sessions: Open, Commit, Close go down, Proposal, Failed go up.

Positions are absolute: 0 is the first token of the prompt. Commits and Opens of a session arrive in the order they were
sent, or the link is broken; proposals may be late, lost, repeated, reordered or wrong, because they are only guesses.
"""

import uuid
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import zip_longest
from typing import Any, Protocol

from cascade.draft import Draft
from cascade.params import SamplingParams

MAX_POSITIONS = 16  # positions of a draft that are counted one by one
RUNNER_UPS = 2  # runner-ups that are offered for an own token
MAX_RANKS = 1 + RUNNER_UPS  # kinds of guesses: own tokens of the drafter, first and second runner-ups


@dataclass(slots=True)
class Edge:
    """What happened so far between a drafter and its verifier, for one request; passes are the verifier's.

    The verifier's session counts in place (`cascade.session.edge_totals`); to everybody else it is a value.
    """

    drafter: str  # "" if there was none
    verifier: str
    passes: int = 0  # passes that gave own tokens
    proposed: int = 0  # guesses scored
    accepted: int = 0  # those equal to the verifier's own tokens
    emitted: int = 0  # own tokens
    waited_s: float = 0.0  # seconds that the verifier waited for guesses
    # passes that accepted their 1st, 2nd, ... guess; at most MAX_POSITIONS
    accepted_by_position: list[int] = field(default_factory=list)
    proposed_by_position: list[int] = field(default_factory=list)  # guesses scored there, all branches together
    # guesses that were own tokens of the drafter, its first runner-ups, ...; at most MAX_RANKS
    accepted_by_rank: list[int] = field(default_factory=list)
    proposed_by_rank: list[int] = field(default_factory=list)
    corrected: int = 0  # own tokens of the drafter that the verifier replaced
    prefetched: int = 0  # corrections for which the drafter had prepared a branch
    prefetched_tokens: int = 0  # tokens of those branches
    undrafted_passes: int = 0  # passes that scored no guess
    agreed: int = 0  # own tokens of the drafter equal to the verifier's, scored or not

    @property
    def mean_accepted_len(self) -> float:
        """Tokens per pass."""
        return self.emitted / self.passes if self.passes else 0.0

    @property
    def agreement(self) -> float | None:
        """Share of the drafter's own tokens equal to the verifier's; ``None`` if there are none."""
        return self.agreed / (self.agreed + self.corrected) if self.agreed + self.corrected else None

    @property
    def runner_ups(self) -> tuple[int, int]:
        """How many runner-ups of the drafter were scored, and how many accepted."""
        return sum(self.proposed_by_rank[1:]), sum(self.accepted_by_rank[1:])

    def __add__(self, other: "Edge") -> "Edge":
        return Edge(self.drafter, self.verifier, *(_sum(getattr(self, name), getattr(other, name)) for name in _COUNTS))


_COUNTS = tuple(counter.name for counter in fields(Edge))[2:]


def _sum(first: Any, second: Any) -> Any:
    if isinstance(first, list):
        return [a + b for a, b in zip_longest(first, second, fillvalue=0)]
    return first + second


def add_edges(totals: Mapping[tuple[str, str], Edge], edges: Iterable[Edge]) -> dict[tuple[str, str], Edge]:
    """``totals`` and ``edges`` together, by drafter and verifier."""
    sums = dict(totals)
    for edge in edges:
        key = (edge.drafter, edge.verifier)
        sums[key] = sums[key] + edge if key in sums else edge
    return sums


@dataclass(frozen=True, slots=True)
class Logprobs:
    """Log-probabilities at one position, of the full model's logits before any sampling parameter."""

    logprob: float  # the log-probability of the text's token
    top: tuple[tuple[int, float], ...] = ()  # the likeliest tokens and theirs, likeliest first


@dataclass(frozen=True, slots=True)
class SessionSpec:
    """What a session is: it writes on after ``tokens``, the first ``prompt_len`` of which are the prompt."""

    tokens: tuple[int, ...]
    prompt_len: int
    params: SamplingParams  # the seed is set
    ends: frozenset[int] = frozenset()  # token ids that end the text
    tier: str = ""  # the tier that shall serve it
    chain: tuple[str, ...] = ()  # tiers to use below that one, top to bottom
    window: int = 16  # tokens this session may run ahead of what is committed
    draft_window: int = 16  # the same for the sessions below
    adaptive: bool = False  # tiers of the chain that do not pay may be left out
    priority: int = 0  # lower is served sooner
    cache_salt: str = ""  # keys and values are reused only among requests with the same one
    branches: int = 0  # beside its text that this session may write and offer, see `cascade.session.branches`
    draft_branches: int = 0  # the same for the sessions below
    drafters: tuple[str, ...] = ()  # inside tiers that may guess, here and below, see `cascade.drafters`
    in_turns: bool = False  # it shares processors with the tier above: it writes after a commit, and what that asks for

    def __post_init__(self) -> None:
        assert 0 < self.prompt_len <= len(self.tokens), "a text begins with its prompt"
        assert self.params.seed is not None, "every tier must know the seed"

    def after(self, written: Sequence[int]) -> "SessionSpec":
        """The session that goes on where the output is ``written``."""
        return replace(self, tokens=(*self.tokens[: self.prompt_len], *written))

    def below(self, text: Sequence[int], chain: tuple[str, ...], *, in_turns: bool = False) -> "SessionSpec":
        """The session that drafts for this one after ``text``, at the first tier of ``chain``."""
        return replace(
            self,
            tokens=tuple(text),
            # only the full tier's log-probabilities are of use
            params=replace(self.params, logprobs=None, prompt_logprobs=None),
            tier=chain[0],
            chain=chain[1:],
            window=self.draft_window,
            branches=self.draft_branches,
            adaptive=False,
            in_turns=in_turns,
        )


@dataclass(frozen=True, slots=True)
class Routing:
    """How a session travels. Routers and links read it; a tier hands it on to the sessions below."""

    lease: str = ""  # the lease that holds the session's replica; named like the session if empty
    traceparent: str = ""  # the span that the session is part of, as W3C Trace Context has it
    tracestate: str = ""  # likewise
    affinity: str = ""  # requests with the same one go to the same replica; stays at the router
    train: bool = True  # drafters may learn from the text; stays at the router


NO_ROUTING = Routing()


@dataclass(frozen=True, slots=True)
class Open:
    """Begin a session."""

    session: str  # unique; minted by the side that opens
    spec: SessionSpec
    routing: Routing = NO_ROUTING


@dataclass(frozen=True, slots=True)
class Commit:
    """From position ``start`` the text is ``tokens``; whatever the session had there and after is void if it differs."""

    session: str
    start: int
    tokens: tuple[int, ...]
    # a session in turns writes on while its text is right with this chance at least; above 1: not at all
    least_chance: float = 0.0
    most: int = 0  # tokens that it writes at most; 0: as many as its window has room for


@dataclass(frozen=True, slots=True)
class Close:
    """The session is over: free everything."""

    session: str
    keep: bool = False  # its lease, for another session


@dataclass(frozen=True, slots=True)
class Proposal:
    """I say the text goes on like ``draft`` from position ``start``.

    ``start`` is where the sender's text is committed, so the next proposal makes good for a lost one.
    """

    session: str
    start: int
    draft: Draft  # its root is the text before ``start``
    # totals of the sender's edge and those below it, in the first proposal, every eighth, and one that ends a text
    edges: tuple[Edge, ...] = field(default=(), compare=False)
    logprobs: tuple[Logprobs, ...] = field(default=(), compare=False)  # one a token where the session was opened with them
    skip_reason: str = field(default="", compare=False)  # why the sender's planner leaves out the tiers below, if it does
    # one for each token of the prompt but the first, likewise
    prompt_logprobs: tuple[Logprobs, ...] = field(default=(), compare=False)
    cached: int = field(default=0, compare=False)  # positions of the prompt whose keys and values the sender had already
    rests: bool = field(default=False, compare=False)  # the sender writes no more until the next commit


@dataclass(frozen=True, slots=True)
class Failed:
    """The session is over at the sender, for a reason of one sentence."""

    session: str
    reason: str
    tier: str = ""  # the tier that failed, if known
    fault: bool = False  # the request is to blame: it would fail on every replica of that tier


Message = Open | Commit | Close | Proposal | Failed


def mint() -> str:
    """A session name that nobody else uses."""
    return uuid.uuid4().hex


class Link(Protocol):
    """One direction of a link. Sending never blocks, never raises, and may be done from any thread."""

    def send(self, messages: Sequence[Message]) -> None:
        """Deliver ``messages`` in order."""


def origin(level: int, replaced: int | None = None) -> int:
    """A token's history as a byte: the lowest level that proposed it, and the level whose wrong guess it replaced, if any.

    Levels are those of drafters and tiers, 0 for the lowest, under 16; guesses come from lower levels than their verifier's.
    """
    return level << 4 | (level if replaced is None else replaced)


def origin_level(byte: int) -> int:
    """The lowest level that proposed the token."""
    return byte >> 4


def origin_replaced(byte: int) -> int | None:
    """The level whose wrong guess the token replaced, ``None`` if it replaced none."""
    replaced = byte & 15
    return None if replaced == byte >> 4 else replaced
