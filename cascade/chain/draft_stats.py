"""What a session learns of its drafter, and of what the tier above keeps of its own text; without a clock."""

import math
from dataclasses import dataclass

GUESSES_WEIGHT = 0.3  # of the latest count of guesses
LEAST_KEPT = 0.02  # share of texts so long that the tier above keeps, below which they are not worth a pass
VERDICT_MEMORY = 0.97  # share of the weight of old verdicts that is left after a new one


@dataclass(slots=True)
class DraftStats:
    """How fast a drafter guesses and how well, counted in passes of its verifier, without a clock.

    Errors come in bursts: the first guess behind a correction is counted apart from the others.
    """

    guesses: float = 4.0  # that come while one pass runs
    right: float = 3.0  # guesses found right, and to begin with a few made up
    wrong: float = 1.0  # guesses found wrong; those behind them do not count
    first_right: float = 2.0  # the same for the first one behind a correction
    first_wrong: float = 1.0
    _left: int | None = None  # guesses left by the last pass, None if the drafter was corrected

    @property
    def interrupted(self) -> bool:
        """The drafter was corrected and no pass was run since."""
        return self._left is None

    def chance(self, num_guess: int) -> float:
        """That the first ``num_guess`` guesses behind a correction are all right."""
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

    @property
    def tokens(self) -> float:
        """As far as at least `LEAST_KEPT` of all texts are kept; without bound before the first cut."""
        share = self.cut / (self.kept + self.cut)
        return math.log(LEAST_KEPT) / math.log1p(-share) if 0 < share < 1 else (0.0 if share else math.inf)

    def judged(self, num_kept: int, *, cut: bool) -> None:
        """The tier above has kept so many own tokens, and then cut the text or not; old verdicts fade."""
        self.kept = VERDICT_MEMORY * self.kept + num_kept
        self.cut = VERDICT_MEMORY * self.cut + cut
