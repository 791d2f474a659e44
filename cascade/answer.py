"""From a request to what the full tier is asked, and from its proposals to what a client gets.

Pure; the library and the router run the same code. Text and token ids are cut together: a token is handed out with the text
that it completes, and text that may be the beginning of a stop string is held back until it is certain.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, Protocol

from cascade.errors import InvalidRequest
from cascade.messages import COUPLED, Commit, Edge, Lane, Logprobs, Open, Proposal, Rules, mint
from cascade.params import DRAFT_TOP_K, Handling, Rule, SamplingParams, Speculation, Structured, check_adapter

FinishReason = Literal["stop", "length"]
Undrafted = Literal["disabled", "load", "low_acceptance", "no_replica", "short", "late"]

SHORT_PASSES = 4  # of the full tier, in which the first guesses cannot be missed yet


class TextDecoder(Protocol):
    """Incremental detokenization, see `cascade.engine.tokenizer.Decoder`."""

    def step(self, token: int) -> str: ...

    def flush(self) -> str: ...


@dataclass(frozen=True, slots=True)
class Stats:
    """What it took to write a text."""

    prompt_tokens: int
    completion_tokens: int  # as counted by the full tier, an ending token included
    edges: tuple[Edge, ...] = ()  # the full tier's first
    first_token_s: float | None = None  # from the request to the full tier's first token, seconds
    undrafted: Undrafted | None = None  # why no guess was scored at the full tier, see `undrafted`
    rule: Rule = (
        "coupled"  # by which the full tier accepted guesses; with "typical" the text is no sample of the full model's law
    )

    @property
    def full_passes(self) -> int:
        """Passes of the full tier."""
        top = self.edges[0].verifier if self.edges else ""
        return sum(edge.passes for edge in self.edges if edge.verifier == top)

    @property
    def tokens_per_full_pass(self) -> float:
        return self.completion_tokens / self.full_passes if self.full_passes else 0.0


@dataclass(frozen=True, slots=True)
class PromptToken:
    """A token of the prompt, with log-probabilities as those of the answer; the first token has none."""

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
    index: int = 0  # of the prompt, in a batch
    logprobs: tuple[Logprobs, ...] = ()  # one a token if the request asked for them
    prompt: tuple[PromptToken, ...] = ()  # if the request asked for log-probabilities of it


@dataclass(frozen=True, slots=True)
class Chunk:
    """A piece of a text; joined, those of a request are its completion's ``text``, ``token_ids``, ``origins``, ``logprobs``."""

    text: str
    token_ids: tuple[int, ...]
    ends: tuple[int, ...]  # characters of `text` that are complete with each token
    origins: bytes  # history of each token, see `cascade.messages.origin`
    completion: Completion | None = None  # with the last piece
    index: int = 0  # of the prompt, in a batch
    logprobs: tuple[Logprobs, ...] = ()  # one a token if the request asked for them
    prompt: tuple[PromptToken, ...] = ()  # with the first piece, if the request asked for log-probabilities of it
    lanes: tuple[Lane, ...] = ()  # of watched requests; positions are those of the output, and such a piece may have no tokens


@dataclass(slots=True)
class Answer:
    """The text of one request as it grows; ``opening`` is what the full tier was first asked."""

    opening: Open
    decoder: TextDecoder
    index: int = 0
    elapsed: Callable[[], float] | None = None  # seconds since the request came; without it time is not told
    finish_reason: FinishReason | None = None
    _tokens: list[int] = field(default_factory=list)  # output of the full tier so far
    _origins: bytearray = field(default_factory=bytearray)
    _logprobs: list[Logprobs] = field(default_factory=list)  # parallel to _tokens if asked for
    _prompt: tuple[PromptToken, ...] = ()
    _ends: list[int] = field(default_factory=list)  # characters of _text that each token completes
    _text: str = ""
    _num_sent_chars: int = 0
    _num_sent_tokens: int = 0
    _edges: tuple[Edge, ...] = ()
    _first_token_s: float | None = None
    _spared: str = ""  # why the full tier leaves out those below, if it does

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None

    @property
    def num_tokens(self) -> int:
        """Output tokens of the full tier so far."""
        return len(self._tokens)

    def take(self, proposal: Proposal) -> tuple[Chunk | None, Commit | None]:
        """What the full tier says: the next piece, if there is one, and the acknowledgement for the tier."""
        if self.finished:
            return None, None
        begin = self.opening.prompt_len + len(self._tokens)
        known = begin - proposal.start
        new = proposal.draft.tokens[known:] if known >= 0 else ()
        if not new:
            return (self._watched(None, proposal) if self._num_sent_tokens else None), None
        if not self._tokens and self.elapsed is not None:
            self._first_token_s = self.elapsed()
        if not self._tokens and self.opening.params.prompt_logprobs is not None:
            self._prompt = _prompt_tokens(self.opening, proposal.prompt_logprobs)
        if proposal.edges:
            self._edges, self._spared = proposal.edges, proposal.spared
        if self.opening.params.logprobs is not None:
            assert len(proposal.logprobs) == len(proposal.draft), "the full tier was asked for log-probabilities"
            self._logprobs += proposal.logprobs[known:]
        for token, origin in zip(new, proposal.draft.origins[known:], strict=True):
            self._append(token, origin)
            if self.finished:
                break
        return self._watched(self._piece(), proposal), Commit(proposal.session, begin, tuple(new))

    def _watched(self, chunk: Chunk | None, proposal: Proposal) -> Chunk | None:
        """``chunk`` with the lanes that came with it."""
        if not proposal.lanes:
            return chunk
        lanes = tuple(replace(lane, start=lane.start - self.opening.prompt_len) for lane in proposal.lanes)
        return replace(chunk or Chunk("", (), (), b"", index=self.index), lanes=lanes)

    def replay(self, session: str) -> Open:
        """The opening that lets another replica go on where this text stands."""
        opening = self.opening
        tokens = (*opening.tokens[: opening.prompt_len], *self._tokens)
        return replace(opening, session=session, tokens=tokens)

    def _append(self, token: int, origin: int) -> None:
        self._tokens.append(token)
        self._origins.append(origin)
        opening = self.opening
        if token in opening.ends:
            self.finish_reason = "stop"
            self._text += self.decoder.flush()
        else:
            self._text += self.decoder.step(token)
        if not self.finished and len(self._tokens) >= opening.params.max_tokens:
            self.finish_reason = "length"
            self._text += self.decoder.flush()
        self._ends.append(len(self._text))
        self._stop()

    def _stop(self) -> None:
        """Cut at the first stop string, of text that is not sent yet and that `min_tokens` does not keep."""
        params = self.opening.params
        kept = self._covers(min(params.min_tokens, len(self._ends)))
        begin = max(self._num_sent_chars, kept)
        found = [at for stop in params.stop if (at := self._text.find(stop, begin)) >= 0]
        if found:
            self.finish_reason = "stop"
            self._text = self._text[: min(found)]

    def _piece(self) -> Chunk | None:
        """Everything that is certain and was not handed out yet."""
        certain = len(self._text) if self.finished else self._num_certain()
        num_tokens = self._num_sent_tokens
        while num_tokens < len(self._ends) and self._ends[num_tokens] <= certain:
            num_tokens += 1
        if self.finished and self._covers(num_tokens) < certain:
            num_tokens += 1  # a stop string began inside this token
        if num_tokens == self._num_sent_tokens and not self.finished:
            return None
        end = certain if self.finished else self._covers(num_tokens)
        sent = slice(self._num_sent_tokens, num_tokens)
        prompt = () if self._num_sent_tokens else self._prompt
        text = self._text[self._num_sent_chars : end]
        ends = tuple(min(e, end) - self._num_sent_chars for e in self._ends[sent])
        self._num_sent_chars, self._num_sent_tokens = end, num_tokens
        ids, origins = tuple(self._tokens[sent]), bytes(self._origins[sent])
        logprobs = tuple(self._logprobs[sent])
        return Chunk(text, ids, ends, origins, self._completion(num_tokens), self.index, logprobs, prompt)

    def _covers(self, num_tokens: int) -> int:
        """Characters that the first ``num_tokens`` tokens complete."""
        return self._ends[num_tokens - 1] if num_tokens else 0

    def _num_certain(self) -> int:
        """Characters that no stop string can take back any more."""
        held = max((_overlap(self._text, stop) for stop in self.opening.params.stop), default=0)
        return len(self._text) - held

    def _completion(self, num_tokens: int) -> Completion | None:
        if self.finish_reason is None:
            return None
        seed = self.opening.params.seed
        assert seed is not None
        reason = undrafted(self.opening, self._edges, self._spared)
        rule = self.opening.rules.rule
        stats = Stats(self.opening.prompt_len, len(self._tokens), self._edges, self._first_token_s, reason, rule)
        ids, origins = tuple(self._tokens[:num_tokens]), bytes(self._origins[:num_tokens])
        logprobs = tuple(self._logprobs[:num_tokens])
        return Completion(self._text, ids, self.finish_reason, seed, stats, origins, self.index, logprobs, self._prompt)


def _prompt_tokens(opening: Open, logprobs: Sequence[Logprobs]) -> tuple[PromptToken, ...]:
    first, *others = opening.tokens[: opening.prompt_len]
    assert len(logprobs) == len(others), "the full tier was asked for log-probabilities of the prompt"
    pairs = zip(others, logprobs, strict=True)
    return (PromptToken(first), *(PromptToken(id, said.logprob, said.top) for id, said in pairs))


def undrafted(opening: Open, edges: Sequence[Edge], spared: str = "") -> Undrafted | None:
    """Why no guess was scored at the full tier: ``None`` if one was.

    ``disabled``: the request wanted none, or there is no tier below. ``load``, ``low_acceptance``: the full tier found that
    drafting does not pay, now or ever (`cascade.chain.planner.Planner.spared`). ``no_replica``: most passes had no drafter.
    ``short``: the text ended before drafts were tried or guesses came. ``late``: there was a drafter, but its guesses never
    came in time.
    """
    own = [edge for edge in edges if edge.verifier == opening.tier]
    if any(edge.proposed for edge in own):
        return None
    if not opening.chain and not opening.drafters:
        return "disabled"
    for reason in ("load", "low_acceptance", "short"):
        if spared == reason:
            return reason
    alone, all_ = sum(edge.passes for edge in own if not edge.drafter), sum(edge.passes for edge in own)
    if not opening.chain:
        return "short" if all_ <= SHORT_PASSES else "low_acceptance"
    if 2 * alone > all_:
        return "no_replica"
    return "short" if all_ <= SHORT_PASSES else "late"


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of ``text`` that is a beginning of ``stop``."""
    return next((n for n in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:n])), 0)


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What a cascade can serve, and what a request gets where it says nothing. The library and the router admit by it."""

    names: tuple[str, ...]  # of the drafters inside tiers and the tiers, bottom to top
    vocab_size: int
    context_len: int  # positions of prompt and output together
    end_ids: frozenset[int]  # tokens that end a text, unless `ignore_eos`
    adapters: tuple[str, ...]  # of the full tier
    check_grammar: Callable[[Structured], object]  # raises `InvalidRequest` if it cannot be compiled
    window: int  # tokens that a tier may run ahead of the one above, unless the request says otherwise
    answer_window: int  # tokens that the full tier may write before the client takes them
    drafters: tuple[str, ...] = ()  # of these names, those inside tiers
    max_tokens: int | None = None  # of an answer
    lossy: bool = False  # requests may ask for rules that change the law of texts

    def check(self, params: SamplingParams) -> None:
        """Raise `InvalidRequest` if a parameter cannot be honoured. A grammar that is new is compiled for that."""
        if self.max_tokens is not None and params.max_tokens > self.max_tokens:
            raise InvalidRequest(f"max_tokens is {params.max_tokens}: this server writes at most {self.max_tokens}")
        params.check_vocabulary(self.vocab_size)
        check_adapter(params.adapter, self.adapters)
        if params.structured is not None:
            self.check_grammar(params.structured)

    def admit(self, ids: Sequence[int], params: SamplingParams, speculation: Speculation, handling: Handling) -> Open:
        """What the full tier is asked to write behind the prompt ``ids``, under a new session name and with a seed.

        Raises `InvalidRequest` if the prompt cannot be served, or any parameter not be honoured.
        """
        self.check(params)
        self._check_prompt(ids, params.max_tokens)
        chosen = speculation.chosen(self.names)
        return Open(
            session=mint(),
            tokens=tuple(ids),
            prompt_len=len(ids),
            params=params.seeded(),
            ends=frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else self.end_ids),
            tier=self.names[-1],
            chain=tuple(name for name in chosen if name not in self.drafters),
            drafters=tuple(name for name in chosen if name in self.drafters),
            window=self.answer_window,
            draft_window=speculation.draft_window(self.window),
            draft_branches=speculation.most_branches,
            lockstep=speculation.in_rounds,
            rules=self._rules(speculation, params, drafted=bool(chosen)),
            adaptive=speculation.adaptive,
            priority=handling.priority,
            cache_salt=handling.cache_salt,
            watch=handling.watch,
        )

    def _rules(self, speculation: Speculation, params: SamplingParams, *, drafted: bool) -> Rules:
        """By which rules guesses are accepted: at temperature 0, or without guesses, there is but one."""
        if speculation.rule == "typical" and not self.lossy:
            raise InvalidRequest(
                "speculation.rule is 'typical', which changes the distribution of texts: set lossy: true in the configuration"
                " of the server to allow it, or take 'coupled', 'ratio' or 'block'"
            )
        if speculation.rule == "coupled" or not drafted or params.temperature == 0:
            return COUPLED
        top_k = DRAFT_TOP_K if speculation.draft_top_k is None else speculation.draft_top_k
        return Rules(speculation.rule, speculation.inner_rule, likeliest=top_k)

    def _check_prompt(self, ids: Sequence[int], max_tokens: int) -> None:
        if not ids:
            raise InvalidRequest("The prompt is empty: it must have at least one token")
        wrong = next((token for token in ids if not 0 <= token < self.vocab_size), None)
        if wrong is not None:
            raise InvalidRequest(f"Token id {wrong} is out of range: ids go from 0 to {self.vocab_size - 1}")
        if len(ids) + max_tokens > self.context_len:
            raise InvalidRequest(
                f"The prompt has {len(ids)} tokens and max_tokens is {max_tokens}, "
                f"together {len(ids) + max_tokens}: the models take {self.context_len}; shorten it, or lower max_tokens"
            )
