"""Writes answers through sessions at the full tier; a session that fails continues at another replica."""

import asyncio
import contextlib
import logging
import time
from collections import deque
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from cascade.answer import Answer, Chunk
from cascade.errors import InvalidRequest, Unavailable
from cascade.messages import Close, Failed, Message, Open, Proposal, Routing, SessionSpec, mint
from cascade.settings.config import CascadeConfig
from deployments.gateway.admission.admission import ActiveRequest, Admission
from deployments.gateway.admission.places import Lifetime
from deployments.gateway.model import ServedModel
from deployments.links.affinity import Prefixes
from deployments.links.downlink import Downlink
from deployments.links.leases import HELD_PLACES, LeasePool, Lessor
from deployments.ops.collector import Collector

log = logging.getLogger(__name__)

PAUSES_S = (0.0, 0.1, 0.2, 0.5, 1.0, 2.0)  # pauses before another full replica is tried
MAX_FRUITLESS = 8  # sessions that may fail in a row without a new token, since some requests break every replica
MAX_FRUITLESS_LEAVING = 2  # the same while the router stops, and perhaps the full tier with it


class SessionFailed(Exception):
    """A session at the full tier has failed before its answer was complete; another replica continues the text."""


@dataclass(slots=True)
class RetryBudget:
    """How long a request may go on without a new token."""

    limit_s: float
    num_tokens: int = 0
    since: float = field(default_factory=time.monotonic)
    fruitless: int = 0  # sessions that failed since the last new token

    @property
    def left_s(self) -> float:
        return max(0.0, self.since + self.limit_s - time.monotonic())

    def progressed(self, num_tokens: int) -> None:
        """The client has this many tokens of the answer."""
        if num_tokens > self.num_tokens:
            self.num_tokens, self.since, self.fruitless = num_tokens, time.monotonic(), 0

    def failed(self, reason: str, most: int = MAX_FRUITLESS) -> float:
        """The pause before another replica is tried; raises `Unavailable` if there were too many failures."""
        self.fruitless += 1
        if self.fruitless > most:
            raise Unavailable(f"The full tier failed {self.fruitless} times without a new token: {reason}")
        if not self.left_s:
            raise Unavailable(f"The full tier made no progress for {self.limit_s:g} s: {reason}")
        return PAUSES_S[min(self.fruitless, len(PAUSES_S)) - 1]


class Inbox:
    """Messages of the full tier for one session, for the answer that awaits them. Belongs to one event loop.

    All waits share one timer, because a timer for each token would take a tenth of a router's time.
    """

    def __init__(self, retry_budget: RetryBudget, lifetime: Lifetime) -> None:
        self._messages = deque[Message]()
        self._retry_budget = retry_budget
        self._lifetime = lifetime
        self._loop = asyncio.get_running_loop()
        self._waiter: asyncio.Future[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        lifetime.wakers.add(self._wake)

    def put(self, message: Message) -> None:
        """Add a message. A proposal repeats all unacknowledged tokens, so it replaces one that was not read.

        A client that is slower than the tier thus gets fewer and longer pieces.
        """
        if isinstance(message, Proposal):
            self._messages.clear()
        self._messages.append(message)
        self._wake()

    async def next(self) -> Proposal:
        """The next proposal of the full tier; raises `SessionFailed`, or the error that ends the request."""
        self._lifetime.check()
        while not self._messages:
            await self._wait()
            self._lifetime.check()
        message = self._messages.popleft()  # messages before a failure still count
        if isinstance(message, Failed):
            raise InvalidRequest(message.reason) if message.fault else SessionFailed(message.reason)
        assert isinstance(message, Proposal)
        return message

    def close(self) -> None:
        self._lifetime.wakers.discard(self._wake)
        if self._timer is not None:
            self._timer.cancel()

    async def _wait(self) -> None:
        """Wait until there is a message, the request is aborted, or the timer fires."""
        left_s = self._retry_budget.left_s
        if not left_s:
            raise Unavailable(f"The full tier made no progress for {self._retry_budget.limit_s:g} s")
        if self._timer is None:
            self._timer = self._loop.call_later(min(left_s, self._lifetime.left_s), self._ring)
        self._waiter = self._loop.create_future()
        await self._waiter

    def _ring(self) -> None:
        self._timer = None
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


class FullTier:
    """A router's sessions at the full tier, each with an inbox. Belongs to one event loop."""

    def __init__(
        self, config: CascadeConfig, lessor: Lessor, model: ServedModel, admission: Admission, collector: Collector | None
    ) -> None:
        """``lessor`` takes leases on the full tier's replicas; ``collector`` gets answers from which drafters may learn."""
        self._name = config.names[-1]
        self._model = model
        self._admission = admission
        self._collector = collector
        self._stall_timeout_s = config.router.stall_timeout_s
        self.inboxes: dict[str, Inbox] = {}
        leases = LeasePool(
            {self._name: lessor},
            timeout_s=config.router.stall_timeout_s,  # a replica may have to start first
            hold_s=held_lease_s(config),
            prefixes=Prefixes() if config.affine else None,
        )
        self.downlink = Downlink(leases, self._receive, tls=config.link_tls, tracing=admission.tracing)

    async def pieces(self, spec: SessionSpec, request: ActiveRequest, index: int = 0) -> AsyncGenerator[Chunk, None]:
        """One answer, piece by piece, after waiting for its turn; ``index`` is the number of its prompt."""
        async with self._admission.answering(spec, request, index) as record:
            answer = await self._model.answer(spec, index, lambda: time.monotonic() - request.since)
            async with contextlib.aclosing(self._written(answer, record.routing, request)) as pieces:
                async for chunk in pieces:
                    record.piece(chunk)
                    if chunk.completion is not None and self._collector is not None:
                        self._collector.offer(spec, record.routing, record.tokens, chunk.completion, request.account)
                    yield chunk
                    record.sent(chunk)

    async def _written(self, answer: Answer, routing: Routing, request: ActiveRequest) -> AsyncGenerator[Chunk, None]:
        """The rest of an answer, piece by piece. If a session fails, another replica continues."""
        if (rest := answer.rest()) is not None:  # the client already has all tokens
            yield rest
        retry_budget = RetryBudget(self._stall_timeout_s)
        while not answer.finished:
            session = mint()
            inbox = self.inboxes[session] = Inbox(retry_budget, request.lifetime)
            self.downlink.put([Open(session, answer.spec.after(answer.tokens), routing)])
            pause_s = 0.0
            try:
                while not answer.finished:
                    chunk, commit = answer.receive(await inbox.next())
                    if chunk is not None:
                        yield chunk
                    if commit is not None:  # after the yield: a client that does not read stalls the full tier at its window
                        self.downlink.put([commit])
                    retry_budget.progressed(answer.num_tokens)
            except SessionFailed as failure:
                leaving = self._admission.places.closed
                pause_s = retry_budget.failed(str(failure), MAX_FRUITLESS_LEAVING if leaving else MAX_FRUITLESS)
                log.info("%s continues from token %d on another full replica: %s", request.id, answer.num_tokens, failure)
                routing = replace(routing, affinity="")  # else it would meet the same replica again
            finally:
                inbox.close()
                del self.inboxes[session]
                self.downlink.put([Close(session)])
            if pause_s:
                await request.lifetime.wait(partial(asyncio.sleep, pause_s))

    def _receive(self, messages: Sequence[Message]) -> None:
        for message in messages:
            if (inbox := self.inboxes.get(message.session)) is not None:
                inbox.put(message)


def held_lease_s(config: CascadeConfig) -> float:
    """Seconds for which a lease may be reused."""
    places = config.tiers[-1].deployment_config.max_ongoing_requests
    return config.router.held_lease_s if places >= HELD_PLACES else 0.0
