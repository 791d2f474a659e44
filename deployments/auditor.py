"""A share of all answers is scored again by the full tier alone, when nothing else is to be done; see docs/audit.md."""

import asyncio
import contextlib
import logging
import random
import time
from collections import deque
from collections.abc import AsyncGenerator, MutableMapping
from dataclasses import dataclass, replace

from cascade.answer import Chunk
from cascade.messages import AUDIT_YIELDS, COUPLED, Close, Failed, Message, Open, Proposal, mint
from cascade.settings.router import AuditConfig
from deployments.admission.admission import Admission
from deployments.links.downlink import Downlink

log = logging.getLogger(__name__)

PAUSE_S = 0.5  # before an audit that has made way, or failed, is tried again


@dataclass(frozen=True, slots=True)
class Sent:
    """An answer that a client got."""

    opening: Open  # its audit, but for the session
    until: float  # it is skipped then, by `time.monotonic`


class Auditor:
    """Audits answers of one router, one after another, over ``downlink``; ``inboxes`` are those of sessions there.

    Belongs to one event loop. Never holds a place of a request: what waits is bounded, and skipped when its time is up.
    """

    def __init__(
        self,
        config: AuditConfig,
        downlink: Downlink,
        inboxes: "MutableMapping[str, asyncio.Queue[Message]]",
        admission: Admission,
    ) -> None:
        self._config = config
        self._downlink = downlink
        self._inboxes = inboxes
        self._places = admission.places
        self._metrics = admission.metrics.audit
        self._waiting: deque[Sent] = deque()
        self._task: asyncio.Task[None] | None = None
        self._closed = False

    @property
    def busy(self) -> bool:
        """Answers wait, or one is being audited."""
        return self._task is not None

    def some(self, chunks: AsyncGenerator[Chunk, None], opening: Open) -> AsyncGenerator[Chunk, None]:
        """``chunks`` of an answer, which is noted when it is complete, if it is one of the share."""
        return self._noted(chunks, opening) if random.random() < self._config.share else chunks

    async def _noted(self, chunks: AsyncGenerator[Chunk, None], opening: Open) -> AsyncGenerator[Chunk, None]:
        tokens: list[int] = []
        async with contextlib.aclosing(chunks):
            async for chunk in chunks:
                tokens += chunk.token_ids
                if chunk.completion is not None:
                    self._take(opening, tokens)
                yield chunk

    def _take(self, opening: Open, tokens: list[int]) -> None:
        """An answer is complete: these tokens were sent behind those of its opening."""
        if not tokens or self._closed:
            return
        if opening.rules != COUPLED:  # the text depends on the drafts
            self._metrics.skipped("rule")
        elif len(self._waiting) >= self._config.max_waiting:
            self._metrics.skipped("queue")
        else:
            self._waiting.append(Sent(audit_of(opening, tokens), time.monotonic() + self._config.max_wait_s))
            if self._task is None:
                self._task = asyncio.create_task(self._work())

    def close(self) -> None:
        """Audit nothing more."""
        self._closed = True
        self._waiting.clear()
        if self._task is not None:
            self._task.cancel()

    async def _work(self) -> None:
        try:
            while self._waiting:
                await self._audit(self._waiting.popleft())
        finally:
            self._task = None

    async def _audit(self, sent: Sent) -> None:
        """Try until there is a verdict or the time is up."""
        reason = "load"
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(sent.until - time.monotonic()):
                while True:
                    await self._places.idle()
                    verdict = await self._verdict(sent.opening)
                    if isinstance(verdict, Proposal):
                        self._judged(sent.opening, verdict)
                        return
                    reason = "load" if verdict.reason == AUDIT_YIELDS else "failed"
                    if verdict.fault:
                        break
                    await asyncio.sleep(PAUSE_S)
        self._metrics.skipped(reason)

    async def _verdict(self, opening: Open) -> Proposal | Failed:
        """What the full tier says of it, on whatever replica there is."""
        opening = replace(opening, session=mint())
        inbox = self._inboxes[opening.session] = asyncio.Queue()
        self._downlink.put([opening])
        try:
            message = await inbox.get()
        finally:
            del self._inboxes[opening.session]
            self._downlink.put([Close(opening.session)])
        assert isinstance(message, Proposal | Failed)
        return message

    def _judged(self, opening: Open, verdict: Proposal) -> None:
        divergences = verdict.divergences
        self._metrics.judged(verdict.start - opening.audit, divergences)
        for one in divergences:
            where = one.position - opening.prompt_len
            choice = "its second choice" if one.second else "not its second choice"
            log.warning(
                "An audit found another token at place %d of an answer: the full tier alone prefers its own by %.3g nats, "
                "what was sent is %s",
                where,
                one.margin,
                choice,
            )


def audit_of(opening: Open, tokens: list[int]) -> Open:
    """What asks the full tier to score again the ``tokens`` that were sent behind those of ``opening``."""
    return replace(
        opening,
        session="",
        tokens=(*opening.tokens, *tokens),
        audit=len(opening.tokens),
        params=replace(opening.params, stop=(), logprobs=None, prompt_logprobs=None),
        chain=(),
        drafters=(),
        lockstep=False,
        adaptive=False,
        watch=False,
        branches=0,
        draft_branches=0,
        traceparent="",
    )
