"""Answers of one router on their way to the learner, of those who let drafters learn from them."""

import asyncio
import logging
import random
import time
from collections import deque
from collections.abc import Sequence

from ray.serve.handle import DeploymentHandle

from cascade.answer import Completion
from cascade.messages import Open
from cascade.settings.alignment import AlignmentConfig
from cascade.training.reservoir import Sample
from deployments.gateway.admission.access import Account
from deployments.gateway.admission.metrics import RouterMetrics
from deployments.replica import replica_name

log = logging.getLogger(__name__)

SEND_S = 2.0
TIMEOUT_S = 10.0
MOST_HELD = 512  # answers, while there is no learner


class Collector:
    """Belongs to one event loop. What cannot be sent is held, and dropped when it is too much: no answer ever waits."""

    def __init__(self, config: AlignmentConfig, learner: DeploymentHandle, metrics: RouterMetrics) -> None:
        self._share, self._learner, self._metrics = config.share, learner, metrics
        self._router = replica_name()
        self._held: deque[Sample] = deque(maxlen=MOST_HELD)
        self._drifting: list[str] = []
        self._task = asyncio.create_task(self._send())

    def offer(self, opening: Open, tokens: Sequence[int], completion: Completion, account: Account) -> None:
        """An answer is complete, whose tokens were sent after those of its opening: keep it, if everybody lets us."""
        allowed = opening.train and account.limits.train and not opening.cache_salt and not opening.params.adapter
        if not allowed or (self._share < 1 and random.random() >= self._share):
            return
        corrected = sum(edge.corrected for edge in completion.stats.edges)
        text, temperature = (*opening.tokens, *tokens), opening.params.temperature
        self._held.append(Sample(text, opening.prompt_len, temperature, account.name, corrected, time.time()))

    async def close(self) -> None:
        """Send nothing more."""
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    async def _send(self) -> None:
        while True:
            await asyncio.sleep(SEND_S)
            drifting, sent = sorted(self._metrics.drifting), list(self._held)
            self._held.clear()
            try:
                async with asyncio.timeout(TIMEOUT_S):
                    said = await self._learner.take.remote(self._router, sent, drifting)
                self._metrics.learning(said)
            except Exception as error:  # whatever Ray raises: the learner is gone, and comes back
                log.info("The learner does not answer: %s", error or type(error).__name__)
                self._held.extendleft(reversed(sent[len(self._held) :]))  # the oldest go first
