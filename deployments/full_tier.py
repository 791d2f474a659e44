"""A router's sessions at the full tier, and the answers that they write, each on as many replicas as it takes."""

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, Sequence
from functools import partial

from cascade.answer import Answer, Chunk
from cascade.messages import Close, Message, mint
from cascade.settings.config import CascadeConfig
from deployments.admission.admission import ActiveRequest, Admission
from deployments.admission.lifetime import Lifetime
from deployments.admission.retry import RetryBudget, SessionFailed, heard
from deployments.links.downlink import Downlink
from deployments.links.leases import HELD_PLACES, Lessor, Prefixes

log = logging.getLogger(__name__)

LEASE_TIMEOUT_S = 30.0  # a replica may have to start first


class FullTier:
    """What is driven over ``downlink``; ``inboxes`` are those of the sessions there. Belongs to one event loop."""

    def __init__(self, config: CascadeConfig, lessor: Lessor, admission: Admission) -> None:
        """``lessor`` takes leases on the full tier's replicas."""
        self._name = config.names[-1]
        self._stall_timeout_s = config.router.stall_timeout_s
        self.inboxes: dict[str, asyncio.Queue[Message]] = {}
        self.downlink = Downlink(
            {self._name: lessor},
            self._hear,
            lease_timeout_s=LEASE_TIMEOUT_S,
            hold_s={self._name: _held_lease_s(config)},
            tls=config.link_tls,
            prefixes=Prefixes() if config.affine else None,
            routed=admission.metrics.routed,
            tracing=admission.tracing,
        )

    def change(self, config: CascadeConfig) -> None:
        """Go by ``config`` from now on."""
        self._stall_timeout_s = config.router.stall_timeout_s
        self.downlink.leases.hold_s[self._name] = _held_lease_s(config)

    async def drive(self, answer: Answer, request: ActiveRequest) -> AsyncGenerator[Chunk, None]:
        """What is left of an answer, piece by piece."""
        retry_budget = RetryBudget(self._stall_timeout_s)
        while not answer.finished:
            try:
                async with contextlib.aclosing(self._session(answer, retry_budget, request.lifetime)) as chunks:
                    async for chunk in chunks:
                        yield chunk
            except SessionFailed as failure:
                pause_s = retry_budget.failed(str(failure))
                log.info("%s goes on from token %d on another full replica: %s", request.id, answer.num_tokens, failure)
                await request.lifetime.wait(partial(asyncio.sleep, pause_s))

    async def _session(self, answer: Answer, retry_budget: RetryBudget, lifetime: Lifetime) -> AsyncGenerator[Chunk, None]:
        """Pieces from one session, until the answer is complete; raises `SessionFailed`."""
        opening = answer.replay(mint())
        inbox = self.inboxes[opening.session] = asyncio.Queue()
        self.downlink.put([opening])
        try:
            while not answer.finished:
                chunk, commit = answer.take(await heard(inbox, retry_budget, lifetime))
                if chunk is not None:
                    yield chunk
                if commit is not None:  # behind the yield: a client that does not read stalls the full tier at its window
                    self.downlink.put([commit])
                retry_budget.saw(answer.num_tokens)
        finally:
            del self.inboxes[opening.session]
            self.downlink.put([Close(opening.session)])

    def _hear(self, messages: Sequence[Message]) -> None:
        for message in messages:
            if (inbox := self.inboxes.get(message.session)) is not None:
                inbox.put_nowait(message)


def _held_lease_s(config: CascadeConfig) -> float:
    """How long a lease is held for the next session."""
    places = config.tiers[-1].deployment_config.max_ongoing_requests
    return config.router.held_lease_s if places >= HELD_PLACES else 0.0
