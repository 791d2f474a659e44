"""Places of a router: how many answers are written at once, how many wait, and which is next."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator

from cascade.errors import InvalidRequest, Overloaded, Unavailable
from deployments.gateway.admission.access import ANONYMOUS
from deployments.gateway.admission.fair_queue import FairQueue, Ticket
from deployments.gateway.admission.lifetime import LEAVING, Lifetime

FULL_RETRY_AFTER_S = 1.0  # seconds after which a client should retry a full server


class Places:
    """At most ``max_running`` answers are written at once, and at most ``max_waiting`` more wait, see `FairQueue`."""

    def __init__(self, max_running: int, max_waiting: int) -> None:
        self._capacity = max_running + max_waiting
        self._free = max_running
        self._queue = FairQueue()
        self._calls: dict[Ticket, asyncio.Event] = {}  # one for each answer that waits
        self._empty = asyncio.Event()
        self._empty.set()
        self.num_admitted = 0
        self.num_running = 0
        self.closed = False

    @property
    def num_waiting(self) -> int:
        return self.num_admitted - self.num_running

    def check(self, num_answers: int = 1) -> None:
        """Raise `Overloaded` or `Unavailable` if there is no room for ``num_answers``, `InvalidRequest` if there never is."""
        if self.closed:
            raise Unavailable(LEAVING)
        if num_answers > self._capacity:
            raise InvalidRequest(
                f"The request asks for {num_answers} answers at once: the server takes {self._capacity}; "
                "send fewer prompts, or a smaller n"
            )
        if self.num_admitted + num_answers > self._capacity:
            raise Overloaded(
                f"The server is full: {self.num_running} answers are being written and {self.num_waiting} wait",
                FULL_RETRY_AFTER_S,
            )

    @contextlib.contextmanager
    def admitted(self, num_answers: int) -> Iterator[None]:
        """Hold places for the answers of a request; raises the errors of `check` at once."""
        self.check(num_answers)
        self.num_admitted += num_answers
        self._empty.clear()
        try:
            yield
        finally:
            self.num_admitted -= num_answers
            if not self.num_admitted:
                self._empty.set()

    @contextlib.asynccontextmanager
    async def turn(
        self, lifetime: Lifetime, name: str = ANONYMOUS, weight: float = 1.0, read: int = 0, most: int = 0, rank: float = 0.0
    ) -> AsyncIterator[Ticket]:
        """Wait for the turn of an admitted answer of key ``name``, and hold it; raises the error that ends its ``lifetime``.

        The answer reads ``read`` tokens and writes at most ``most``; the caller counts written tokens in the ticket.
        """
        ticket = self._queue.join(name, weight, read, most, rank)
        called = self._calls[ticket] = asyncio.Event()
        self._call()
        try:
            await lifetime.wait(called.wait)
        except BaseException:
            if self._calls.pop(ticket, None) is not None:
                self._queue.leave(ticket)
            else:  # got its turn at the same moment
                self._queue.undo(ticket)
                self._give_back()
            raise
        self.num_running += 1
        try:
            yield ticket
        finally:
            self.num_running -= 1
            self._queue.settle(ticket)
            self._give_back()

    def _give_back(self) -> None:
        self._free += 1
        self._call()

    def _call(self) -> None:
        """Give free turns to the next answers."""
        while self._free > 0 and (ticket := self._queue.next()) is not None:
            self._free -= 1
            self._calls.pop(ticket).set()

    async def drained(self, timeout_s: float) -> bool:
        """Admit no more requests, and wait until all answers are written; False if that took too long."""
        self.closed = True
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._empty.wait()
        return not self.num_admitted
