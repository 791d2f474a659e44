"""What drafters inside a tier guess behind a text, together with what the tier below does."""

from collections.abc import Sequence
from typing import NamedTuple

from cascade.chain.calibration import Calibration
from cascade.draft import Draft


class Hint(NamedTuple):
    """A guess of one drafter."""

    drafter: str
    calibration: Calibration  # of its guesses
    draft: Draft


class Pool(NamedTuple):
    """All guesses behind a text as one tree, the nodes of the tier below first."""

    draft: Draft
    chances: list[float]  # of each node: that the text goes along its path
    whose: tuple[str, ...] = ()  # of each node, the drafter inside the tier that alone guesses it; empty if there is none


def pooled(draft: Draft, calibration: Calibration, hints: Sequence[Hint]) -> Pool:
    """The union. What several guess has the best of their chances."""
    chances = calibration.chances(draft)
    if not hints:
        return Pool(draft, chances)
    whose = [""] * len(draft)
    for hint in hints:
        draft, places = draft.union(hint.draft)
        for chance, place in zip(hint.calibration.chances(hint.draft), places, strict=True):
            if place < len(chances):
                chances[place] = max(chances[place], chance)
            else:
                chances.append(chance)
                whose.append(hint.drafter)
    return Pool(draft, chances, tuple(whose))
