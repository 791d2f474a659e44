"""How likely a guess is right, and how fast a drafter is, learnt from guesses that are compared with the text that comes.

A guess is right iff it equals the verifier's own token, which is computed anyway: so guesses that no pass scores are judged
like the others.

Under shared noise two tiers differ where the tokens of one of them are close: the *gap* of an own token is how far its
perturbed logit is above the next one's, that of a runner-up how far it is below the own token's. Measured on trained models, an
own token of gap 0 is right in 0.4 of all cases and one of gap 4 always, at any temperature; its runner-up is right in 0.6 of
the cases in which it is not.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

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
GUESSES_WEIGHT = 0.3  # of the latest count of guesses
LEAST_KEPT = 0.02  # share of texts so long that the tier above keeps, below which they are not worth a pass


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
        self._chances = [_prior(rank, kind) for rank, kind in kinds]  # first those right after the text
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

    def learn(self, draft: Draft, new: Sequence[int], path: Sequence[int]) -> None:
        """Judge all nodes of a draft that stood where the text went on with ``new``, along the nodes ``path``."""
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


@dataclass(slots=True)
class DraftStats:
    """How fast a drafter guesses and how well, counted in passes of its verifier, without a clock.

    Errors come in bursts: the first guess after a correction is counted apart from the others.
    """

    guesses: float = 4.0  # that come while one pass runs
    right: float = 3.0  # guesses found right, and to begin with a few made up
    wrong: float = 1.0  # guesses found wrong; those after them do not count
    first_right: float = 2.0  # the same for the first one after a correction
    first_wrong: float = 1.0
    _left: int | None = None  # guesses left by the last pass, None if the drafter was corrected

    @property
    def interrupted(self) -> bool:
        """The drafter was corrected and no pass was run since."""
        return self._left is None

    def chance(self, num_guess: int) -> float:
        """That the first ``num_guess`` guesses after a correction are all right."""
        if not num_guess:
            return 1.0
        share = self.right / (self.right + self.wrong)
        return self.first_right / (self.first_right + self.first_wrong) * share ** (num_guess - 1)

    def passed(self, num_guess: int, num_right: int, num_own: int) -> None:
        """A pass gave ``num_own`` tokens where ``num_guess`` guesses were at hand, of which ``num_right`` agree with them."""
        corrected = num_right < min(num_guess, num_own)
        if self._left is not None:
            self.right += num_right
            self.wrong += corrected
            if num_guess:
                self.guesses += GUESSES_WEIGHT * (num_guess - self._left - self.guesses)
        elif num_guess:
            self.first_right += num_right > 0
            self.first_wrong += num_right == 0
            self.right += max(0, num_right - 1)
            self.wrong += corrected and num_right > 0
        self._left = None if corrected else num_guess - num_own  # -1: the drafter has a guess for the last own token to come

    def interrupt(self) -> None:
        """The drafter has to begin anew: when its next guess comes does not tell how fast it is."""
        self._left = None


@dataclass(slots=True)
class RunAhead:
    """How far ahead of the tier above own tokens are worth their passes, judged by how many of them it has kept."""

    kept: float = 4.0  # a few made up, to begin with
    cut: float = 0.0
    num_kept: int = 0  # in all
    num_cut: int = 0

    @property
    def tokens(self) -> float:
        """As far as at least `LEAST_KEPT` of all texts are kept; without bound before the first cut."""
        share = self.cut / (self.kept + self.cut)
        return math.log(LEAST_KEPT) / math.log1p(-share) if 0 < share < 1 else (0.0 if share else math.inf)

    def judged(self, num_kept: int, *, cut: bool) -> None:
        """The tier above has kept so many own tokens, and then cut the text or not; old verdicts fade."""
        self.num_kept += num_kept
        self.num_cut += cut
        self.kept = MEMORY * self.kept + num_kept
        self.cut = MEMORY * self.cut + cut
