"""How long a request waits for the full tier, and what it hears of it."""

import asyncio
import time
from dataclasses import dataclass, field

from cascade.errors import DeadlineExceeded, InvalidRequest, Unavailable
from cascade.messages import Failed, Message, Proposal
from deployments.admission.lifetime import Lifetime

PAUSES_S = (0.0, 0.1, 0.2, 0.5, 1.0, 2.0)  # pauses before another full replica is tried
MAX_FRUITLESS = 8  # sessions that may fail in a row without a new token: some requests break whatever runs them


class SessionFailed(Exception):
    """A session at the full tier is over before its answer is complete; the text goes on at another replica."""


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

    def saw(self, num_tokens: int) -> None:
        """The text is so long, and the client has it."""
        if num_tokens > self.num_tokens:
            self.num_tokens, self.since, self.fruitless = num_tokens, time.monotonic(), 0

    def failed(self, reason: str) -> float:
        """The pause before another replica is tried; raises `Unavailable` when that is enough."""
        self.fruitless += 1
        if self.fruitless > MAX_FRUITLESS:
            raise Unavailable(f"The full tier failed {self.fruitless} times without a new token: {reason}")
        if not self.left_s:
            raise Unavailable(f"The full tier made no progress for {self.limit_s:g} s: {reason}")
        return PAUSES_S[min(self.fruitless, len(PAUSES_S)) - 1]


async def heard(inbox: "asyncio.Queue[Message]", retry_budget: RetryBudget, lifetime: Lifetime) -> Proposal:
    """What the full tier says next; raises `SessionFailed`, or what ends the request.

    Every proposal repeats all that is not acknowledged, so of those that came while the last piece was on its way to the
    client only the newest counts: a client that is slower than the tier gets fewer and longer pieces.
    """
    try:
        message = await lifetime.wait(inbox.get, retry_budget.left_s)
    except DeadlineExceeded:  # which is a `TimeoutError`, too
        raise
    except TimeoutError:
        raise Unavailable(f"The full tier made no progress for {retry_budget.limit_s:g} s") from None
    while isinstance(message, Proposal) and not inbox.empty():
        newer = inbox.get_nowait()
        if isinstance(newer, Failed):  # for the next call: what came before the failure counts, and nothing comes behind it
            inbox.put_nowait(newer)
            break
        message = newer
    if isinstance(message, Failed):
        raise InvalidRequest(message.reason) if message.fault else SessionFailed(message.reason)
    assert isinstance(message, Proposal)
    return message
