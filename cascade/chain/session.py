"""One request at one tier: a pure state machine without model, clock or I/O.

    position   0 ........ prompt_len ..... committed ..... len(text) ........................
               |  prompt  |   fixed by the tier above  |  own tokens    |  the draft: guesses from below

The same class runs in the serving tier, in the library and in the simulator. A draft token is accepted iff it equals the
verifier's own token, and the own token is emitted in every case (arXiv 2408.07978), so nothing that arrives from below can
change the text.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from cascade.chain.draft_stats import DraftStats, RunAhead
from cascade.messages import MAX_POSITIONS, NO_DRAFT, Close, Commit, Draft, Edge, Lane, Open, Proposal, origin
from cascade.scorer import Scored

MIN_RUN_AHEAD = 2
REPEATED = 4  # tokens of a proposal at most, for each that the tier above has not been told
MAX_PROMPT_SCORED = 128  # positions of a prompt whose logits one pass gives: they take far more memory than keys and values


class ProtocolError(Exception):
    """The tier above sent a commit that does not join the text: the link is broken and the session void."""


@dataclass(frozen=True, slots=True)
class Work:
    """One row of a pass: score ``tokens`` of the text from position ``start``, and the draft behind them."""

    start: int
    tokens: list[int]
    num_own: int  # own tokens wanted behind the last of tokens: 1, or 0 for a prefill chunk that does not end the text
    draft: Draft = NO_DRAFT

    def __len__(self) -> int:
        """Positions that the pass reads."""
        return len(self.tokens) + len(self.draft)

    @property
    def num_scored(self) -> int:
        """Own tokens that the pass gives."""
        return self.num_own + len(self.draft)

    def pieces(self, size: int) -> "list[Work]":
        """The same row as several, one after another: at most ``size`` tokens that are only read, then those with own ones."""
        read = len(self.tokens) - self.num_own
        parts = [Work(self.start + i, self.tokens[i : min(i + size, read)], 0) for i in range(0, read, size)]
        last = Work(self.start + read, self.tokens[read:], self.num_own, self.draft)
        return [*parts, last] if self.num_own else parts


class Session:
    """A request at the tier named ``tier``, ``level`` tiers above the bottom one.

    ``draft`` is only ever replaced or dropped together with a commit to the tier below or because that tier sent
    something newer, and proposals repeat everything that is not committed: so both sides agree again after any loss.
    """

    __slots__ = (
        "_below_edges",
        "_below_lanes",
        "_edge",
        "_limit",
        "_origins",
        "_past_edges",
        "_told",
        "committed",
        "draft",
        "draft_stats",
        "drafter",
        "drafter_session",
        "kv_len",
        "level",
        "opening",
        "run_ahead",
        "spared",
        "text",
        "tier",
        "vocab_size",
    )

    def __init__(self, opening: Open, tier: str, level: int, vocab_size: int) -> None:
        self.opening = opening
        self.tier = tier
        self.level = level
        self.vocab_size = vocab_size
        self.text = list(opening.tokens)  # one list for life: histories look at it
        self.committed = len(self.text)
        self._told = len(self.text)  # positions of the text that the tier above has been told
        self.run_ahead = RunAhead()
        self.draft = NO_DRAFT  # what the tiers below guess behind the text
        self.kv_len = 0  # positions whose keys and values are those of `text`
        self.drafter = ""  # name of the tier below that proposes, "" while there is none
        self.drafter_session = ""
        self.spared = ""  # why it has no drafter, if the tier left them out
        self._origins = bytearray(len(self.text))  # parallel to text
        self._limit = opening.prompt_len + opening.params.max_tokens
        self._edge = Edge("", tier)
        self._past_edges: dict[tuple[str, str], Edge] = {}  # totals before the last change of drafter
        self._below_edges: tuple[Edge, ...] = ()  # totals of the edges below the current drafter
        self._below_lanes: tuple[Lane, ...] = ()  # what the drafter said of the tiers below it
        self.draft_stats = DraftStats()  # of the current drafter

    # what the tier asks

    @property
    def done(self) -> bool:
        """The text is at its end, unless the tier above corrects it."""
        text = self.text
        return len(text) >= self._limit or (len(text) > self.opening.prompt_len and text[-1] in self.opening.ends)

    @property
    def stalled(self) -> bool:
        """Nothing to score: the text has ended or the window is used up."""
        return self.done or len(self.text) >= self.committed + self.window

    @property
    def window(self) -> int:
        """Tokens it runs ahead of what is committed: in lockstep as many as it may, else no more than are of use."""
        allowed, useful = self.opening.window, self.run_ahead.tokens
        return allowed if self.opening.lockstep or useful >= allowed else max(MIN_RUN_AHEAD, math.ceil(useful))

    @property
    def prefilling(self) -> bool:
        """The text it was opened with is not scored yet."""
        return self.kv_len < len(self.opening.tokens) - 1 and self.num_pending > 1

    @property
    def scoring_prompt(self) -> bool:
        """Log-probabilities of the prompt are wanted, and not all of it is scored."""
        return self.opening.params.prompt_logprobs is not None and self.kv_len < self.opening.prompt_len - 1

    @property
    def num_pending(self) -> int:
        """Positions of the text that have no keys and values yet; 1 while decoding, more before and after a commit."""
        return len(self.text) - self.kv_len

    @property
    def room(self) -> int:
        """Guesses that one pass can use: behind them one own token must still fit limit and window."""
        end = min(self._limit, self.committed + self.window)
        return max(0, end - len(self.text) - 1)

    @property
    def usable(self) -> int:
        """Guesses at hand that the next pass can use."""
        return min(len(self.draft), self.room)

    @property
    def window_full(self) -> bool:
        """All the guesses of a lockstep round are here: a whole draft window, or the drafter's text has ended."""
        ended = bool(self.draft) and self.draft.tokens[-1] in self.opening.ends
        return ended or len(self.draft) >= min(self.opening.draft_window, self.room)

    def work(self, max_tokens: int) -> Work:
        """The next row: at most ``max_tokens`` positions, own tokens that are missing first, then guesses."""
        assert 0 <= self.kv_len < len(self.text)
        assert not self.stalled
        if self.scoring_prompt:
            end = min(self.kv_len + min(max_tokens, MAX_PROMPT_SCORED), self.opening.prompt_len - 1)
            return Work(self.kv_len, self.text[self.kv_len : end], 0)
        pending = self.text[self.kv_len : self.kv_len + max_tokens]
        if len(pending) < self.num_pending:
            return Work(self.kv_len, pending, 0)
        num_guesses = self._num_fed(min(self.usable, max_tokens - len(pending)))
        return Work(self.kv_len, pending, 1, self.draft.first(num_guesses))

    def _num_fed(self, most: int) -> int:
        """Guesses to feed; an ending token is compared but needs no feeding, since nothing comes behind it."""
        tokens, ends = self.draft.tokens, self.opening.ends
        return next((node for node in range(most) if tokens[node] in ends), most)

    # what happens

    def advance(self, work: Work, scored: Scored) -> Commit | None:
        """Take what a pass says of ``work``; the commit for the tier below, ``None`` after a prefill chunk.

        Own tokens may end before the draft does, behind the first at least: the guesses left have not been scored. Those that
        came ahead count as far as the text goes on and the window allows.
        """
        assert self.kv_len == work.start
        if not work.num_own:
            self.kv_len += len(work.tokens)
            return None
        assert 1 <= len(scored.own) <= work.num_scored
        start = len(self.text)
        self._accept(scored.own)
        for token in scored.ahead:
            if self.stalled:
                break
            self._accept((token,))
        self._guess(scored.draft)
        return Commit(self.drafter_session, start, tuple(self.text[start:]))

    def _accept(self, own: Sequence[int]) -> None:
        """Emit the accepted guesses and the own token behind them; what was guessed behind that one is left."""
        draft = self.draft
        new, path = draft.walk(own)
        num_accepted, rest = len(new) - 1, draft.below(path[-1] if path else -1)
        self.text += new
        if path:
            self._origins += bytes(draft.origins[node] for node in path)
        if len(path) < len(new):
            self._origins.append(origin(self.level, corrected=bool(rest)))
            rest = NO_DRAFT
        self.draft_stats.passed(len(draft), len(path), len(new))
        self.draft = rest
        self.kv_len = len(self.text) - 1
        positions = (1,) * min(num_accepted, MAX_POSITIONS)
        self._edge += Edge(self.drafter, self.tier, 1, len(own) - 1, num_accepted, len(new), accepted_by_position=positions)

    def commit(self, start: int, tokens: Sequence[int]) -> Commit | None:
        """The tier above fixes the text; returns what changed, for the tier below, or ``None`` if nothing did."""
        if not self.opening.prompt_len <= start <= len(self.text) or not tokens:
            raise ProtocolError(f"commit at {start} does not join a text of {len(self.text)} tokens")
        end = start + len(tokens)
        have = self.text[start:end]
        same = next((i for i, (a, b) in enumerate(zip(have, tokens, strict=False)) if a != b), len(have))
        ahead = max(0, start + same - self.committed)
        self.run_ahead.judged(ahead, cut=self.committed <= start + same < len(self.text) and same < len(tokens))
        if same == len(tokens):
            self.committed = max(self.committed, end)
            return None
        cut, rest = start + same, tuple(tokens[same:])
        path = self.draft.find(rest) if cut == len(self.text) else []
        self.draft = self.draft.below(path[-1]) if len(path) == len(rest) else NO_DRAFT
        self.text[cut:] = rest
        self._origins[cut:] = bytes(len(rest))
        self.kv_len = min(self.kv_len, cut)
        self._told = min(self._told, cut)
        self.draft_stats.interrupt()
        self.committed = end
        return Commit(self.drafter_session, cut, rest)

    def propose(self, proposal: Proposal) -> None:
        """Guesses from below: ignored if they do not join the text, the newest win where they contradict older ones."""
        if proposal.session != self.drafter_session:
            return
        if _num_passes(proposal.edges) > _num_passes(self._below_edges):  # else it was overtaken
            self._below_edges = proposal.edges
        if self.opening.watch:
            self._below_lanes = proposal.lanes
        if not 0 <= len(self.text) - proposal.start < len(proposal.draft):
            return
        known = self.text[proposal.start :]
        path = proposal.draft.find(known)
        if len(path) == len(known):
            self._guess(proposal.draft.below(path[-1] if path else -1))

    def _guess(self, fresh: Draft) -> None:
        """Take over guesses behind the text, as far as they are token ids and fit into the window. Passes score lines alone."""
        fresh = fresh.trunk
        tokens = fresh.tokens[: self.opening.draft_window]
        valid = next((node for node, token in enumerate(tokens) if not 0 <= token < self.vocab_size), len(tokens))
        fresh = fresh.first(valid)
        both = fresh.merge(self.draft)
        self.draft = both if both.is_line else fresh

    def proposal(self) -> Proposal | None:
        """Everything that is not committed, for the tier above; ``None`` if there is nothing, or nothing worth a message.

        The further ahead a token is, the less its chance to be right, and the longer until it is wanted: so what is repeated
        with it may be `REPEATED` times as long, and a text ahead takes few messages instead of one for each token. Watched
        sessions tell everything, and their lanes.
        """
        ahead, new = len(self.text) - self.committed, len(self.text) - max(self.committed, self._told)
        watch = self.opening.watch
        if not watch and (new <= 0 or (REPEATED * new < ahead and not self.stalled)):
            return None
        self._told = len(self.text)
        start, tokens, origins = self.committed, tuple(self.text[self.committed :]), bytes(self._origins[self.committed :])
        lanes = self.lanes if watch else ()
        return Proposal(self.opening.session, start, Draft(tokens, origins), self.edges, spared=self.spared, lanes=lanes)

    @property
    def lanes(self) -> tuple[Lane, ...]:
        """Guesses that nobody has judged: those at hand, and those that tiers below have of each other."""
        if not self.drafter:
            return ()
        begin, end = len(self.text), len(self.text) + len(self.draft)
        joining = (lane for lane in self._below_lanes if lane.start <= end)  # others are of a text that was cut since
        below = (Lane(lane.tier, max(lane.start, begin), lane.tokens[max(0, begin - lane.start) :]) for lane in joining)
        return (Lane(self.drafter, begin, self.draft.tokens), *below)

    def attach(self, drafter: str, session: str, chain: tuple[str, ...]) -> Open:
        """Begin to draft with the tier ``drafter``, which may use the tiers of ``chain``; the message that opens it."""
        self._bank_edges(drafter)
        self.draft_stats = DraftStats()
        self.drafter, self.drafter_session = drafter, session
        opening = self.opening
        params = opening.params
        return replace(
            opening,
            params=replace(params, logprobs=None, prompt_logprobs=None),  # only the full tier's are of use
            session=session,
            tokens=tuple(self.text),
            tier=drafter,
            chain=chain,
            window=opening.draft_window,
            adaptive=False,
        )

    def detach(self) -> Close | None:
        """Go on alone; the message that closes the session below, ``None`` if there is none."""
        closing = Close(self.drafter_session) if self.drafter else None
        self._bank_edges("")
        self.drafter = self.drafter_session = ""
        return closing

    def waited(self, seconds: float) -> None:
        """Account for time spent waiting for guesses."""
        self._edge += Edge(self.drafter, self.tier, waited_s=seconds)

    @property
    def edges(self) -> tuple[Edge, ...]:
        """Totals per edge, this tier's first, over every drafter the session ever had."""
        totals = dict(self._past_edges)
        for edge in (self._edge, *self._below_edges):
            _add(totals, edge)
        return tuple(totals.values())

    def _bank_edges(self, drafter: str) -> None:
        for edge in (self._edge, *self._below_edges):
            _add(self._past_edges, edge)
        self._edge, self._below_edges = Edge(drafter, self.tier), ()
        self._below_lanes = ()


def _num_passes(edges: Sequence[Edge]) -> int:
    return sum(edge.passes for edge in edges)


def _add(totals: dict[tuple[str, str], Edge], edge: Edge) -> None:
    """Add to the totals, leaving out edges on which nothing happened."""
    if edge.passes or edge.waited_s:
        key = (edge.drafter, edge.verifier)
        totals[key] = totals[key] + edge if key in totals else edge
