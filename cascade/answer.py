"""Turns the full tier's proposals into the answer that a client gets. Pure; used by the library and the router.

A token is handed out with the text that it completes. Text that may be the beginning of a stop string is held back.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, Protocol

from cascade.messages import Commit, Edge, Logprobs, Proposal, SessionSpec

FinishReason = Literal["stop", "length"]
Undrafted = Literal["disabled", "load", "low_acceptance", "no_replica", "short", "late"]

SHORT_PASSES = 4  # passes of the full tier in which guesses do not count as late


class TextDecoder(Protocol):
    """Incremental detokenization, see `cascade.engine.tokenizer.Decoder`."""

    def step(self, token: int) -> str: ...

    def flush(self) -> str: ...


@dataclass(frozen=True, slots=True)
class Stats:
    """How a text was written: counts of tokens and passes, and times."""

    prompt_tokens: int
    completion_tokens: int  # the full tier's count, with an ending token
    edges: tuple[Edge, ...] = ()  # the full tier's first
    first_token_s: float | None = None  # seconds from the request to the full tier's first token
    undrafted: Undrafted | None = None  # why no guess was scored at the full tier, see `undrafted`
    cached_tokens: int = 0  # tokens of the prompt whose keys and values the full tier held already

    @property
    def full_passes(self) -> int:
        """Passes of the full tier. Those of a text that a stop string ended may lack the last seven."""
        return sum(edge.passes for edge in self._of_full_tier)

    @property
    def _of_full_tier(self) -> list[Edge]:
        return [edge for edge in self.edges if edge.verifier == self.edges[0].verifier]

    @property
    def drafted(self) -> Edge:
        """The sum over all drafters of the full tier; counts only passes that scored guesses."""
        top = self.edges[0].verifier if self.edges else ""
        total = sum((edge for edge in self._of_full_tier if edge.drafter), Edge("", top))
        return replace(total, passes=total.passes - total.undrafted_passes, undrafted_passes=0)

    @property
    def tokens_per_full_pass(self) -> float:
        return sum(edge.emitted for edge in self._of_full_tier) / self.full_passes if self.full_passes else 0.0


@dataclass(frozen=True, slots=True)
class PromptToken:
    """A token of the prompt, with log-probabilities like those of the answer; the first token has none."""

    id: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class Completion:
    """A finished text, without its prompt."""

    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    seed: int
    stats: Stats
    origins: bytes = b""  # history of each token, see `cascade.messages.origin`
    index: int = 0  # the prompt's place in its batch
    logprobs: tuple[Logprobs, ...] = ()  # one a token, if requested
    prompt: tuple[PromptToken, ...] = ()  # with log-probabilities, if requested
    stop_string: str | None = None  # the text ends before it


@dataclass(frozen=True, slots=True)
class Chunk:
    """A piece of a text. The pieces of a request, joined, give its completion's ``text``, ``token_ids`` and so on."""

    text: str
    token_ids: tuple[int, ...]
    ends: tuple[int, ...]  # characters of `text` up to the end of each token
    origins: bytes  # history of each token, see `cascade.messages.origin`
    completion: Completion | None = None  # set on the last piece
    index: int = 0  # the prompt's place in its batch
    logprobs: tuple[Logprobs, ...] = ()  # one a token, if requested
    prompt: tuple[PromptToken, ...] = ()  # set on the first piece, if requested
    seed: int | None = None  # the shared noise's seed, set on the first piece


def joined(chunks: Sequence[Chunk]) -> Chunk:
    """All pieces of an answer as one."""
    text, ends, first, last = "", list[int](), chunks[0], chunks[-1]
    for chunk in chunks:
        ends += [len(text) + end for end in chunk.ends]
        text += chunk.text
    return Chunk(
        text,
        tuple(token for chunk in chunks for token in chunk.token_ids),
        tuple(ends),
        b"".join(chunk.origins for chunk in chunks),
        last.completion,
        last.index,
        tuple(logprobs for chunk in chunks for logprobs in chunk.logprobs),
        first.prompt,
        first.seed,
    )


@dataclass(slots=True)
class Answer:
    """The growing text of one request; ``spec`` is the session as first opened at the full tier.

    Output tokens in the spec were delivered before the client's stream broke off. Only what comes after them is handed out, and
    the completion has only that.
    """

    spec: SessionSpec
    decoder: TextDecoder
    index: int = 0
    elapsed: Callable[[], float] | None = None  # seconds since the request arrived
    finish_reason: FinishReason | None = None
    tokens: list[int] = field(default_factory=list)  # output of the full tier so far
    _num_delivered: int = 0  # how many of them the client has
    _origins: bytearray = field(default_factory=bytearray)  # one a token, 0 for tokens that were delivered before
    logprobs: list[Logprobs] = field(default_factory=list)  # if requested, one for each token that was not delivered before
    prompt: tuple[PromptToken, ...] = ()
    _ends: list[int] = field(default_factory=list)  # characters of _text up to the end of each token
    _text: str = ""
    _num_delivered_chars: int = 0
    _num_sent_chars: int = 0
    _num_sent_tokens: int = 0
    edges: tuple[Edge, ...] = ()
    _first_token_s: float | None = None
    _skip_reason: str = ""  # the full tier's, see `Proposal`
    _num_cached: int = 0
    _stop_string: str | None = None

    def __post_init__(self) -> None:
        """Continue after the tokens that the client has, as if they had been written here."""
        delivered = self.spec.tokens[self.spec.prompt_len :]
        self._extend(delivered, bytes(len(delivered)))
        self._num_delivered = self._num_sent_tokens = len(self.tokens)
        self._num_delivered_chars = self._num_sent_chars = len(self._text)

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None

    @property
    def num_tokens(self) -> int:
        return len(self.tokens)

    @property
    def delivered(self) -> Chunk:
        """The text that the client already has, as one piece without history; with a completion if that is the whole answer."""
        text, ids = self._text[: self._num_delivered_chars], tuple(self.tokens[: self._num_delivered])
        ends = tuple(min(end, len(text)) for end in self._ends[: self._num_delivered])
        return Chunk(text, ids, ends, bytes(len(ids)), self._completion(self._num_delivered), self.index)

    def rest(self) -> Chunk | None:
        """A last, empty piece if the client already has the whole answer; ``None`` if there is more to come."""
        return self._piece() if self.finished else None

    def receive(self, proposal: Proposal) -> tuple[Chunk | None, Commit | None]:
        """Take a proposal of the full tier; returns the next piece of text, if any, and the commit that acknowledges it."""
        if self.finished:
            return None, None
        begin = self.spec.prompt_len + len(self.tokens)
        num_old = begin - proposal.start
        new = proposal.draft.tokens[num_old:] if num_old >= 0 else ()
        if not new:
            return None, None
        if len(self.tokens) == self._num_delivered:
            self._num_cached = proposal.cached
        if not self.tokens and self.elapsed is not None:
            self._first_token_s = self.elapsed()
        if not self.tokens and self.spec.params.prompt_logprobs is not None:
            self.prompt = _prompt_tokens(self.spec, proposal.prompt_logprobs)
        if proposal.edges:
            self.edges, self._skip_reason = proposal.edges, proposal.skip_reason
        if self.spec.params.logprobs is not None:
            assert len(proposal.logprobs) == len(proposal.draft), "the full tier was asked for log-probabilities"
            self.logprobs += proposal.logprobs[num_old:]
        self._extend(new, proposal.draft.origins[num_old:])
        return self._piece(), Commit(proposal.session, begin, tuple(new))

    def _extend(self, tokens: Sequence[int], origins: bytes) -> None:
        params = self.spec.params
        for token, origin in zip(tokens, origins, strict=True):
            if self.finished:
                return
            self.tokens.append(token)
            self._origins.append(origin)
            if token in self.spec.ends:
                self.finish_reason = "stop"
            else:
                self._text += self.decoder.step(token)
                if len(self.tokens) >= params.max_tokens:
                    self.finish_reason = "length"
            if self.finished:
                self._text += self.decoder.flush()
            self._ends.append(len(self._text))
            self._stop()

    def _stop(self) -> None:
        """Cut at the first stop string in text that is not sent yet and lies after the first `min_tokens` tokens."""
        params = self.spec.params
        kept = self._covers(min(params.min_tokens, len(self._ends)))
        begin = max(self._num_sent_chars, kept)
        places = [(at, stop) for stop in params.stop if (at := self._text.find(stop, begin)) >= 0]
        if places:
            self.finish_reason = "stop"
            at, self._stop_string = min(places)
            self._text = self._text[:at]

    def _piece(self) -> Chunk | None:
        """The text that is certain and not handed out yet; ``None`` if there is none."""
        certain = len(self._text)
        if not self.finished:  # hold back what may begin a stop string
            certain -= max((overlap(self._text, stop) for stop in self.spec.params.stop), default=0)
        num_tokens = self._num_sent_tokens
        while num_tokens < len(self._ends) and self._ends[num_tokens] <= certain:
            num_tokens += 1
        if self.finished and self._covers(num_tokens) < certain:
            num_tokens += 1  # a stop string began inside this token
        if num_tokens == self._num_sent_tokens and not self.finished:
            return None
        end = certain if self.finished else self._covers(num_tokens)
        sent = slice(self._num_sent_tokens, num_tokens)
        prompt = () if self._num_sent_tokens else self.prompt
        text = self._text[self._num_sent_chars : end]
        ends = tuple(min(e, end) - self._num_sent_chars for e in self._ends[sent])
        self._num_sent_chars, self._num_sent_tokens = end, num_tokens
        logprobs = tuple(self.logprobs[sent.start - self._num_delivered : sent.stop - self._num_delivered])
        seed = self.spec.params.seed if sent.start == self._num_delivered else None
        return Chunk(
            text,
            tuple(self.tokens[sent]),
            ends,
            bytes(self._origins[sent]),
            self._completion(num_tokens),
            self.index,
            logprobs,
            prompt,
            seed=seed,
        )

    def _covers(self, num_tokens: int) -> int:
        """Characters up to the end of the first ``num_tokens`` tokens."""
        return self._ends[num_tokens - 1] if num_tokens else 0

    def _completion(self, num_tokens: int) -> Completion | None:
        if self.finish_reason is None:
            return None
        seed = self.spec.params.seed
        assert seed is not None
        reason = undrafted(self.spec, self.edges, self._skip_reason)
        stats = Stats(self.spec.prompt_len, len(self.tokens), self.edges, self._first_token_s, reason, self._num_cached)
        new = slice(self._num_delivered, num_tokens)
        text, ids, origins = self._text[self._num_delivered_chars :], tuple(self.tokens[new]), bytes(self._origins[new])
        logprobs = tuple(self.logprobs[: num_tokens - self._num_delivered])
        stop = self._stop_string
        return Completion(text, ids, self.finish_reason, seed, stats, origins, self.index, logprobs, self.prompt, stop)


def _prompt_tokens(spec: SessionSpec, logprobs: Sequence[Logprobs]) -> tuple[PromptToken, ...]:
    first, *others = spec.tokens[: spec.prompt_len]
    assert len(logprobs) == len(others), "the full tier was asked for log-probabilities of the prompt"
    pairs = zip(others, logprobs, strict=True)
    return (PromptToken(first), *(PromptToken(id, own.logprob, own.top) for id, own in pairs))


def undrafted(spec: SessionSpec, edges: Sequence[Edge], skip_reason: str = "") -> Undrafted | None:
    """Why the full tier scored no guess; ``None`` if it scored one.

    ``disabled``: the request wanted no guesses, or there is no drafter. ``load``, ``low_acceptance``: drafting does not pay, at
    this load or at all (`cascade.planner.chains.Planner.undrafted`). ``no_replica``: most passes had no drafter. ``short``: the
    text ended before drafts were tried or guesses arrived. ``late``: there was a drafter, but its guesses never arrived in
    time.
    """
    own = [edge for edge in edges if edge.verifier == spec.tier]
    if any(edge.proposed for edge in own):
        return None
    if not spec.chain and not spec.drafters:
        return "disabled"
    for reason in ("load", "low_acceptance", "short"):
        if skip_reason == reason:
            return reason
    alone, all_ = sum(edge.passes for edge in own if not edge.drafter), sum(edge.passes for edge in own)
    if not spec.chain:
        return "short" if all_ <= SHORT_PASSES else "low_acceptance"
    if 2 * alone > all_:
        return "no_replica"
    return "short" if all_ <= SHORT_PASSES else "late"


def overlap(text: str, stop: str) -> int:
    """Length of the longest end of ``text`` that is a beginning of ``stop``."""
    return next((n for n in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:n])), 0)
