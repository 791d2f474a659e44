"""What is guessed after a session's text, by the tier below and by drafters inside the tier, and how good that was so far."""

from collections.abc import Sequence

from cascade.draft import NO_DRAFT, Draft
from cascade.messages import Lane, Proposal
from cascade.planner.acceptance import Calibration, DraftStats
from cascade.session.edge_totals import EdgeTotals
from cascade.session.hints import Hint, Pool, pooled
from cascade.session.rounds import MAX_NODES

LIKELY = 0.5  # chance of a guess for which nobody waits for others


class Guessed:
    """Guesses of token ids under ``vocab_size``, at most ``window`` positions ahead; ``totals`` counts what they are worth.

    ``draft`` is only ever replaced or dropped together with a commit to the tier below or because that tier sent something
    newer.
    """

    __slots__ = ("_lanes", "_missing", "_pool", "_totals", "_vocab_size", "_window", "calibration", "draft", "hints", "stats")

    def __init__(self, vocab_size: int, window: int, totals: EdgeTotals) -> None:
        self._vocab_size = vocab_size
        self._window = window
        self._totals = totals
        self.draft = NO_DRAFT  # of the tier below
        self.hints: tuple[Hint, ...] = ()  # of drafters inside the tier
        self.stats = DraftStats()  # of the tier below
        self.calibration = Calibration()  # of its guesses
        self._lanes: tuple[Lane, ...] = ()  # what the tier below said of those below it
        self._missing: int | None = None  # position of a correction that no guess is known after
        self._pool: tuple[Draft, tuple[Hint, ...], Pool] | None = None  # of both, and of what it was made

    @property
    def pool(self) -> Pool:
        """All guesses as one tree."""
        known = self._pool
        if known is None or known[0] is not self.draft or known[1] is not self.hints:
            known = self._pool = self.draft, self.hints, pooled(self.draft, self.calibration, self.hints)
        return known[2]

    @property
    def usable(self) -> int:
        """Guesses one after another; of a drafter inside those that are likely."""
        likely = sum(chance > LIKELY for hint in self.hints for chance in hint.calibration.chances(hint.draft.trunk))
        return max(self.draft.height, likely)

    def lanes(self, text: Sequence[int], drafter: str) -> tuple[Lane, ...]:
        """Guesses after ``text`` that nobody has judged: those at hand, and those that tiers below have of each other."""
        begin, end = len(text), len(text) + len(self.draft.trunk)
        hints = tuple(Lane(hint.drafter, begin, hint.draft.tokens, hint.draft.parents) for hint in self.hints)
        if not drafter:
            return hints
        below = (lane.behind(text) for lane in self._lanes if lane.start <= end)  # others: of a text cut since
        return (Lane(drafter, begin, self.draft.tokens, self.draft.parents), *hints, *below)

    def change(self) -> None:
        """The tier below is another one, or none, from now on."""
        self._lanes, self._missing = (), None

    def learn(self, start: int, new: Sequence[int], known: Sequence[int]) -> None:
        """The text goes on with ``new`` at ``start``: which guesses were right, those ``known`` of the tier below among them,
        and what is left of them; whether that tier was corrected, and had prepared it."""
        trunk = self.draft.trunk.tokens
        num_right = next((i for i, (a, b) in enumerate(zip(trunk, new, strict=False)) if a != b), min(len(trunk), len(new)))
        self.stats.passed(len(trunk), num_right, len(new))
        self.calibration.learn(self.draft, new, known)
        for hint in self.hints:
            hint.calibration.learn(hint.draft, new, hint.draft.find(new))
        self._missing = None
        self._totals.agreed += num_right
        if num_right < min(len(trunk), len(new)):
            self._corrected(start + num_right, self.draft.below(known[num_right]).height if len(known) > num_right else 0)
        self.draft = self.draft.below(known[-1]) if len(known) == len(new) else NO_DRAFT
        self.hints = ()

    def _corrected(self, position: int, num_waiting: int) -> None:
        """The tier below was wrong there, with so many tokens waiting after what is right."""
        self._totals.corrected()
        self._lanes = ()
        if num_waiting:
            self._totals.prepared(num_waiting)
        else:
            self._missing = position

    def cut(self, rest: Sequence[int] | None) -> None:
        """The tier above has corrected the text; by ``rest`` after all of it, if that is so."""
        path = self.draft.find(rest) if rest is not None else []
        self.draft = self.draft.below(path[-1]) if rest and len(path) == len(rest) else NO_DRAFT
        self.hints = ()
        self.stats.interrupt()

    def take(self, proposal: Proposal, text: Sequence[int]) -> None:
        """Guesses from below: ignored if they do not join ``text``, the newest win where they contradict older ones."""
        if not 0 <= len(text) - proposal.start < len(proposal.draft):
            return
        known = text[proposal.start :]
        path = proposal.draft.find(known)
        if len(path) == len(known):
            rest = proposal.draft.below(path[-1] if path else -1)
            if self._missing is not None and proposal.start <= self._missing and rest:
                self._totals.prepared(rest.height)
                self._missing = None
            self._merge(rest)

    def watch(self, lanes: tuple[Lane, ...]) -> None:
        """What the tier below says of those below it."""
        self._lanes = lanes

    def hint(self, hints: Sequence[Hint]) -> None:
        """What drafters inside the tier guess after the text as it is, in place of what they did."""
        valid = (hint._replace(draft=self._fitting(hint.draft)) for hint in hints)
        self.hints = tuple(hint for hint in valid if hint.draft)

    def _merge(self, fresh: Draft) -> None:
        """Take over guesses as far as they are token ids and fit into the window; the newest win."""
        fresh = self._fitting(fresh)
        new, old = fresh.trunk.tokens, self.draft.trunk.tokens
        if new[: len(old)] != old[: len(new)]:
            self.draft = fresh
        elif not fresh.dists and not self.draft.dists:
            self.draft = fresh.merge(self.draft).first(MAX_NODES)
        elif len(new) >= len(old):  # what a round offers, it offers as a whole
            self.draft = fresh

    def _fitting(self, draft: Draft) -> Draft:
        return draft.fitting(self._vocab_size, self._window, MAX_NODES)
