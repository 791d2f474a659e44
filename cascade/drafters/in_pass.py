"""Heads as drafters of a tier: a pass of the model makes their guesses, see `cascade.engine.vllm.heads`."""

from collections.abc import Sequence
from dataclasses import replace

from cascade.draft import NO_DRAFT, Draft
from cascade.messages import origin
from cascade.scorer import UNREAD, Guesser, Scored

MOST_STEPS = 6  # guesses that a pass makes after a text, one after another
MEMORY = 0.9  # weight of earlier guesses of a text
SHARED = 0.99  # the same, for the mean over all texts
LEAST = 0.2  # if fewer guesses in a row are right on average, a text continues without guesses
TRY = 8  # one text in this many still gets guesses when the others have given up


class InPass:
    """The head of the kind ``name``, inside the model's passes."""

    def __init__(self, name: str, level: int = 0) -> None:
        self.name = name
        self.level = level
        self.right = float(MOST_STEPS)  # mean of guesses in a row that were scored and right, of all texts
        self._texts = 0

    def begin(self, tenant: str) -> "Asker":
        self._texts += 1
        return Asker(self, gives_up=self.right < LEAST and self._texts % TRY != 0)


class Asker(Guesser):
    """One text: each pass shall make as many guesses as were right recently, and one more.

    Guesses that were not scored, because they do not pay at this load, count as wrong. A text that gives up does so for good,
    because the head has not read the tokens since then.
    """

    def __init__(self, drafter: InPass, *, gives_up: bool) -> None:
        self._drafter = drafter
        self._origin = bytes([origin(drafter.level)])
        self._draft = NO_DRAFT  # guesses of the last pass
        self._right = max(1.0, drafter.right)  # mean of right guesses in a row, the latest counting most
        self._gave_up = gives_up

    @property
    def wants(self) -> int:
        return UNREAD if self._gave_up else min(MOST_STEPS, 1 + round(self._right))

    def observe(self, last: int, draft: Draft, scored: Scored) -> None:
        """Count how many guesses of the last pass were scored and right, and take the guesses of this pass."""
        if self._draft:
            new = draft.walk(scored.own)[0]
            right = min(len(self._draft.find(new)), len(draft.find(new)))
            self._right = MEMORY * self._right + (1 - MEMORY) * right
            self._drafter.right = SHARED * self._drafter.right + (1 - SHARED) * right
            self._gave_up |= self._right < LEAST
        self._draft = scored.draft

    def guess(self, text: Sequence[int], since: int, most: int) -> Draft:
        """The guesses of the last pass; none if the text has been cut since."""
        draft = self._draft
        return replace(draft, origins=self._origin * len(draft)) if draft else NO_DRAFT

    def cut(self) -> None:
        self._draft = NO_DRAFT
