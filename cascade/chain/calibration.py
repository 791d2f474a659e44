"""How likely a guess is right, learnt from those that were judged: by its rank, its gap, and whether it is the first.

Under shared noise two tiers differ where the tokens of one of them are close: the *gap* of an own token is how far its
perturbed logit is above the next one's, that of a runner-up how far it is below the own token's. Measured on the embedded
family, an own token of gap 0 is right in 0.4 of all cases and one of gap 4 always, at any temperature; its runner-up is right
in 0.6 of the cases in which it is not.
"""

import math
from collections.abc import Sequence

from cascade.draft import Draft
from cascade.messages import MAX_RANKS
from cascade.scorer import UNIT

MEMORY = 0.97  # share of old verdicts that is left after a new one: twenty halve what was known
WARMEST = 2.0  # temperatures above it are taken for it
PRIOR = 6.0  # verdicts that are made up, of each kind
_GAPS = 9  # kinds of gaps: unknown, then from one power of two to the next
_UNKNOWN = (0.75, 0.1, 0.03)  # chances by rank, to begin with
_WRONG, _FADE = 0.62, 0.95  # an own token of a gap is wrong with chance `_WRONG * exp(-_FADE * gap)`, to begin with
_NEXT = (0.5, 0.15)  # share of the wrong ones in which the first and the second runner-up are right, to begin with


class Calibrations:
    """What is learnt of each drafter, at each temperature: noise makes gaps larger, and says less."""

    def __init__(self) -> None:
        self._known: dict[tuple[str, float], Calibration] = {}

    def of(self, drafter: str, temperature: float) -> "Calibration":
        """Shared by all sessions that draft with it so; "" stands for the tier's own tokens, as the tier above judges them."""
        key = (drafter, round(min(temperature, WARMEST), 1))
        if key not in self._known:
            self._known[key] = Calibration()
        return self._known[key]


class Calibration:
    """The verdicts on the guesses of one drafter."""

    __slots__ = ("_chances", "_weights")

    def __init__(self) -> None:
        kinds = [(rank, kind) for _ in range(2) for rank in range(MAX_RANKS) for kind in range(_GAPS)]
        self._chances = [_prior(rank, kind) for rank, kind in kinds]  # first those right behind the text
        self._weights = [PRIOR] * len(kinds)

    def chance(self, rank: int, gap: int, *, first: bool) -> float:
        """That a guess of this rank and gap, a byte, is right if those before it are; ``first`` if that is the text alone."""
        return self._chances[_kind(rank, gap, first)]

    def judged(self, rank: int, gap: int, *, first: bool, right: bool) -> None:
        """A guess whose predecessors were right was right, too, or not."""
        kind = _kind(rank, gap, first)
        weight = self._weights[kind] = MEMORY * self._weights[kind] + 1
        self._chances[kind] += (right - self._chances[kind]) / weight

    def chances(self, draft: Draft) -> list[float]:
        """That each node of a draft is right, and all nodes before it."""
        chances: list[float] = []
        confidences, chance, kind_of = draft.confidences, 1.0, self._chances
        if draft.is_line:
            for node in range(len(draft)):
                chance *= kind_of[_kind(0, confidences[node] if confidences else 0, not node)]
                chances.append(chance)
            return chances
        for node, (parent, rank) in enumerate(zip(draft.parents, draft.ranks, strict=True)):
            before = chances[parent] if parent >= 0 else 1.0
            chances.append(before * kind_of[_kind(rank, confidences[node] if confidences else 0, parent < 0)])
        return chances

    def saw(self, draft: Draft, new: Sequence[int], path: Sequence[int]) -> None:
        """The text went on with ``new`` behind a draft, along its nodes ``path``: judge all nodes that stood there."""
        ranks = draft.ranks
        for at, token in zip((-1, *path), new, strict=False):
            for child in draft.children(at):
                gap = draft.confidences[child] if draft.confidences else 0
                self.judged(ranks[child], gap, first=at < 0, right=draft.tokens[child] == token)


def _kind(rank: int, gap: int, first: bool) -> int:
    return (0 if first else MAX_RANKS * _GAPS) + min(rank, MAX_RANKS - 1) * _GAPS + gap.bit_length()


def _prior(rank: int, kind: int) -> float:
    if not kind:
        return _UNKNOWN[rank]
    wrong = _WRONG * math.exp(-_FADE * 1.5 * 2 ** (kind - 1) * UNIT)
    return wrong * _NEXT[rank - 1] if rank else 1 - wrong
