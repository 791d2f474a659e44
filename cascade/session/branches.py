"""Ways that a session's text may go instead: runner-ups beside its own tokens, and the text that it has prepared after some.

A tier that is corrected has often nearly said the right token itself. So it offers its runner-ups to the tier above, and while
that one verifies, it writes after the likeliest of them as it does after its text. A correction that was prepared finds its
continuation, with keys and values, and the tier goes on without a pause.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from cascade.draft import NO_DRAFT, Draft
from cascade.messages import RUNNER_UPS, origin
from cascade.planner.acceptance import Calibration
from cascade.scorer import MAX_FORKED, RunnerUp, gap_byte

LEAST_OFFERED = 0.02  # chance below which one is not worth its bytes


@dataclass(frozen=True, slots=True)
class Beside:
    """What nearly was an own token: its gap to the next one as a byte, 0 if nobody knows, and those next ones."""

    gap: int = 0
    others: tuple[RunnerUp, ...] = ()

    @staticmethod
    def of(runner_ups: Sequence[RunnerUp]) -> "Beside":
        return Beside(gap_byte(runner_ups[0].gap), tuple(runner_ups[:RUNNER_UPS])) if runner_ups else CERTAIN


UNKNOWN = Beside()
CERTAIN = Beside(255)  # no other token was possible


@dataclass(slots=True, eq=False)
class Branch:
    """Text from ``start`` on that is not the session's: a runner-up of the token there, and own tokens after it."""

    start: int
    rank: int  # of its first token, from 1 on
    tokens: list[int]
    beside: list[Beside]  # of each token
    kv_len: int  # positions whose keys and values its fork holds, those of the session before ``start`` included
    ended: bool = False

    @property
    def end(self) -> int:
        """Position after it."""
        return self.start + len(self.tokens)

    @property
    def pending(self) -> list[int]:
        """Its tokens without keys and values, which the next pass reads."""
        return self.tokens[self.kv_len - self.start :]


@dataclass(slots=True)
class Branches:
    """What a session that may be corrected knows beside its text, from what is ``committed`` on: at most ``most`` branches."""

    most: int
    committed: int
    verdicts: Calibration = field(default_factory=Calibration)  # of the tier above on own tokens and runner-ups
    held: list[Branch] = field(default_factory=list)
    beside: list[Beside] = field(default_factory=list)  # of each token of the text
    chances: list[float] = field(default_factory=lambda: [1.0])  # that the text up to each, and to its end, is right
    grown: bool = False  # the tier above has not been told all of it

    def wrote(self, beside: Beside) -> None:
        """The text has one more own token."""
        self.chances.append(self.chances[-1] * self.verdicts.chance(0, beside.gap, first=not self.beside))
        self.beside.append(beside)

    def refused(self, start: int, draft: Draft, own: Sequence[int], beside: Sequence[Beside], path: Sequence[int]) -> None:
        """A draft at ``start`` was scored, and ``path`` of it is the text now: a node that is no more than a runner-up there is
        a branch, and what was scored after it is written."""
        for place, at in enumerate((-1, *path)):
            if at + 1 >= len(own):
                break
            ranks = {other.token: rank for rank, other in enumerate(beside[1 + at].others, start=1)}
            for node in draft.children(at):
                rank = ranks.get(draft.tokens[node])
                if rank is not None and node + 1 < len(own):
                    self._write(
                        Branch(start + place, rank, [draft.tokens[node]], [UNKNOWN], start + place), draft, own, beside, node
                    )

    def _write(self, branch: Branch, draft: Draft, own: Sequence[int], beside: Sequence[Beside], node: int | None) -> None:
        while node is not None and node + 1 < len(own):
            branch.tokens.append(own[1 + node])
            branch.beside.append(beside[1 + node])
            node = next((child for child in draft.children(node) if draft.tokens[child] == own[1 + node]), None)
        head = self._head(branch.start, branch.rank)
        if len(self.held) < self.most or head > min(self._head(one.start, one.rank) for one in self.held):
            self.hold(branch)
            self.grown = True

    def kept(self, num_kept: int) -> None:
        """The tier above says the same so far: ``num_kept`` more tokens of the text are committed, if there are as many."""
        for place, beside in enumerate(self.beside[:num_kept]):
            self._judge(beside, None, first=not place)
        self._start_at(self.committed + num_kept, self.beside[num_kept:])
        self.held = [branch for branch in self.held if branch.start >= self.committed]

    def corrected(self, num_kept: int, tokens: Sequence[int]) -> Branch | None:
        """It says otherwise after so many: a branch that begins with these tokens, which is the text now. No other is left."""
        for place, beside in enumerate(self.beside[: max(0, num_kept + 1)]):
            self._judge(beside, tokens[0] if place == num_kept else None, first=not place)
        cut = self.committed + num_kept
        found = (b for b in self.held if b.start == cut and tuple(b.tokens[: len(tokens)]) == tuple(tokens))
        branch = next(found, None)
        self.held = []
        self._start_at(cut + len(tokens), branch.beside[len(tokens) :] if branch else ())
        self.grown = False
        return branch

    def _judge(self, beside: Beside, instead: int | None, *, first: bool) -> None:
        verdicts = self.verdicts
        verdicts.judged(0, beside.gap, first=first, right=instead is None)
        for rank, other in enumerate(beside.others, start=1):
            verdicts.judged(rank, gap_byte(other.gap), first=first, right=other.token == instead)

    def _start_at(self, committed: int, beside: Sequence[Beside]) -> None:
        self.committed = committed
        self.beside, self.chances = [], [1.0]
        for one in beside:
            self.wrote(one)

    # what is worth writing

    def chance(self, branch: Branch) -> float:
        """That the tier above says all of it."""
        chance = self._head(branch.start, branch.rank)
        for beside in branch.beside[1:]:
            chance *= self.verdicts.chance(0, beside.gap, first=False)
        return chance

    def _head(self, start: int, rank: int) -> float:
        """That the runner-up of that rank is right there, and what is before it. No likelier than a nearer one."""
        place = start - self.committed
        nearer = self.beside[place].others[:rank]
        chance = self.verdicts.chance
        return self.chances[place] * min(chance(i, gap_byte(one.gap), first=not place) for i, one in enumerate(nearer, start=1))

    def worth(self, limit: int) -> list[tuple[float, Branch]]:
        """Branches that may be written on, none up to ``limit`` yet, and new ones, each with the chance that this is of use.

        New ones are not held before `hold`.
        """
        heads = {(branch.start, branch.tokens[0]): self._head(branch.start, branch.rank) for branch in self.held}
        least = min(heads.values()) if len(heads) >= self.most else 0.0
        found = [
            (self.chance(branch), branch)
            for branch in self.held
            if not branch.ended and branch.end < min(limit, branch.start + MAX_FORKED)
        ]
        for place, beside in enumerate(self.beside):
            start = self.committed + place
            if start + 1 >= limit or self.chances[place] < LEAST_OFFERED:
                break
            for rank, other in enumerate(beside.others, start=1):
                head = self._head(start, rank)
                if head > max(least, LEAST_OFFERED) and (start, other.token) not in heads:
                    found.append((head, Branch(start, rank, [other.token], [UNKNOWN], start)))
        return found

    def void(self) -> None:
        """Let go of all branches: their keys and values are lost."""
        self.held = []

    def hold(self, branch: Branch) -> None:
        """Keep a new branch, in the place of the unlikeliest if there are too many."""
        if len(self.held) >= self.most:
            self.held.remove(min(self.held, key=lambda one: self._head(one.start, one.rank)))
        self.held.append(branch)

    # what the tier above is told

    def draft(self, text: Sequence[int], origins: bytes, level: int) -> Draft:
        """``text`` from what is committed on, a runner-up beside its tokens where it has a chance, and what is after these."""
        self.grown = False
        if not text:
            return NO_DRAFT
        gaps = bytes(beside.gap for beside in self.beside)
        ways = {(branch.start - self.committed, branch.tokens[0]): branch for branch in self.held}
        heads = sorted(self._heads(len(text)), key=lambda head: -head[0])[: self.most]
        if not heads:
            return Draft(tuple(text), origins, gaps)
        tokens, parents, confidences = list(text), list(range(-1, len(text) - 1)), bytearray(gaps)
        for _, place, rank in sorted(heads, key=lambda head: (head[1], head[2])):
            other = self.beside[place].others[rank - 1]
            branch = ways.get((place, other.token))
            parents.append(place - 1)
            tokens.append(other.token)
            confidences.append(gap_byte(other.gap))
            if branch is not None:
                parents += range(len(tokens) - 1, len(tokens) + len(branch.tokens) - 2)
                tokens += branch.tokens[1:]
                confidences += bytes(beside.gap for beside in branch.beside[1:])
        own = bytes([origin(level, corrected=False)]) * (len(tokens) - len(text))
        return Draft(tuple(tokens), origins + own, bytes(confidences), tuple(parents))

    def _heads(self, size: int) -> list[tuple[float, int, int]]:
        """Chances, places and ranks of all that may be offered; a second runner-up only beside the first."""
        heads = []
        for place, beside in enumerate(self.beside[:size]):
            for rank in range(1, len(beside.others) + 1):
                chance = self._head(self.committed + place, rank)
                if chance < LEAST_OFFERED:
                    break
                heads.append((chance, place, rank))
        return heads
