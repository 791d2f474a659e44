"""A share of all answers is written again by the full tier alone, when it is idle; see docs/howto/observe.md."""

import asyncio
import contextlib
import logging
import math
import random
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from cascade.messages import BACKGROUND, COUPLED, RUNNER_UPS, YIELDED, Close, Commit, Failed, Message, Open, Proposal, mint
from cascade.scorer import UNIT
from cascade.settings.config import CascadeConfig
from deployments.gateway.admission.admission import Admission
from deployments.links.downlink import Downlink
from deployments.links.leases import LeasePool, Lessor

log = logging.getLogger(__name__)

PAUSE_S = 0.5  # before an audit that has made way, or failed, is tried again
MOST_GAP = 255  # as a byte: the next token is so far after, or further, or there is none


@dataclass(frozen=True, slots=True)
class Divergence:
    """A token of a text that was sent, in place of which the full tier alone says another."""

    position: int  # absolute
    margin: float  # by which the own token's perturbed logit is more than the next one's, nats; infinite if nobody knows
    second: bool  # what was sent is that next one


@dataclass(slots=True)
class Audit:
    """An answer that a client got, and what the full tier says of it. It stands above the full tier, as a tier would: what was
    sent are its own tokens. So each token is judged after those that were sent, whatever stands there."""

    opening: Open  # that was answered
    text: tuple[int, ...]  # prompt and answer
    judged: int = 0  # tokens of the text
    divergences: list[Divergence] = field(default_factory=list)
    _corrected: int = 0  # after the latest divergence: what was proposed earlier follows upon another token

    def __post_init__(self) -> None:
        self.judged = len(self.opening.tokens)

    @property
    def num_judged(self) -> int:
        """Tokens of the answer."""
        return self.judged - len(self.opening.tokens)

    @property
    def complete(self) -> bool:
        """All is judged. After a token that a grammar may not allow it says nothing."""
        structured = self.opening.params.structured is not None
        return self.judged == len(self.text) or (structured and bool(self.divergences))

    def ask(self) -> Open:
        """A session of the full tier alone that goes on after what is judged, one token ahead of it, and makes way."""
        return replace(
            self.opening,
            session=mint(),
            tokens=self.text[: self.judged],
            params=replace(self.opening.params, stop=(), logprobs=None, prompt_logprobs=None),
            chain=(),
            drafters=(),
            window=1,
            lockstep=False,
            adaptive=False,
            watch=False,
            branches=RUNNER_UPS,  # they tell margins
            draft_branches=0,
            priority=BACKGROUND,
            cache_salt=mint(),  # what others have left in memory is judged, not used
            traceparent="",
            tracestate="",
        )

    def hear(self, proposal: Proposal) -> Commit | None:
        """Compare up to the first divergence; the answer's own tokens there, for the full tier."""
        start, draft = self.judged, proposal.draft
        if proposal.start < self._corrected:
            return None
        for node in range(start - proposal.start, len(draft.trunk)):
            if self.complete:
                break
            sent, position = self.text[self.judged], self.judged
            self.judged += 1
            if draft.tokens[node] != sent:
                self._corrected = self.judged
                gap = draft.confidences[node] if draft.confidences else MOST_GAP
                others = [draft.tokens[child] for child in draft.children(node - 1) if child != node]
                self.divergences.append(Divergence(position, gap * UNIT if gap < MOST_GAP else math.inf, others[:1] == [sent]))
                break
        return Commit(proposal.session, start, self.text[start : self.judged]) if self.judged > start else None


class Auditor:
    """Audits answers of one router, one after another, over links and leases of its own, so that those of requests stay theirs.

    Belongs to one event loop. Never holds a place of a request: what waits is bounded, and skipped when its time is up.
    """

    def __init__(self, config: CascadeConfig, lessor: Lessor, admission: Admission) -> None:
        """``lessor`` takes leases on the full tier's replicas."""
        self._config = config.router.audit
        self._inbox: asyncio.Queue[Message] = asyncio.Queue()  # of the session that is open
        self._downlink = Downlink(LeasePool({config.names[-1]: lessor}), self._hear, tls=config.link_tls)
        self._places = admission.places
        page = admission.metrics.page
        self._answers, self._tokens = page.counter("audited_answers"), page.counter("audited_tokens")
        self._differing, self._divergences = page.counter("audit_differing_answers"), page.counter("audit_divergences")
        self._margin, self._skipped = page.histogram("audit_margin_nats"), page.counter("audits_skipped")
        self._waiting: deque[tuple[Audit, float]] = deque()  # each with the time at which it is skipped, by the loop's clock
        self._task: asyncio.Task[None] | None = None
        self._closed = False

    @property
    def busy(self) -> bool:
        return self._task is not None

    def offer(self, opening: Open, tokens: Sequence[int]) -> None:
        """An answer is complete, whose tokens were sent after those of its opening: audit it if it is one of the share."""
        if random.random() >= self._config.share:
            return
        if not tokens or self._closed:
            return
        if opening.rules != COUPLED:  # the text depends on the drafts
            self._skipped.labels("rule").inc()
        elif len(self._waiting) >= self._config.max_waiting:
            self._skipped.labels("queue").inc()
        else:
            until = asyncio.get_running_loop().time() + self._config.max_wait_s
            self._waiting.append((Audit(opening, (*opening.tokens, *tokens)), until))
            if self._task is None:
                self._task = asyncio.create_task(self._work())

    async def close(self) -> None:
        self._closed = True
        self._waiting.clear()
        if self._task is not None:
            self._task.cancel()
        await self._downlink.close()

    def _hear(self, messages: Sequence[Message]) -> None:
        for message in messages:
            self._inbox.put_nowait(message)

    async def _work(self) -> None:
        try:
            while self._waiting:
                await self._audit(*self._waiting.popleft())
        finally:
            self._task = None

    async def _audit(self, audit: Audit, until: float) -> None:
        """Try until all is judged, or it has not got on for too long."""
        reason = "load"
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout_at(until) as patience:
                while True:
                    await self._places.idle()
                    failure = await self._go_on(audit, patience)
                    if failure is None:
                        break
                    reason = "load" if failure.reason == YIELDED else "failed"
                    if failure.fault:
                        break
                    await asyncio.sleep(PAUSE_S)
        if audit.complete or audit.divergences:
            self._judged(audit)
        else:
            self._skipped.labels(reason).inc()

    async def _go_on(self, audit: Audit, patience: asyncio.Timeout) -> Failed | None:
        """Judge what one session of the full tier says, until it fails or all is judged."""
        opening, loop = audit.ask(), asyncio.get_running_loop()
        inbox = self._inbox = asyncio.Queue()
        self._downlink.put([opening])
        try:
            while not audit.complete:
                message = await inbox.get()
                if isinstance(message, Failed):
                    return message
                assert isinstance(message, Proposal)
                if (commit := audit.hear(message)) is not None:
                    patience.reschedule(loop.time() + self._config.max_wait_s)
                    self._downlink.put([commit])
        finally:
            self._downlink.put([Close(opening.session)])
        return None

    def _judged(self, audit: Audit) -> None:
        self._answers.inc()
        self._tokens.inc(audit.num_judged)
        self._differing.inc(bool(audit.divergences))
        for one in audit.divergences:
            self._divergences.labels("true" if one.second else "false").inc()
            self._margin(one.margin)
            where = one.position - audit.opening.prompt_len
            choice = "its second choice" if one.second else "not its second choice"
            log.warning(
                "An audit found another token at place %d of an answer: the full tier alone prefers its own by %.3g nats, "
                "what was sent is %s",
                where,
                one.margin,
                choice,
            )
