"""Whether a drafter agrees with its verifier less than it used to. Pure."""

import math
from dataclasses import dataclass, field

BATCH_TOKENS = 200  # judged tokens of one observation, at least
BATCH_S = 10.0  # between two observations, at least: an hour of a busy server shall not be forgotten in a minute
RECENT = 0.2  # weight of the latest observation in what is recent
LONG = 1 / 360  # the same in the long run, once there are as many
WARM = 20  # observations before anything is an alarm
SIGMAS = 4.0  # standard deviations of what is recent that are no alarm
LEAST_FALL = 0.1  # a fall by less is no alarm, however sure it is
RELEASE = 0.5  # share of the fall that raises the alarm, below which it ends


@dataclass(slots=True)
class Drift:
    """An EWMA control chart (Roberts 1959) of the share of tokens that are right, with hysteresis.

    An observation is what `BATCH_TOKENS` tokens or more say, `BATCH_S` after the last one or later. The alarm is raised when
    the recent mean is `SIGMAS` of its standard deviations, and `LEAST_FALL`, below the long-run mean. It ends when the mean has
    come back by half. How much observations vary is learnt from their successive differences (von Neumann 1941), in which a
    fall counts once: answers differ far more than coins do. The long-run mean goes on learning under an alarm, so that a fall
    for good becomes the level, an hour later at the soonest.
    """

    recent: float = math.nan  # mean share; not a number before the first observation
    level: float = math.nan
    alarm: bool = False
    _variance: float = 0.0  # the variance of observations
    _num: int = 0
    _last: float = 0.0
    _right: float = 0.0  # the next observation's
    _judged: float = 0.0
    _due: float = field(default=-math.inf)

    @property
    def fall(self) -> float:
        """How far what is recent is below the level; 0 before the first observation."""
        return self.level - self.recent if self._num else 0.0

    @property
    def bound(self) -> float:
        """The fall that raises the alarm."""
        deviation = math.sqrt(self._variance * RECENT / (2 - RECENT))
        return max(LEAST_FALL, SIGMAS * deviation)

    def observe(self, right: int, wrong: int, now: float) -> bool:
        """So many more tokens were right and wrong at time ``now``, in seconds; whether the alarm has changed."""
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
