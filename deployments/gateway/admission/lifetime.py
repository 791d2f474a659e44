"""The lifetime of a request: deadline, abortion, and awaiting within them."""

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
    """The lifetime of a request; whatever is awaited by `wait` ends with it. Belongs to one event loop."""

    deadline: float = float("inf")  # on the clock of `time.monotonic`
    aborted: bool = False
    leaving: bool = False  # aborted because the server shuts down, so another server may continue
    wakers: set[Callable[[], object]] = field(default_factory=set)  # called when the request is aborted

    @classmethod
    def of(cls, timeout_s: float | None) -> "Lifetime":
        """A lifetime that begins now; without a deadline if ``timeout_s`` is ``None``."""
        return cls() if timeout_s is None else cls(time.monotonic() + timeout_s)

    def abort(self, *, leaving: bool = False) -> None:
        """Abort the request; must be called in its event loop."""
        self.aborted, self.leaving = True, leaving
        for wake in list(self.wakers):
            wake()

    @property
    def left_s(self) -> float:
        """Seconds to the deadline."""
        return self.deadline - time.monotonic()

    def check(self) -> None:
        """Raise `Aborted`, `DeadlineExceeded`, or `Unavailable` (the server shuts down) if the lifetime has ended."""
        if self.aborted:
            raise Unavailable(LEAVING) if self.leaving else Aborted("The request was aborted")
        if time.monotonic() >= self.deadline:
            raise DeadlineExceeded(LATE)

    async def wait(self, work: Callable[[], Awaitable[T]]) -> T:
        """Await ``work``; when the request ends before, cancel it and raise the error of `check`."""
        self.check()
        limit = asyncio.timeout(None if self.left_s == float("inf") else self.left_s)

        def end() -> None:
            if not limit.expired():
                limit.reschedule(asyncio.get_running_loop().time())

        self.wakers.add(end)
        try:
            async with limit:
                return await work()
        except TimeoutError:
            self.check()
            if limit.expired():  # told by the event loop's clock, which may be a tick ahead
                raise DeadlineExceeded(LATE) from None
            raise
        finally:
            self.wakers.discard(end)
