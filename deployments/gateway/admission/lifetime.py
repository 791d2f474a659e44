"""How long a request may live, and what is awaited on its behalf meanwhile."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import TypeVar

from cascade.errors import Aborted, DeadlineExceeded, Unavailable

T = TypeVar("T")

LEAVING = "The server is shutting down"
LATE = "The request's deadline passed before its text was complete"


@dataclass(slots=True)
class Lifetime:
    """How long a request may live: whatever is awaited by `wait` ends with it. Belongs to one event loop."""

    deadline: float = float("inf")  # of `time.monotonic`
    aborted: bool = False
    leaving: bool = False  # aborted because the server goes: another one may go on
    _waits: list[asyncio.Timeout] = field(default_factory=list)  # in progress

    @classmethod
    def of(cls, timeout_s: float | None) -> "Lifetime":
        """One that begins now; without a deadline if ``timeout_s`` is ``None``."""
        return cls() if timeout_s is None else cls(time.monotonic() + timeout_s)

    def abort(self, *, leaving: bool = False) -> None:
        """End it now; to be called in its event loop."""
        self.aborted, self.leaving = True, leaving
        for limit in self._waits:
            if not limit.expired():
                limit.reschedule(asyncio.get_running_loop().time())

    def check(self) -> None:
        """Raise `Aborted`, `DeadlineExceeded`, or `Unavailable` if the server goes, if it is over."""
        if self.aborted:
            raise Unavailable(LEAVING) if self.leaving else Aborted("The request was aborted")
        if time.monotonic() >= self.deadline:
            raise DeadlineExceeded(LATE)

    async def wait(self, work: Callable[[], Awaitable[T]], seconds: float = float("inf")) -> T:
        """What ``work`` returns; it is cancelled when the request ends, or after ``seconds``.

        Raises what `check` raises when the request has ended, `TimeoutError` when only the seconds are over.
        """
        self.check()
        left_s = self.deadline - time.monotonic()
        soonest_s = min(left_s, seconds)
        limit = asyncio.timeout(None if soonest_s == float("inf") else soonest_s)
        self._waits.append(limit)
        try:
            async with limit:
                return await work()
        except TimeoutError:
            self.check()
            if limit.expired() and left_s <= seconds:  # by the event loop's clock, which may be a tick ahead
                raise DeadlineExceeded(LATE) from None
            raise
        finally:
            self._waits.remove(limit)
