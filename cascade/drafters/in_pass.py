"""Drafters that read the model, as a tier sees them: a pass makes their guesses, see `cascade.engine.heads`."""

from collections.abc import Sequence
from dataclasses import replace

from cascade.draft import NO_DRAFT, Draft
from cascade.scorer import Scored

MOST = 6  # guesses of a pass: each is a step of its own, one after the other
MEMORY = 0.9  # weight of earlier guesses
LEAST = 0.1  # mean of right guesses in a row below which hardly any are made
PROBE = 32  # passes after which one guess is made then, in case they have become better


class InPass:
    """The head of the kind ``name``, inside the model's passes."""

    def __init__(self, name: str, level: int = 0) -> None:
        self.name = name
        self.level = level

    def begin(self, tenant: str) -> "Asker":
        return Asker(self.level)


class Asker:
    """One text: asks each pass for as many guesses as were right of late, and one more."""

    def __init__(self, level: int) -> None:
        self._origin = bytes([level << 1])
        self._said = NO_DRAFT  # by the last pass
        self._right = float(MOST)  # guesses in a row, the latest counting most
        self._passes = 0

    @property
    def wants(self) -> int:
        """Guesses that the next pass shall make."""
        if self._right < LEAST:
            return int(self._passes % PROBE == 0)
        return min(MOST, 1 + round(self._right))

    def saw(self, last: int, draft: Draft, scored: Scored) -> None:
        """A pass guessed behind what it said itself."""
        if self._said:
            right = len(self._said.find(draft.walk(scored.own)[0]))
            self._right = MEMORY * self._right + (1 - MEMORY) * right
        self._said = scored.draft
        self._passes += 1

    def guess(self, text: Sequence[int], since: int, most: int) -> Draft:
        """What the pass has guessed; nothing where the text has been cut since."""
        said = self._said
        return replace(said, origins=self._origin * len(said)) if said else NO_DRAFT

    def cut(self) -> None:
        """The text goes on otherwise than the last pass has said."""
        self._said = NO_DRAFT

    def close(self, text: Sequence[int]) -> None:
        """Nothing is held beside the model's."""
