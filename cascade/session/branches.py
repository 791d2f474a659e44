"""Branches beside a session's text: runner-ups of its own tokens, and own tokens after some of them.

Where the tier above corrects a token, the right one was often this tier's runner-up. So a tier offers its runner-ups to the
tier above. While that tier verifies, this one generates tokens after the likeliest runner-ups, each in a branch. If a
correction is the first token of a branch, the branch becomes the text, with its keys and values, and the tier goes on at once.
"""

from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass, field

from cascade.draft import NO_DRAFT, Draft
from cascade.messages import RUNNER_UPS, origin
from cascade.planner.acceptance import Calibration
from cascade.planner.tuning import MIN_RUNNER_UP_CHANCE
from cascade.scorer import MAX_FORKED, RunnerUp, gap_byte


@dataclass(frozen=True, slots=True)
class Margin:
    """How close other tokens were to being the own one: the gap to the first runner-up (0 if unknown), and the runner-ups.

    Gaps are bytes, see `gap_byte`.
    """

    gap: int = 0
    runner_ups: tuple[tuple[int, int], ...] = ()

    @staticmethod
    def of(runner_ups: Sequence[RunnerUp]) -> "Margin":
        others = tuple([(other.token, gap_byte(other.gap)) for other in runner_ups[:RUNNER_UPS]])
        return Margin(others[0][1], others) if others else CERTAIN


UNKNOWN = Margin()
CERTAIN = Margin(255)  # no other token was possible


@dataclass(slots=True, eq=False)
class Branch:
    """A runner-up of the text's token at ``start``, and own tokens after it."""

    start: int
    rank: int  # the runner-up's rank, from 1 on
    tokens: list[int]
    margins: list[Margin]  # one for each token
    kv_len: int  # positions whose keys and values its fork holds, including those of the session before ``start``

    @property
    def end(self) -> int:
        return self.start + len(self.tokens)

    @property
    def pending(self) -> list[int]:
        """Its tokens without keys and values, which the next pass reads."""
        return self.tokens[self.kv_len - self.start :]


@dataclass(slots=True)
class Branches:
    """At most ``max_branches`` branches of a session, and the margins of its text after the ``committed`` part."""

    max_branches: int
    committed: int
    verdicts: Calibration = field(default_factory=Calibration)  # the tier above's verdicts on own tokens and runner-ups
    held: list[Branch] = field(default_factory=list)
    margins: list[Margin] = field(default_factory=list)  # one for each token
    # the chance that the text before each token is right; the last entry is for the whole text
    chances: list[float] = field(default_factory=lambda: [1.0])
    unsent: bool = False  # the tier above has not been sent all of the branches

    def append(self, margin: Margin) -> None:
        self.chances.append(self.chances[-1] * self.verdicts.chance(0, margin.gap, first=not self.margins))
        self.margins.append(margin)

    def keep_rejected(
        self, start: int, draft: Draft, own: Sequence[int], margins: Sequence[Margin], path: Sequence[int]
    ) -> None:
        """Make branches of rejected nodes whose scores can still be of use: nodes of a ``draft`` at ``start``, off the accepted
        ``path``, that are runner-ups there. The own tokens after them are kept, too."""
        for place, at in enumerate((-1, *path)):
            if at + 1 >= len(own):
                break
            ranks = {token: rank for rank, (token, _) in enumerate(margins[1 + at].runner_ups, start=1)}
            for node in draft.children(at):
                rank = ranks.get(draft.tokens[node])
                if rank is None or node + 1 >= len(own):
                    continue
                branch = Branch(start + place, rank, [draft.tokens[node]], [UNKNOWN], start + place)
                following: int | None = node
                while following is not None and following + 1 < len(own):
                    token = own[1 + following]
                    branch.tokens.append(token)
                    branch.margins.append(margins[1 + following])
                    following = next((child for child in draft.children(following) if draft.tokens[child] == token), None)
                if len(self.held) < self.max_branches or self._head_chance(branch) > min(map(self._head_chance, self.held)):
                    self.hold(branch)
                    self.unsent = True

    def commit(self, num_tokens: int) -> None:
        """The tier above agrees with the text: ``num_tokens`` more are committed."""
        self._judge(num_tokens)
        self._start_at(self.committed + num_tokens, self.margins[num_tokens:])
        self.held = [branch for branch in self.held if branch.start >= self.committed]

    def correct(self, num_tokens: int, instead: Sequence[int]) -> Branch | None:
        """The tier above accepts ``num_tokens`` more and then commits ``instead``. A branch that begins so becomes the text."""
        self._judge(num_tokens, instead[0])
        cut, size = self.committed + num_tokens, len(instead)
        branch = next((b for b in self.held if b.start == cut and tuple(b.tokens[:size]) == tuple(instead)), None)
        self.held = []
        self._start_at(cut + size, branch.margins[size:] if branch else ())
        self.unsent = False
        return branch

    def _judge(self, num_right: int, instead: int | None = None) -> None:
        """Learn that the tier above accepted ``num_right`` tokens, and then, if given, picked ``instead`` for the next one."""
        for place, margin in enumerate(self.margins[: max(0, num_right + (instead is not None))]):
            said = instead if place == num_right else None
            self.verdicts.judged(0, margin.gap, first=not place, right=said is None)
            for rank, (token, gap) in enumerate(margin.runner_ups, start=1):
                self.verdicts.judged(rank, gap, first=not place, right=token == said)

    def _start_at(self, committed: int, margins: Sequence[Margin]) -> None:
        self.committed = committed
        self.margins, self.chances = [], [1.0]
        for margin in margins:
            self.append(margin)

    # which branches are worth extending

    def chance(self, branch: Branch) -> float:
        """Chance that the tier above accepts the whole branch."""
        chance = self._head_chance(branch)
        for margin in branch.margins[1:]:
            chance *= self.verdicts.chance(0, margin.gap, first=False)
        return chance

    def _head_chance(self, branch: Branch) -> float:
        """Chance that the branch's first token and the text before it are right."""
        place = branch.start - self.committed
        return list(self._runner_ups_at(place))[branch.rank - 1][0]

    def _runner_ups_at(self, place: int) -> Iterator[tuple[float, int, int]]:
        """Runner-ups at a place: the chance to be right (never above that of a nearer one), token and gap."""
        before = chance = self.chances[place]
        for rank, (token, gap) in enumerate(self.margins[place].runner_ups, start=1):
            chance = min(chance, before * self.verdicts.chance(rank, gap, first=not place))
            yield chance, token, gap

    def _offers(self) -> Iterator[tuple[float, int, int, int, int]]:
        """Runner-ups that are likely enough: the chance, the place, the rank, the token and its gap."""
        for place, before in enumerate(self.chances[:-1]):
            if before < MIN_RUNNER_UP_CHANCE:
                break
            for rank, (chance, token, gap) in enumerate(self._runner_ups_at(place), start=1):
                if chance >= MIN_RUNNER_UP_CHANCE:
                    yield chance, place, rank, token, gap

    def candidates(self, limit: int, ends: Set[int]) -> list[tuple[float, Branch]]:
        """Branches worth extending, up to position ``limit`` or one of ``ends``, each with its chance to be of use.

        New ones are not held yet.
        """
        heads = {(branch.start, branch.tokens[0]): self._head_chance(branch) for branch in self.held}
        least = min(heads.values()) if len(heads) >= self.max_branches else 0.0
        candidates = [
            (self.chance(branch), branch)
            for branch in self.held
            if branch.tokens[-1] not in ends and branch.end < min(limit, branch.start + MAX_FORKED)
        ]
        for chance, place, rank, token, _ in self._offers():
            start = self.committed + place
            if token not in ends and start + 1 < limit and chance > least and (start, token) not in heads:
                candidates.append((chance, Branch(start, rank, [token], [UNKNOWN], start)))
        return candidates

    def hold(self, branch: Branch) -> None:
        """Keep a new branch, instead of the unlikeliest if there are too many."""
        if len(self.held) >= self.max_branches:
            self.held.remove(min(self.held, key=self._head_chance))
        self.held.append(branch)

    # what is sent to the tier above

    def proposal(self, text: Sequence[int], origins: bytes, level: int) -> Draft:
        """The uncommitted ``text`` as a tree: runner-ups beside its tokens if they are likely enough, branches after these."""
        self.unsent = False
        if not text:
            return NO_DRAFT
        offered = sorted(self._offers(), key=lambda offer: -offer[0])[: self.max_branches]
        held = {(branch.start - self.committed, branch.tokens[0]): branch for branch in self.held}
        tokens, parents = list(text), list(range(-1, len(text) - 1))
        confidences = bytearray(margin.gap for margin in self.margins)
        for _, place, _, token, gap in sorted(offered, key=lambda offer: offer[1:]):
            parents.append(place - 1)
            tokens.append(token)
            confidences.append(gap)
            if (branch := held.get((place, token))) is not None:
                parents += range(len(tokens) - 1, len(tokens) + len(branch.tokens) - 2)
                tokens += branch.tokens[1:]
                confidences += bytes(margin.gap for margin in branch.margins[1:])
        own = bytes([origin(level)]) * (len(tokens) - len(text))
        return Draft(tuple(tokens), origins + own, bytes(confidences), tuple(parents))
