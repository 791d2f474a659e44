"""Predicts the time of a tier's pass: timed at the start, then updated by every pass."""

from bisect import bisect_left
from collections.abc import Sequence
from typing import Any

import numpy as np

from cascade.planner.tuning import COST_MEMORY, COST_WEIGHT, MEAN_WEIGHT, OUTLIER, PREFILL_TOKENS, STALE, STALE_WEIGHT, SURPRISE

LEAST_S = 1e-9  # shorter passes count as this long


class Profile:
    """Seconds of a pass by its tokens and by the positions that its sessions hold, kept current.

    Linear between measured numbers of tokens, plus a price for each position. Safe to read from any thread.
    """

    def __init__(self, points: Sequence[tuple[int, float]] = ((1, 0.01),), context_s: float = 0.0) -> None:
        """``points`` are pairs of tokens, increasing, and seconds without context; ``context_s`` is the price of a position.

        Without them passes are assumed to take 10 ms.
        """
        assert points, "at least one pass must have been timed"
        self._tokens = [tokens for tokens, _ in points]
        self._seconds = [seconds for _, seconds in points]
        self._fresh = [0.0] * len(points)  # 1: a pass of this size has just been timed; fades with passes of other sizes
        self.context_s = context_s
        self.pass_s = self.predict(1)  # mean of recent passes without prefill
        self.token_s = 0.0  # seconds that each token of prefill adds to such a pass; 0 until there was some
        self.between_s = 0.0  # seconds from the end of a pass to the start of the next, if that does not wait

    @property
    def points(self) -> tuple[tuple[int, float], ...]:
        return tuple(zip(self._tokens, self._seconds, strict=True))

    def predict(self, num_tokens: int, context: int = 0) -> float:
        """Seconds of a pass: linear between points, constant before the first one, extrapolated after the last one.

        If noise leaves the last point below the one before it, the cost is constant after it, since larger passes cost no less.
        """
        tokens, seconds = self._tokens, self._seconds
        held_s = self.context_s * context
        if len(tokens) == 1 or num_tokens <= tokens[0]:
            return seconds[0] + held_s
        upper = min(bisect_left(tokens, num_tokens), len(tokens) - 1)
        n0, s0 = tokens[upper - 1], seconds[upper - 1]
        slope = (seconds[upper] - s0) / (tokens[upper] - n0)
        if num_tokens > tokens[upper]:
            return seconds[upper] + max(0.0, slope) * (num_tokens - tokens[upper]) + held_s
        return s0 + slope * (num_tokens - n0) + held_s

    def stale(self, num_tokens: int) -> bool:
        """Whether no pass of ``num_tokens``, or more up to the next point, has been timed lately."""
        _, after, share = self._beside(num_tokens)
        return self._fresh[after] < STALE * share

    def _beside(self, num_tokens: int) -> tuple[int, int, float]:
        """The places of the points below and above ``num_tokens``, and how near it is to the latter: 0 to 1."""
        tokens = self._tokens
        after = min(bisect_left(tokens, num_tokens), len(tokens) - 1)
        before = max(0, after - 1)
        share = (num_tokens - tokens[before]) / (tokens[after] - tokens[before]) if after else 1.0
        return before, after, min(1.0, max(0.0, share))

    def turn(self, num_tokens: int, context: int = 0) -> float:
        """Seconds from the end of a pass to the end of the next one."""
        return self.between_s + self.predict(num_tokens, context)

    def turns(self, most: int, context: int) -> np.ndarray[Any, np.dtype[np.float64]]:
        """`turn` for each number of tokens up to ``most``: ``[most + 1]``."""
        corners = [0, *(tokens for tokens in self._tokens if tokens < most), most]
        return np.interp(np.arange(most + 1), corners, [self.turn(corner, context) for corner in corners])

    def rested(self, seconds: float) -> None:
        """A pass started ``seconds`` after the end of the one before, without waiting for anything."""
        least = min(seconds, OUTLIER * self.between_s) if self.between_s else seconds
        self.between_s += MEAN_WEIGHT * (least - self.between_s) if self.between_s else seconds

    def record(self, num_tokens: int, num_read: int, context: int, seconds: float) -> None:
        """A pass of ``num_tokens`` over ``context`` positions took ``seconds``; ``num_read`` of its tokens were prefill.

        Tokens of prefill have a price of their own, since they need no logits and no own tokens; so have positions. If a pass
        took longer or shorter than expected, each price changes by its share of the difference. Of the points, those beside the
        number of scored tokens change. Points without recent passes change along, since what slows one pass slows all:
        otherwise a size that was timed while other models were loading would stay expensive. If a pass of a stale size was far
        shorter than expected, this size and larger ones change more, since only a wrong price explains it. Smaller differences
        may be noise, and a long pass may be a pause.
        """
        if not num_read:
            self.pass_s += MEAN_WEIGHT * (seconds - self.pass_s)
        if not self.token_s and num_read < PREFILL_TOKENS:
            num_read = 0  # too few to estimate the price of one
        num_scored = num_tokens - num_read
        scored_s, held_s = self.predict(num_scored), self.context_s * context
        if not self.token_s and num_read:
            self.token_s = max(0.0, seconds - scored_s - held_s) / num_read
        read_s = self.token_s * num_read
        expected = max(LEAST_S, scored_s + held_s + read_s)
        excess = min(OUTLIER, max(1 / OUTLIER, seconds / expected)) - 1
        self.token_s *= 1 + MEAN_WEIGHT * excess * read_s / expected
        self.context_s *= 1 + COST_WEIGHT * excess * held_s / expected
        before, after, share = self._beside(num_scored)
        surprise = STALE_WEIGHT if excess < SURPRISE and self.stale(num_scored) else 0.0
        for place in range(len(self._seconds)):
            beside, fresh = share if place == after else 1 - share if place == before else 0.0, self._fresh[place]
            self._fresh[place] = max(beside, COST_MEMORY * fresh)
            moved = COST_WEIGHT * (1.0 if beside else 1 - self._fresh[place])
            if place >= after:
                moved += surprise * (1 - fresh)
            self._seconds[place] *= 1 + moved * excess * scored_s / expected
