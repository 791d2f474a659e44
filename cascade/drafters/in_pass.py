"""Drafters that read the model, as a tier sees them: a pass makes their guesses, see `cascade.engine.heads`."""

from collections.abc import Sequence
from dataclasses import replace

from cascade.draft import NO_DRAFT, Draft
from cascade.drafters.registry import KINDS
from cascade.planner.choice import MOST_STEPS, paying_steps
from cascade.scorer import UNREAD, Guesser, Scored

BLOCK = 16  # guesses of a pass where they are made at once, else `MOST_STEPS`

MEMORY = 0.9  # weight of earlier guesses of a text
SHARED = 0.99  # the same of all texts together
LEAST = 0.2  # mean of right guesses in a row below which a text goes on without
TRY = 8  # texts of which one asks all the same, when others have given up


class InPass:
    """The head of the kind ``name``, inside the model's passes. A guess takes ``cost`` of a pass, where that is known."""

    def __init__(self, name: str, level: int = 0, *, cost: float = 0.0) -> None:
        self.name = name
        self.level = level
        self.cost = cost
        self.most = BLOCK if name in KINDS and KINDS[name].at_once else MOST_STEPS
        self.right = float(self.most)  # guesses in a row that were scored and right, of all texts
        self.rate = 1.0  # share of guesses that were right if those before them were, of all texts
        self._texts = 0

    def begin(self, tenant: str) -> "Asker":
        self._texts += 1
        pays = self.right >= LEAST and paying_steps(self.rate, self.cost) > 0
        return Asker(self, gives_up=not pays and self._texts % TRY != 0)


class Asker(Guesser):
    """One text: asks each pass for as many guesses as were right of late, and one more, as far as these pay.

    Guesses that are not scored, since they do not pay at this load, count like wrong ones. A text that gives up does so for
    good: the head has not read what came since.
    """

    def __init__(self, drafter: InPass, *, gives_up: bool) -> None:
        self._drafter = drafter
        self._origin = bytes([drafter.level << 1])
        self._said = NO_DRAFT  # by the last pass
        self._right = max(1.0, drafter.right)  # guesses in a row, the latest counting most
        self._rate = max(drafter.rate, (1 + drafter.cost) / 2)  # a try takes some passes
        self._gave_up = gives_up

    @property
    def wants(self) -> int:
        drafter = self._drafter
        most = min(drafter.most, 1 + round(self._right))
        return UNREAD if self._gave_up else max(1, paying_steps(self._rate, drafter.cost, most))

    def observe(self, last: int, draft: Draft, scored: Scored) -> None:
        """A pass guessed after what it said itself."""
        if self._said:
            new = draft.walk(scored.own)[0]
            right = min(len(self._said.find(new)), len(draft.find(new)))
            self._right = MEMORY * self._right + (1 - MEMORY) * right
            self._drafter.right = SHARED * self._drafter.right + (1 - SHARED) * right
            for judged in range(min(right + 1, self._said.height)):
                self._rate = MEMORY * self._rate + (1 - MEMORY) * (judged < right)
                self._drafter.rate = SHARED * self._drafter.rate + (1 - SHARED) * (judged < right)
            self._gave_up |= self._right < LEAST or not paying_steps(self._rate, self._drafter.cost)
        self._said = scored.draft

    def guess(self, text: Sequence[int], since: int, most: int) -> Draft:
        """What the pass has guessed; nothing where the text has been cut since."""
        said = self._said
        return replace(said, origins=self._origin * len(said)) if said else NO_DRAFT

    def cut(self) -> None:
        """The text goes on otherwise than the last pass has said."""
        self._said = NO_DRAFT
