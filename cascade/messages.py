"""A request as a session, and messages between two neighbouring ones: Open, Commit, Close go down, Proposal, Failed go up.

Positions are absolute: 0 is the first token of the prompt. Commits and Opens of a session arrive in the order in which they
were sent, or the link is broken. Proposals may be late, lost, repeated, reordered or wrong, because they are only guesses.
"""

import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import zip_longest
from typing import Any, Protocol

from cascade.draft import Draft
from cascade.errors import ContextLengthExceeded, InvalidRequest
from cascade.params import Handling, SamplingParams, Speculation, Structured, check_adapter

MAX_POSITIONS = 16  # positions of a draft that have counts of their own
RUNNER_UPS = 4  # runner-ups that are offered for an own token
MAX_RANKS = 1 + RUNNER_UPS  # kinds of guesses: own tokens of the drafter, first runner-ups, second ones, ...
SEED_MISSING = "resume has tokens and seed is missing: give the seed that came with the answer's first piece"


@dataclass(slots=True)
class Edge:
    """Totals of one request between a drafter and its verifier; passes are those of the verifier.

    The verifier's session counts in place (`cascade.session.guesses.EdgeTotals`); for all other code it is an immutable value.
    """

    drafter: str  # "" for passes without a drafter
    verifier: str
    passes: int = 0  # passes that gave own tokens
    proposed: int = 0  # guesses scored
    accepted: int = 0  # scored guesses that equalled the verifier's own token
    emitted: int = 0  # own tokens
    waited_s: float = 0.0  # seconds that the verifier waited for guesses
    # passes that accepted a guess at the 1st, 2nd, ... position; at most MAX_POSITIONS
    accepted_by_position: list[int] = field(default_factory=list)
    proposed_by_position: list[int] = field(default_factory=list)  # guesses scored there, in all branches
    # the same by rank: own tokens of the drafter, first runner-ups, ...; at most MAX_RANKS
    accepted_by_rank: list[int] = field(default_factory=list)
    proposed_by_rank: list[int] = field(default_factory=list)
    corrected: int = 0  # own tokens of the drafter that the verifier replaced
    prefetched: int = 0  # corrections for which the drafter had prepared a branch
    prefetched_tokens: int = 0  # tokens of these branches
    undrafted_passes: int = 0  # passes that scored no guess
    agreed: int = 0  # own tokens of the drafter that equalled the verifier's, scored or not

    @property
    def mean_accepted_len(self) -> float:
        """Tokens per pass."""
        return self.emitted / self.passes if self.passes else 0.0

    @property
    def agreement(self) -> float | None:
        """Share of the drafter's own tokens that equalled the verifier's; ``None`` if there are none."""
        return self.agreed / (self.agreed + self.corrected) if self.agreed + self.corrected else None

    @property
    def runner_ups(self) -> tuple[int, int]:
        """How many runner-ups of the drafter were scored, and how many were accepted."""
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
    """Log-probabilities at one position, from the full model's raw logits."""

    logprob: float  # the log-probability of the text's token
    top: tuple[tuple[int, float], ...] = ()  # the likeliest tokens with their log-probabilities, likeliest first


@dataclass(frozen=True, slots=True)
class SessionSpec:
    """The task of a session: continue ``tokens``, the first ``prompt_len`` of which are the prompt."""

    tokens: tuple[int, ...]
    prompt_len: int
    params: SamplingParams  # the seed is set
    ends: frozenset[int] = frozenset()  # token ids that end the text
    tier: str = ""  # the tier that serves it
    chain: tuple[str, ...] = ()  # tiers to use below that one, top to bottom
    window: int = 16  # tokens that this session may run ahead of the committed text
    draft_window: int = 16  # the same for the sessions below
    adaptive: bool = False  # tiers of the chain that do not pay may be left out
    priority: int = 0  # lower is served sooner
    cache_salt: str = ""  # keys and values are reused only among requests with the same salt
    branches: int = 0  # branches that this session may offer and extend, see `cascade.session.branches`
    draft_branches: int = 0  # the same for the sessions below
    drafters: tuple[str, ...] = ()  # drafters inside tiers that may guess, here and below, see `cascade.drafters`
    in_turns: bool = False  # shares processors with the tier above, so it drafts only after a commit, and as far as that allows

    def __post_init__(self) -> None:
        assert 0 < self.prompt_len <= len(self.tokens), "a text begins with its prompt"
        assert self.params.seed is not None, "every tier must know the seed"

    def after(self, written: Sequence[int]) -> "SessionSpec":
        """The session that continues after the output ``written``."""
        return replace(self, tokens=(*self.tokens[: self.prompt_len], *written))

    def below(self, text: Sequence[int], chain: tuple[str, ...], *, in_turns: bool = False) -> "SessionSpec":
        """The session that drafts for this one after ``text``, at the first tier of ``chain``."""
        return replace(
            self,
            tokens=tuple(text),
            # log-probabilities come only from the full tier
            params=replace(self.params, logprobs=None, prompt_logprobs=None),
            tier=chain[0],
            chain=chain[1:],
            window=self.draft_window,
            branches=self.draft_branches,
            adaptive=False,
            in_turns=in_turns,
        )


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What a cascade can serve, and the defaults of requests."""

    names: tuple[str, ...]  # drafters inside tiers and tiers, bottom to top
    vocab_size: int
    context_len: int  # positions of prompt and output together
    end_ids: frozenset[int]  # tokens that end a text, unless `ignore_eos`
    adapters: tuple[str, ...]  # the full tier's
    # raises `InvalidRequest` if a grammar cannot be compiled, or does not allow these tokens
    check_grammar: Callable[[Structured, Sequence[int]], object]
    window: int  # tokens that a tier may run ahead of the one above, unless the request says otherwise
    answer_window: int  # tokens that the full tier may write before the client takes them
    drafters: tuple[str, ...] = ()  # the ``names`` of drafters inside tiers
    max_tokens: int | None = None  # output tokens of an answer at most

    def check(self, params: SamplingParams, delivered: Sequence[int] = ()) -> None:
        """Raise `InvalidRequest` if a parameter cannot be honoured, also after the ``delivered`` tokens of the answer.

        Compiles a grammar that is new.
        """
        if self.max_tokens is not None and params.max_tokens > self.max_tokens:
            raise InvalidRequest(
                f"max_tokens is {params.max_tokens}: this server writes at most {self.max_tokens}", "max_tokens"
            )
        params.check_vocabulary(self.vocab_size)
        check_adapter(params.adapter, self.adapters)
        if delivered and params.seed is None:
            raise InvalidRequest(SEED_MISSING, "seed")
        self._check_ids(delivered)
        if len(delivered) > params.max_tokens:
            raise InvalidRequest(
                f"resume has {len(delivered)} tokens of an answer: max_tokens is {params.max_tokens}", "resume"
            )
        if params.structured is not None:
            self.check_grammar(params.structured, delivered)

    def admit(
        self,
        ids: Sequence[int],
        params: SamplingParams,
        speculation: Speculation = Speculation(),
        handling: Handling = Handling(),
        delivered: Sequence[int] = (),
    ) -> SessionSpec:
        """The session of the full tier after the prompt ``ids``; draws a seed if ``params`` has none.

        ``delivered`` are tokens of the answer that the client got before its stream broke off. Raises `InvalidRequest` if the
        prompt cannot be served, or a parameter cannot be honoured.
        """
        self.check(params, delivered)
        if not ids:
            raise InvalidRequest("The prompt is empty: it must have at least one token", "prompt")
        self._check_ids(ids)
        if params.max_tokens > room(len(ids), self.context_len):
            raise ContextLengthExceeded(
                f"The prompt has {len(ids)} tokens and max_tokens is {params.max_tokens}, together "
                f"{len(ids) + params.max_tokens}: {_most(self.context_len)}; shorten it, or lower max_tokens",
                "max_tokens",
            )
        chosen = speculation.chosen(self.names)
        return SessionSpec(
            tokens=(*ids, *delivered),
            prompt_len=len(ids),
            params=params.seeded(),
            ends=frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else self.end_ids),
            tier=self.names[-1],
            chain=tuple(name for name in chosen if name not in self.drafters),
            drafters=tuple(name for name in chosen if name in self.drafters),
            window=self.answer_window,
            draft_window=speculation.draft_window(self.window),
            draft_branches=speculation.most_branches,
            adaptive=speculation.adaptive,
            priority=handling.priority,
            cache_salt=handling.cache_salt,
        )

    def _check_ids(self, ids: Sequence[int]) -> None:
        wrong = next((token for token in ids if not 0 <= token < self.vocab_size), None)
        if wrong is not None:
            raise InvalidRequest(f"Token id {wrong} is out of range: ids go from 0 to {self.vocab_size - 1}", "prompt")


def room(prompt_tokens: int, context_len: int, param: str = "prompt") -> int:
    """Tokens that an answer to a prompt can have; raises `ContextLengthExceeded`, with the field ``param``, if none.

    The message has the phrases by which agents for OpenAI's and Anthropic's APIs recognise that they must shorten a
    conversation.
    """
    if prompt_tokens >= context_len:
        raise ContextLengthExceeded(
            f"prompt is too long: {prompt_tokens} tokens > {context_len - 1} maximum; {_most(context_len)}, one at least of "
            "them for the answer: shorten it",
            param,
        )
    return context_len - prompt_tokens


def _most(context_len: int) -> str:
    return f"this model's maximum context length is {context_len} tokens"


@dataclass(frozen=True, slots=True)
class Routing:
    """How a session is routed. Routers and links read it; a tier only passes it on to the sessions below."""

    lease: str = ""  # the lease that holds the session's replica; named like the session if empty
    traceparent: str = ""  # the span of which the session is part, in the form of W3C Trace Context
    tracestate: str = ""  # likewise
    affinity: str = ""  # requests with the same value go to the same replica; stays at the router
    train: bool = True  # drafters may learn from the text; stays at the router


NO_ROUTING = Routing()


@dataclass(frozen=True, slots=True)
class Open:
    """Begin a session."""

    session: str  # unique; chosen by the side that opens
    spec: SessionSpec
    routing: Routing = NO_ROUTING


@dataclass(frozen=True, slots=True)
class Commit:
    """From position ``start`` the text is ``tokens``; tokens of the session that differ, and all after them, are void."""

    session: str
    start: int
    tokens: tuple[int, ...]
    # a session in turns drafts while its text is right with at least this chance; above 1: not at all
    least_chance: float = 0.0
    most: int = 0  # tokens that it drafts at most; 0: as many as its window has room for


@dataclass(frozen=True, slots=True)
class Close:
    """The session has ended: free everything."""

    session: str
    keep: bool = False  # keep its lease for another session


@dataclass(frozen=True, slots=True)
class Proposal:
    """The sender's guess: from position ``start`` the text continues with ``draft``.

    ``start`` is the end of the committed text, so the next proposal makes up for a lost one.
    """

    session: str
    start: int
    draft: Draft  # its root is the text before ``start``
    # totals of the sender's edge and of those below it: in the first proposal, in every eighth, and at the end of a text
    edges: tuple[Edge, ...] = field(default=(), compare=False)
    logprobs: tuple[Logprobs, ...] = field(default=(), compare=False)  # one a token, if requested
    skip_reason: str = field(default="", compare=False)  # why the sender's planner leaves out the tiers below
    # one for each token of the prompt but the first, if requested
    prompt_logprobs: tuple[Logprobs, ...] = field(default=(), compare=False)
    cached: int = field(default=0, compare=False)  # positions of the prompt that the sender reused
    rests: bool = field(default=False, compare=False)  # the sender drafts no more until the next commit


@dataclass(frozen=True, slots=True)
class Failed:
    """The session has failed at the sender; ``reason`` is one sentence."""

    session: str
    reason: str
    tier: str = ""  # the tier that failed, if known
    fault: bool = False  # the request is at fault: it would fail on every replica of that tier


Message = Open | Commit | Close | Proposal | Failed


def mint() -> str:
    """A unique name for a session."""
    return uuid.uuid4().hex


class Link(Protocol):
    """One direction of a link. Sending never blocks, never raises, and may be done from any thread."""

    def send(self, messages: Sequence[Message]) -> None:
        """Deliver ``messages`` in order."""


def origin(level: int, replaced: int | None = None) -> int:
    """A token's history as a byte: the lowest level that proposed it, and the level whose wrong guess it replaced, if any.

    Drafters and tiers have levels below 16; 0 is the lowest. Guesses come from levels below their verifier's.
    """
    return level << 4 | (level if replaced is None else replaced)


def origin_level(byte: int) -> int:
    """The lowest level that proposed the token."""
    return byte >> 4


def origin_replaced(byte: int) -> int | None:
    """The level whose wrong guess the token replaced, ``None`` if it replaced none."""
    replaced = byte & 15
    return None if replaced == byte >> 4 else replaced
