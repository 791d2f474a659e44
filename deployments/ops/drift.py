"""Detects that a drafter agrees with its verifier less than before. Pure."""

import math
from dataclasses import dataclass, field

BATCH_TOKENS = 200  # judged tokens of an observation, at least
BATCH_S = 10.0  # seconds between two observations, at least, so that a busy server does not forget an hour within a minute
RECENT = 0.2  # weight of the latest observation in the recent mean
LONG = 1 / 360  # its weight in the long-run mean, after that many observations
WARM = 20  # observations before the first alarm
SIGMAS = 4.0  # standard deviations of the recent mean from which a fall is an alarm
LEAST_FALL = 0.1  # smaller falls are no alarm, however significant
RELEASE = 0.5  # the alarm ends when the fall is below this share of the bound


@dataclass(slots=True)
class Drift:
    """An EWMA control chart (Roberts 1959) of the share of tokens that are right, with hysteresis.

    An observation covers at least `BATCH_TOKENS` tokens and `BATCH_S` seconds. The alarm is raised when the recent mean is both
    `SIGMAS` of its standard deviations and `LEAST_FALL` below the long-run mean. It ends when the mean has recovered by half.
    The variance of observations is estimated from their successive differences (von Neumann 1941), in which a fall counts only
    once. The long-run mean keeps learning during an alarm, so a permanent fall becomes the new level, after an hour or more.
    """

    recent: float = math.nan  # recent mean share; NaN before the first observation
    level: float = math.nan
    alarm: bool = False
    _variance: float = 0.0  # variance of observations
    _num: int = 0
    _last: float = 0.0
    _right: float = 0.0  # right tokens of the next observation
    _judged: float = 0.0
    _due: float = field(default=-math.inf)

    @property
    def fall(self) -> float:
        """How far the recent mean is below the level; 0 before the first observation."""
        return self.level - self.recent if self._num else 0.0

    @property
    def bound(self) -> float:
        """The fall that raises the alarm."""
        deviation = math.sqrt(self._variance * RECENT / (2 - RECENT))
        return max(LEAST_FALL, SIGMAS * deviation)

    def observe(self, right: int, wrong: int, now: float) -> bool:
        """Count right and wrong tokens at time ``now``, in seconds; returns whether the alarm has changed."""
        self._right += right
        self._judged += right + wrong
        if self._judged < BATCH_TOKENS or now < self._due:
            return False
        self._add(self._right / self._judged)
        self._right = self._judged = 0.0
        self._due = now + BATCH_S
        return self._judge()

    def _add(self, share: float) -> None:
        self._num += 1
        weight = max(LONG, 1 / self._num)
        if self._num == 1:
            self.recent = self.level = self._last = share
            return
        self.recent += max(RECENT, weight) * (share - self.recent)
        self.level += weight * (share - self.level)
        self._variance += weight * ((share - self._last) ** 2 / 2 - self._variance)
        self._last = share

    def _judge(self) -> bool:
        before = self.alarm
        if self._num >= WARM:
            self.alarm = self.fall > self.bound * (RELEASE if before else 1.0)
        return self.alarm != before
