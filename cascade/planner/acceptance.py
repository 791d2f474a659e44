"""How likely a guess is right, and how fast a drafter is, learned by comparing guesses with the text that follows.

A guess is right iff it equals the verifier's own token. Own tokens are computed anyway, so unscored guesses are judged, too.

Under shared noise two tiers disagree mostly where the best tokens of one are close. The *gap* of an own token is how far its
perturbed logit is above the second best; the gap of a runner-up is how far it is below the own token's. On trained models an
own token is right in 0.4 of cases at gap 0 and always at gap 4, at any temperature. Where it is wrong, its runner-up is right
in 0.6.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from operator import mul

from cascade.draft import Draft
from cascade.messages import MAX_RANKS
from cascade.planner.tuning import (
    ARRIVALS_WEIGHT,
    MIN_KEPT_SHARE,
    OUTLIER,
    PRIOR_BY_RANK,
    PRIOR_FADE,
    PRIOR_RUNNER_UPS,
    PRIOR_WEIGHT,
    PRIOR_WRONG,
    VERDICT_MEMORY,
)
from cascade.scorer import UNIT

_GAPS = 9  # kinds of gaps: unknown, then one for each power of two
_GAP = bytes(gap.bit_length() for gap in range(256))  # the kind of each gap
_LATER = MAX_RANKS * _GAPS  # number of kinds of guesses right after the text; kinds of later guesses begin here
_LATER_GAP = bytes(_LATER + kind for kind in _GAP)  # the kind of a later own token, by its gap


class Calibration:
    """How likely guesses of one drafter are right, by rank and gap, learned from verdicts on them."""

    __slots__ = ("_chances", "_of_drafts", "_weights")

    def __init__(self) -> None:
        kinds = [(rank, kind) for _ in range(2) for rank in range(MAX_RANKS) for kind in range(_GAPS)]
        self._chances = [_prior(rank, kind) for rank, kind in kinds]  # guesses right after the text come first
        self._weights = [PRIOR_WEIGHT] * len(kinds)
        # the chances of drafts by their confidences and parents, kept until the next verdict
        self._of_drafts: dict[tuple[bytes, tuple[int, ...]], tuple[float, ...]] = {}

    def chance(self, rank: int, gap: int, *, first: bool) -> float:
        """Chance that a guess of this rank and gap (a byte) is right if those before it are; ``first``: there are none."""
        return self._chances[_kind(rank, gap, first)]

    def judged(self, rank: int, gap: int, *, first: bool, right: bool) -> None:
        """Learn whether a guess was right, given that those before it were."""
        self._of_drafts.clear()
        kind = _kind(rank, gap, first)
        weight = self._weights[kind] = VERDICT_MEMORY * self._weights[kind] + 1
        self._chances[kind] += (right - self._chances[kind]) / weight

    def chances(self, draft: Draft) -> tuple[float, ...]:
        """For each node of a draft, the chance that its path is right. Kept, since many drafts of a pass are equal in shape."""
        key = draft.confidences or bytes(len(draft.tokens)), draft.parents
        chances = self._of_drafts.get(key)
        if chances is None:
            chances = self._of_drafts[key] = self._computed(draft)
        return chances

    def _computed(self, draft: Draft) -> tuple[float, ...]:
        of_kind, gaps, trunk = self._chances, draft.confidences or bytes(len(draft.tokens)), draft.trunk_size
        each = [of_kind[kind] for kind in gaps[:trunk].translate(_LATER_GAP)]
        each[:1] = [of_kind[kind] for kind in gaps[:1].translate(_GAP)]
        chances = list(accumulate(each, mul))
        if draft.parents:
            beside = zip(draft.parents[trunk:], draft.ranks[trunk:], gaps[trunk:].translate(_GAP), strict=True)
            for parent, rank, gap in beside:
                kind = min(rank, MAX_RANKS - 1) * _GAPS + gap
                chances.append(of_kind[kind] if parent < 0 else chances[parent] * of_kind[_LATER + kind])
        return tuple(chances)

    def learn(self, draft: Draft, new: Sequence[int], path: Sequence[int]) -> None:
        """Judge those nodes of a draft whose parents are right: the text continued with ``new``, along the nodes ``path``."""
        ranks = draft.ranks
        for at, token in zip((-1, *path), new, strict=False):
            for child in draft.children(at):
                gap = draft.confidences[child] if draft.confidences else 0
                self.judged(ranks[child], gap, first=at < 0, right=draft.tokens[child] == token)


def _kind(rank: int, gap: int, first: bool) -> int:
    return (0 if first else _LATER) + min(rank, MAX_RANKS - 1) * _GAPS + _GAP[gap]


def _prior(rank: int, kind: int) -> float:
    if not kind:
        return PRIOR_BY_RANK[rank]
    wrong = PRIOR_WRONG * math.exp(-PRIOR_FADE * 1.5 * 2 ** (kind - 1) * UNIT)
    return wrong * PRIOR_RUNNER_UPS[rank - 1] if rank else 1 - wrong


@dataclass(slots=True)
class DraftStats:
    """How fast and how well a drafter guesses. Time is counted in passes of its verifier.

    Errors come in bursts, so first guesses after a correction are also counted separately. Counts begin with a prior, and fade.
    """

    guesses: float = 4.0  # guesses that arrive while one pass runs
    right: float = 3.0  # guesses that were right
    wrong: float = 1.0  # guesses that were wrong, except those after a wrong one
    first_right: float = 2.0  # first guesses after a correction that were right
    first_wrong: float = 1.0
    _left: int | None = None  # guesses that remained after the last pass, None if the drafter was corrected

    @property
    def interrupted(self) -> bool:
        """Whether the drafter was corrected, and no pass has run since."""
        return self._left is None

    def chance(self, num_guess: int) -> float:
        """Chance that the first ``num_guess`` guesses after a correction are all right."""
        if not num_guess:
            return 1.0
        return self.first_right / (self.first_right + self.first_wrong) * self.share ** (num_guess - 1)

    def passed(self, num_guess: int, num_right: int, num_own: int) -> None:
        """A pass gave ``num_own`` tokens; of ``num_guess`` guesses at hand the first ``num_right`` equal them."""
        corrected = num_right < min(num_guess, num_own)
        left = VERDICT_MEMORY ** (num_right + corrected)
        self.right, self.wrong = left * self.right + num_right, left * self.wrong + corrected
        if num_guess and self._left is not None:
            self.guesses += ARRIVALS_WEIGHT * (num_guess - self._left - self.guesses)  # a moving mean
        elif num_guess:
            self.first_right = VERDICT_MEMORY * self.first_right + (num_right > 0)
            self.first_wrong = VERDICT_MEMORY * self.first_wrong + (num_right == 0)
        self._left = None if corrected else num_guess - num_own  # -1: the drafter has yet to guess the last own token

    @property
    def share(self) -> float:
        """Chance that a guess is right if all before it are."""
        return self.right / (self.right + self.wrong)

    def waited(self, num_guess: int, passes: float) -> None:
        """``num_guess`` guesses arrived while the verifier waited for the time of ``passes`` of its passes."""
        speed = min(OUTLIER * self.guesses, num_guess / passes)
        self.guesses += ARRIVALS_WEIGHT * (speed - self.guesses)

    def interrupt(self) -> None:
        """The drafter starts anew, so the time of its next guess says nothing about its speed."""
        self._left = None


@dataclass(slots=True)
class RunAhead:
    """How far a tier should run ahead of the tier above, given how many of its own tokens that tier keeps."""

    kept: float = 4.0  # recent own tokens that were kept, with a prior
    cut: float = 0.0  # recent corrections
    num_kept: int = 0  # tokens kept, in total
    num_cut: int = 0

    @property
    def share(self) -> float:
        """Share of own tokens that are kept."""
        return self.kept / (self.kept + self.cut)

    @property
    def tokens(self) -> float:
        """The length up to which texts are kept with chance `MIN_KEPT_SHARE`; infinite before the first correction."""
        share = self.cut / (self.kept + self.cut)
        return math.log(MIN_KEPT_SHARE) / math.log1p(-share) if 0 < share < 1 else (0.0 if share else math.inf)

    def judged(self, num_kept: int, *, cut: bool) -> None:
        """The tier above kept ``num_kept`` own tokens and then corrected the text, or not; old verdicts fade."""
        self.num_kept += num_kept
        self.num_cut += cut
        self.kept = VERDICT_MEMORY * self.kept + num_kept
        self.cut = VERDICT_MEMORY * self.cut + cut
