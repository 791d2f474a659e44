"""One request at one tier: a pure state machine without model, clock or I/O.

    position   0 ........ prompt_len ..... committed ..... len(text) ........................
               |  prompt  |   fixed by the tier above  |  own tokens    |  the draft: guesses from below

The serving tier, the library and the simulator run this class. A guess is accepted iff it equals the verifier's own token, and
the own token is emitted in every case (arXiv 2408.07978): nothing that arrives from below can change the text.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from cascade.draft import NO_DRAFT, Draft, num_same
from cascade.errors import InvalidRequest
from cascade.messages import RUNNER_UPS, Close, Commit, Edge, Open, Proposal, SessionSpec, origin, origin_level
from cascade.planner.acceptance import Calibration, RunAhead
from cascade.planner.choice import NO_GUESS
from cascade.planner.tuning import LIKELY, MIN_RUN_AHEAD
from cascade.scorer import Scored
from cascade.session.branches import UNKNOWN, Branch, Branches, Margin
from cascade.session.guesses import EdgeTotals, Guesses, Hint, usable_nodes

MAX_REPEATED = 4  # a proposal has at most this many tokens for each token that is new to the tier above
TOTALS_EVERY = 8  # one proposal in this many has totals of edges, which take four times as long to encode as the rest
MAX_PROMPT_SCORED = 128  # positions of a prompt whose logits one pass gives: they take far more memory than keys and values


class ProtocolError(Exception):
    """The tier above sent a commit that leaves a gap after the text: the link is broken and the session void."""


@dataclass(slots=True)
class Work:
    """One row of a pass, without the place of its keys and values: score ``tokens`` and the draft after them.

    It is never changed. It is not frozen, because every session makes one for every pass, and frozen ones take twice as long.
    """

    start: int  # position of the first token
    tokens: list[int]
    num_own: int  # own tokens wanted after the last of tokens: 1, or 0 for a prefill chunk that does not end the text
    draft: Draft = NO_DRAFT
    branch: Branch | None = None  # the branch that ``tokens`` belong to; None: they belong to the session's text
    drafters: tuple[str, ...] = ()  # the drafter of each node, see `cascade.session.guesses.Pool`

    def __len__(self) -> int:
        """Positions that the pass reads."""
        return len(self.tokens) + len(self.draft)

    @property
    def num_read(self) -> int:
        """Tokens that are only read: no own token is wanted after them."""
        return len(self.tokens) - self.num_own

    @property
    def num_scored(self) -> int:
        """Own tokens that the pass gives."""
        return self.num_own + len(self.draft)

    def pieces(self, size: int) -> "list[Work]":
        """The same row as several: at most ``size`` tokens that are only read, and the rest."""
        read = self.num_read
        parts = [Work(self.start + i, self.tokens[i : min(i + size, read)], 0) for i in range(0, read, size)]
        last = Work(self.start + read, self.tokens[read:], self.num_own, self.draft, drafters=self.drafters)
        return [*parts, last] if self.num_own else parts


class Correction(NamedTuple):
    """The change that a commit of the tier above has made."""

    start: int  # the text differs from here on
    branch: Branch | None  # the branch that is now the text; its keys and values are still in its fork


class Session:
    """A request at the tier named ``tier``, ``level`` tiers above the bottom one.

    Guesses are dropped only together with a commit to the tier below, and a proposal repeats everything that is not committed.
    So both sides agree again after a message is lost.
    """

    def __init__(self, opening: Open, tier: str, level: int, vocab_size: int, verdicts: Calibration | None = None) -> None:
        """``verdicts`` is how the tier above judged this tier's own tokens; all sessions share it."""
        self.name = opening.session
        self.spec = spec = opening.spec
        self.tier = tier
        self.level = level
        self._vocab_size = vocab_size
        self.text = list(spec.tokens)  # never replaced: drafters and sampling states keep a reference to this list
        self.committed = len(self.text)
        self.kv_len = 0  # positions whose keys and values are those of `text`
        self.cached = 0  # positions of the prompt whose keys and values were reused from other sessions
        self.drafter = ""  # name of the tier below that proposes, "" while there is none
        self.drafter_session = ""
        self.skip_reason = ""  # why it has no drafter, if the planner left them out
        self.changed_from = 0  # position from which on the text differs from that at the last hint
        self.run_ahead = RunAhead()
        self._least_chance = NO_GUESS if spec.in_turns else 0.0  # drafts while its text is right with this chance
        self._most = 0  # tokens that it drafts in its turn at most; 0: as many as there is room for
        self.totals = EdgeTotals(tier)
        self.guesses = Guesses(vocab_size, spec.draft_window, self.totals)
        self.branches: Branches | None = None  # None if the tier above takes no branches
        if spec.branches:
            self.branches = Branches(spec.branches, self.committed, verdicts or Calibration())
        self._sent_len = len(self.text)  # positions of the text that the tier above has been sent
        self._sent_below = len(self.text)  # positions that the tier below has been sent
        self._without_totals = TOTALS_EVERY  # proposals since the last one with totals of edges
        self._origins = bytearray(len(self.text))  # parallel to text, except for passes that are not counted yet
        # passes that are not counted yet: row, guesses scored, new tokens, nodes with the same tokens, all guesses at hand
        self._passes: list[tuple[Work, int, Sequence[int], Sequence[int], Draft]] = []
        self._limit = spec.prompt_len + spec.params.max_tokens
        self.done = False  # the text is at its end, unless the tier above corrects it
        self.window = spec.window  # tokens that it may run ahead of the committed text
        self.stalled = False  # there is nothing to score: the text has ended or the window is used up
        self.max_depth = 0  # longest path of guesses that a pass can use: one own token must still fit after it
        self._measure()

    def _measure(self) -> None:
        """Compute how far the text may grow. Done whenever the text or its committed part changes, since passes ask often."""
        size, spec = len(self.text), self.spec
        self.done = size >= self._limit or (size > spec.prompt_len and self.text[-1] in spec.ends)
        if self.run_ahead.num_cut:  # without a correction so far, the whole window is of use
            useful = self.run_ahead.tokens
            self.window = spec.window if useful >= spec.window else max(MIN_RUN_AHEAD, math.ceil(useful))
        left = min(self._limit, self.committed + self.window) - size
        self.stalled = self.done or left <= 0 or (spec.in_turns and self._turn_over)
        self.max_depth = left - 1 if left > 0 else 0

    # queries of the tier

    @property
    def prefilling(self) -> bool:
        """Whether the text that the session was opened with is not scored yet."""
        return self.kv_len < len(self.spec.tokens) - 1 and self.num_pending > 1

    @property
    def scoring_prompt(self) -> bool:
        """Whether log-probabilities of the prompt are wanted, and not all of the prompt is scored."""
        return self.spec.params.prompt_logprobs is not None and self.kv_len < self.spec.prompt_len - 1

    @property
    def num_pending(self) -> int:
        """Positions of the text that have no keys and values yet; 1 while decoding, more before and after a commit."""
        return len(self.text) - self.kv_len

    @property
    def depth(self) -> int:
        """Longest path of guesses at hand that the next pass can use."""
        return min(self.guesses.pool.draft.height, self.max_depth)

    @property
    def likely_depth(self) -> int:
        """`depth`, but guesses of drafters inside the tier count only if they are likely."""
        of_hints = (hint.calibration.chances(hint.draft.trunk) for hint in self.guesses.hints)
        longest = max([self.guesses.draft.height, *(sum(chance > LIKELY for chance in chances) for chances in of_hints)])
        return min(longest, self.max_depth)

    @property
    def runner_ups(self) -> int:
        return RUNNER_UPS if self.branches is not None else 0

    def candidates(self, most: int) -> tuple[Sequence[int], Sequence[float]]:
        """The likeliest ``most`` nodes of the draft that the next pass can use, ascending, and their chances to be right."""
        pool = self.guesses.pool
        return usable_nodes(pool, self.max_depth, self.spec.ends, most) if pool.chances else ((), ())

    @property
    def chance(self) -> float:
        """Chance that the tier above accepts all of the text so far."""
        return self.branches.chances[-1] if self.branches is not None else 1.0

    @property
    def _turn_over(self) -> bool:
        """Whether the session has drafted all that is worth the time of the tier above."""
        ahead = len(self.text) - self.committed
        kept = self.chance if self.branches is not None else self.run_ahead.share**ahead
        return kept < self._least_chance or 0 < self._most <= ahead

    def branch_candidates(self) -> list[tuple[float, Branch]]:
        """Branches worth extending, held or new, each with its chance to be of use."""
        if self.branches is None or self.spec.in_turns or self.num_pending > 1 or self.spec.params.structured is not None:
            return []
        return self.branches.candidates(min(self._limit, self.committed + self.spec.window), self.spec.ends)

    def branch_work(self, branch: Branch) -> Work:
        """The row that extends a branch, which is held from then on."""
        assert self.branches is not None
        if branch not in self.branches.held:
            self.branches.hold(branch)
        return Work(branch.kv_len, branch.pending, 1, branch=branch)

    def work(self, max_tokens: int, nodes: Sequence[int] = ()) -> Work:
        """The next row: at most ``max_tokens`` positions of the text, then the draft's ``nodes``, each after its parent."""
        assert 0 <= self.kv_len < len(self.text)
        assert not self.stalled
        if self.scoring_prompt:
            end = min(self.kv_len + min(max_tokens, MAX_PROMPT_SCORED), self.spec.prompt_len - 1)
            return Work(self.kv_len, self.text[self.kv_len : end], 0)
        pending = self.text[self.kv_len : self.kv_len + max_tokens]
        if self.kv_len + len(pending) < len(self.text):
            return Work(self.kv_len, pending, 0)
        if not nodes:
            return Work(self.kv_len, pending, 1)
        pool, size = self.guesses.pool, len(nodes)
        drafters = pool.drafters[:size]
        if drafters and nodes[-1] >= size:
            drafters = tuple(map(pool.drafters.__getitem__, nodes))
        return Work(self.kv_len, pending, 1, pool.draft.pick(nodes), None, drafters)

    # results of a pass

    def advance(self, work: Work, scored: Scored) -> int:
        """Take the results of ``work``: accept the guesses that are right, and the own token after them.

        Returns how many tokens the text has gained, 0 after a prefill chunk or a branch. ``scored`` has at least one own token;
        guesses after the last one were not scored.
        """
        if work.branch is not None:
            self._advance_branch(work.branch, work, scored)
            return 0
        assert self.kv_len == work.start
        if not work.num_own:
            self.kv_len += len(work.tokens)
            return 0
        assert 1 <= len(scored.own) <= work.num_own + len(work.draft.tokens)
        draft, own, start = work.draft, scored.own, len(self.text)
        new, path = draft.walk(own, self.spec.ends)
        guesses = self.guesses
        self._passes.append((work, len(own) - 1, new, path, guesses.pool.draft))
        guesses.advance(start, new, path if draft is guesses.draft else guesses.draft.find(new))
        if self.branches is not None:
            margins = [Margin.of(others) for others in scored.runner_ups] or [UNKNOWN] * len(own)
            for node in (-1, *path[: len(new) - 1]):
                self.branches.append(margins[1 + node])
            self.branches.keep_rejected(start, draft, own, margins, path)
        self.changed_from = min(self.changed_from, start)
        self.text += new
        self.kv_len = len(self.text) - 1
        self._measure()
        return len(new)

    def settle(self) -> None:
        """Count and learn from the passes since the last call. The next pass does not depend on it."""
        self._count()
        self.guesses.settle()

    def _count(self) -> None:
        """Count the passes since the last call, and note who guessed their tokens."""
        for work, num_scored, new, path, pool in self._passes:
            accepted = path[: len(new) - 1]  # a guess equal to the last new token does not count: nothing was scored after it
            self.totals.passed(work.draft, num_scored, accepted, len(new), work.drafters)
            right = path if work.draft is pool else pool.find(new)
            trunk = isinstance(right, range)
            self._origins += pool.origins[: len(right)] if trunk else bytes([pool.origins[node] for node in right])
            if len(right) < len(new):
                wrong = next(iter(pool.children(right[-1] if right else -1)), None)
                own = origin(self.level, None if wrong is None else origin_level(pool.origins[wrong]))
                self._origins += bytes([own]) * (len(new) - len(right))  # one token, or more where a draft has equal siblings
        self._passes.clear()

    def _advance_branch(self, branch: Branch, work: Work, scored: Scored) -> None:
        assert self.branches is not None
        [token] = scored.own
        branch.kv_len = work.start + len(work.tokens)
        branch.tokens.append(token)
        branch.margins.append(Margin.of(scored.runner_ups[0]) if scored.runner_ups else UNKNOWN)
        self.branches.unsent = True

    # messages from the tiers above and below

    def commit(self, start: int, tokens: Sequence[int], least_chance: float = 0.0, most: int = 0) -> Correction | None:
        """Take a commit of the tier above, see `Commit`. Returns what changed in the text, ``None`` if nothing did.

        Raises `ProtocolError`, or `InvalidRequest` if the text has ids beyond this tier's vocabulary, since that of the tier
        above may have more padding. Then nothing has changed.
        """
        if not self.spec.prompt_len <= start <= len(self.text) or not tokens:
            raise ProtocolError(f"commit at {start} does not join a text of {len(self.text)} tokens")
        end, branches, self._least_chance, self._most = start + len(tokens), self.branches, least_chance, most
        cut = start + num_same(self.text[start:end], tokens)
        rest = tuple(tokens[cut - start :]) if cut < end else ()
        if rest and not 0 <= min(rest) <= max(rest) < self._vocab_size:
            raise InvalidRequest(f"tier {self.tier} has {self._vocab_size} token ids and the text has others")
        self.run_ahead.judged(max(0, cut - self.committed), cut=bool(rest) and self.committed <= cut < len(self.text))
        if not rest:
            if branches is not None:
                branches.commit(max(0, end - self.committed))
            self.committed = max(self.committed, end)
            self._measure()
            return None
        self.guesses.cut(rest if cut == len(self.text) else None)
        self.changed_from = min(self.changed_from, cut)
        self._sent_len, self._sent_below = min(self._sent_len, cut), min(self._sent_below, cut)
        self.kv_len = min(self.kv_len, cut)
        all_sent = branches is not None and not branches.unsent
        branch = branches.correct(cut - self.committed, rest) if branches is not None else None
        prepared = tuple(branch.tokens[len(rest) :]) if branch is not None else ()  # drafted after the correction
        self.text[cut:] = rest + prepared
        self._count()
        self._origins[cut:] = bytes(len(rest)) + bytes([origin(self.level)]) * len(prepared)
        if prepared and all_sent:
            self._sent_len = len(self.text)
        self.committed = end
        self._measure()
        return Correction(cut, branch)

    def propose(self, proposal: Proposal) -> None:
        """Take guesses from below, see `Guesses.receive`; those of an earlier drafter are ignored."""
        if proposal.session != self.drafter_session:
            return
        self.totals.receive(proposal.edges)
        self.guesses.receive(proposal, self.text)

    def hint(self, hints: Sequence[Hint]) -> None:
        """Replace the guesses of drafters inside the tier by those after the present text."""
        self.guesses.hint(hints)
        self.changed_from = len(self.text)

    def proposal(self) -> Proposal | None:
        """All uncommitted tokens, for the tier above; ``None`` if there are none, or too few new ones for a message.

        The further ahead a token is, the less likely it is right, and the later it is needed. So new tokens are sent when
        at most `MAX_REPEATED` times as many tokens are repeated: a text far ahead takes few messages.
        """
        ahead, new = len(self.text) - self.committed, len(self.text) - max(self.committed, self._sent_len)
        branches = self.branches
        worth_it = new > 0 and (MAX_REPEATED * new >= ahead or self.stalled)
        if self.spec.in_turns and self.stalled and ahead:
            worth_it = True  # the tier above waits for the message that no more will come
        if not (worth_it or (branches is not None and branches.unsent)):
            return None
        self._sent_len = len(self.text)
        self._count()
        tokens, origins = self.text[self.committed :], bytes(self._origins[self.committed :])
        self._without_totals += 1
        has_totals = self.done or self._without_totals >= TOTALS_EVERY
        if has_totals:
            self._without_totals = 0
        return Proposal(
            self.name,
            self.committed,
            branches.proposal(tokens, origins, self.level) if branches is not None else Draft(tuple(tokens), origins),
            self.edges if has_totals else (),
            skip_reason=self.skip_reason,
            cached=self.cached,
            rests=self.stalled,
        )

    def news(self) -> Commit | None:
        """The part of the text that the tier below has not been sent; ``None`` if there is no such tier, or no such part."""
        start, self._sent_below = self._sent_below, len(self.text)
        if not self.drafter or start == len(self.text):
            return None
        return Commit(self.drafter_session, start, tuple(self.text[start:]))

    @property
    def edges(self) -> tuple[Edge, ...]:
        """Totals per edge, this tier's first, over every drafter the session ever had."""
        self._count()
        return self.totals.all

    # the tier below

    def attach(self, chain: tuple[str, ...], session: str, *, in_turns: bool = False) -> SessionSpec:
        """Begin to draft with the first tier of ``chain``; returns the spec of its ``session``."""
        self._change_drafter(chain[0], session)
        self._sent_below = len(self.text)
        return self.spec.below(self.text, chain, in_turns=in_turns)

    def recall(self) -> None:
        """Let `news` repeat the last token: the tier below rests until it gets a commit."""
        if len(self.text) > self.spec.prompt_len:
            self._sent_below = min(self._sent_below, len(self.text) - 1)

    def detach(self) -> Close | None:
        """Continue without a tier below; returns the message that closes its session, ``None`` if there is none."""
        closing = Close(self.drafter_session) if self.drafter else None
        self._change_drafter("", "")
        return closing

    def _change_drafter(self, drafter: str, session: str) -> None:
        self._count()
        self.totals.change_drafter(drafter)
        self.guesses.change_drafter()
        self.drafter, self.drafter_session = drafter, session
