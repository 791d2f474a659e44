"""Sends a router's answers to the learner, if their clients allow it, and reports drafters whose agreement falls."""

import asyncio
import logging
import time
from collections import defaultdict, deque
from collections.abc import Sequence

from ray.serve.handle import DeploymentHandle

from cascade.answer import Completion
from cascade.messages import Edge, Routing, SessionSpec
from cascade.training.reservoir import Sample
from deployments.gateway.admission.access import Account
from deployments.gateway.admission.metrics import RouterMetrics
from deployments.ops.drift import Drift
from deployments.replica import replica_name

log = logging.getLogger(__name__)

SEND_S = 2.0
TIMEOUT_S = 10.0
MOST_HELD = 512  # answers that are held while the learner does not answer


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
        drift = self._drifts[edge.drafter, edge.verifier, greedy]
        if drift.observe(*judged(edge), time.monotonic()):
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


def judged(edge: Edge) -> tuple[int, int]:
    """How many tokens of a drafter were right and wrong, scored or not.

    For drafters inside tiers only the first tokens after a text count.
    """
    if edge.agreed or edge.corrected:
        return edge.agreed, edge.corrected
    proposed, right = (sum(counts[:1]) for counts in (edge.proposed_by_position, edge.accepted_by_position))
    return right, proposed - right
