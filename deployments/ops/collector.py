"""Sends a router's answers to the learner, if their clients allow it, and reports drafters whose agreement falls."""

import asyncio
import logging
import math
import time
from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass

from ray.serve.handle import DeploymentHandle

from cascade.answer import Completion
from cascade.messages import Edge, Routing, SessionSpec
from cascade.training.reservoir import Sample
from deployments.gateway.admission.access import Account
from deployments.gateway.admission.metrics import RouterMetrics
from deployments.replica import replica_name

log = logging.getLogger(__name__)

SEND_S = 2.0
TIMEOUT_S = 10.0
MOST_HELD = 512  # answers that are held while the learner does not answer

# of a `Drift`
BATCH_TOKENS = 200  # judged tokens of an observation, at least
BATCH_S = 10.0  # seconds between two observations, at least, so that a busy server does not forget an hour within a minute
RECENT = 0.2  # weight of the latest observation in the recent mean
LONG = 1 / 360  # its weight in the long-run mean, after that many observations
WARM = 20  # observations before the first alarm
SIGMAS = 4.0  # standard deviations of the recent mean from which a fall is an alarm
LEAST_FALL = 0.1  # smaller falls are no alarm, however significant
RELEASE = 0.5  # the alarm ends when the fall is below this share of the bound


class Collector:
    """Collects answers without delaying them: holds those that cannot be sent, and drops the oldest. For one event loop."""

    def __init__(self, learner: DeploymentHandle, metrics: RouterMetrics, row_tokens: int) -> None:
        """``row_tokens`` are the last tokens that the learner keeps of an answer and its prompt."""
        self._learner, self._metrics, self._row_tokens = learner, metrics, row_tokens
        self._router = replica_name()
        self._held: deque[Sample] = deque(maxlen=MOST_HELD)
        self._drifts: dict[tuple[str, str, bool], Drift] = defaultdict(Drift)  # keys: drafter, verifier, greedy
        self._task = asyncio.create_task(self._send())

    def offer(
        self, spec: SessionSpec, routing: Routing, tokens: Sequence[int], completion: Completion, account: Account
    ) -> None:
        """Take a complete answer, the ``tokens`` after ``spec``, if request and key allow it."""
        for edge in completion.stats.edges:
            if edge.drafter:
                self._watch(edge, greedy=not spec.params.temperature)
        allowed = routing.train and account.limits.train and not spec.cache_salt and not spec.params.adapter
        if not allowed:
            return
        corrected = sum(edge.corrected for edge in completion.stats.edges)
        text, temperature = (*spec.tokens, *tokens), spec.params.temperature
        sample = Sample(text, spec.prompt_len, temperature, account.name, corrected, time.time())
        self._held.append(sample.tail(self._row_tokens))

    def _watch(self, edge: Edge, *, greedy: bool) -> None:
        """Count a drafter's right and wrong tokens, scored or not; of one inside a tier only the first after a text."""
        drift, right, wrong = self._drifts[edge.drafter, edge.verifier, greedy], edge.agreed, edge.corrected
        if not (right or wrong):
            proposed, right = (sum(counts[:1]) for counts in (edge.proposed_by_position, edge.accepted_by_position))
            wrong = proposed - right
        if drift.observe(right, wrong, time.monotonic()):
            values = (edge.drafter, edge.verifier, drift.recent, drift.level, "has fallen" if drift.alarm else "is back")
            log.warning("%s agrees with %s on %.2f of its tokens, on %.2f in the long run: its acceptance %s", *values)

    async def close(self) -> None:
        """Stop sending."""
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    async def _send(self) -> None:
        while True:
            await asyncio.sleep(SEND_S)
            drifting = sorted({drafter for (drafter, *_), drift in self._drifts.items() if drift.alarm})
            sent = list(self._held)
            self._held.clear()
            try:
                async with asyncio.timeout(TIMEOUT_S):
                    progress = await self._learner.take.remote(self._router, sent, drifting)
                self._metrics.learning(progress)
            except Exception as error:  # Ray may raise anything while the learner restarts
                log.info("The learner does not answer: %s", error or type(error).__name__)
                self._held.extendleft(reversed(sent[len(self._held) :]))  # without the oldest


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
    _due: float = -math.inf

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
