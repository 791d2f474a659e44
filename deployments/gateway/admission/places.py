"""Places of a router: how many answers are written at once, how many wait, which is next, and when a request ends.

The order of waiting answers is start-time fair queueing by tokens, with a weight for each key (Goyal, Vin, Cheng, 1996). Every
key is a *flow* with a *tag*: the tokens charged to it, over its weight. The flow with the lowest tag is next, with its answer
of the lowest rank. When its turn comes, an answer is charged the expected number of tokens; the charge is corrected when it
ends, so any number of answers may run at once. A flow that returns starts at the tag of the last turn: absence gives no credit.
"""

import asyncio
import contextlib
import time
from bisect import insort
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from typing import TypeVar

from cascade.errors import Aborted, DeadlineExceeded, InvalidRequest, Overloaded, Unavailable
from deployments.gateway.admission.access import ANONYMOUS

T = TypeVar("T")

FULL_RETRY_AFTER_S = 1.0  # seconds after which a client should retry a full server
LEARNING_RATE = 0.125  # weight of a new length in the mean length of a flow's answers
LEAVING = "The server is shutting down"
LATE = "The request's deadline passed before its text was complete"


@dataclass(slots=True)
class Lifetime:
    """The lifetime of a request; whatever is awaited by `wait` ends with it. Belongs to one event loop."""

    deadline: float = float("inf")  # on the clock of `time.monotonic`
    aborted: bool = False
    leaving: bool = False  # aborted because the server shuts down, so another server may continue
    wakers: set[Callable[[], object]] = field(default_factory=set)  # called when the request is aborted

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


@dataclass(slots=True, eq=False)
class Ticket:
    """An answer that waits, or has its turn."""

    flow: "Flow"
    number: int  # answers are numbered in the order of arrival
    rank: float  # within a flow, lower goes first
    read: int  # tokens that it reads
    most: int  # tokens that it may write at most
    written: int = 0  # tokens written so far
    charged: int = 0  # tokens charged so far
    called: asyncio.Event = field(default_factory=asyncio.Event)  # its turn has come


@dataclass(slots=True, eq=False)
class Flow:
    """The answers of one key."""

    weight: float
    waiting: list[Ticket] = field(default_factory=list)  # sorted by rank, then by number
    tag: float = 0.0  # tokens over weight
    start: float = 0.0  # least tag until the flow is empty again, since corrections give no credit either
    mean: float | None = None  # mean tokens that its answers wrote

    def charge(self, ticket: Ticket, tokens: int) -> None:
        """Set the total charge of an answer."""
        self.tag = max(self.start, self.tag + (tokens - ticket.charged) / self.weight)
        ticket.charged = tokens


class FairQueue:
    """Answers that wait for their turn."""

    def __init__(self) -> None:
        self._flows: dict[str, Flow] = {}
        self._virtual = 0.0  # tag at which the last turn was given
        self._number = 0

    def join(self, name: str, weight: float, read: int, most: int, rank: float = 0.0) -> Ticket:
        """Queue an answer of key ``name`` that reads ``read`` and writes at most ``most`` tokens; keeps the last ``weight``."""
        flow = self._flows.setdefault(name, Flow(weight))
        flow.weight = weight
        if not flow.waiting:
            flow.start, flow.tag = self._virtual, max(flow.tag, self._virtual)
        self._number += 1
        ticket = Ticket(flow, self._number, rank, read, most)
        insort(flow.waiting, ticket, key=lambda waiting: (waiting.rank, waiting.number))
        return ticket

    def next(self) -> Ticket | None:
        """Take the next answer from the queue, and charge it; None if none waits."""
        waiting = (flow for flow in self._flows.values() if flow.waiting)
        flow = min(waiting, key=lambda flow: (flow.tag, flow.waiting[0].number), default=None)
        if flow is None:
            return None
        ticket = flow.waiting.pop(0)
        self._virtual = max(self._virtual, flow.tag)
        expected = ticket.most if flow.mean is None else min(ticket.most, round(flow.mean))
        flow.charge(ticket, ticket.read + expected)
        return ticket

    def leave(self, ticket: Ticket) -> None:
        """An answer no longer waits for its turn."""
        ticket.flow.waiting.remove(ticket)

    def undo(self, ticket: Ticket) -> None:
        """An answer gave its turn back without using it."""
        ticket.flow.charge(ticket, 0)

    def settle(self, ticket: Ticket) -> None:
        """An answer that had its turn has ended."""
        flow, written = ticket.flow, ticket.written
        flow.charge(ticket, ticket.read + written)
        flow.mean = written if flow.mean is None else flow.mean + LEARNING_RATE * (written - flow.mean)


class Places:
    """At most ``max_running`` answers are written at once, and at most ``max_waiting`` more wait, see `FairQueue`."""

    def __init__(self, max_running: int, max_waiting: int) -> None:
        self._capacity = max_running + max_waiting
        self._free = max_running
        self._queue = FairQueue()
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
            sentence = f"The server is full: {self.num_running} answers are being written and {self.num_waiting} wait"
            raise Overloaded(sentence, FULL_RETRY_AFTER_S)

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
        self._call()
        try:
            await lifetime.wait(ticket.called.wait)
        except BaseException:
            if ticket.called.is_set():  # got its turn at the same moment
                self._queue.undo(ticket)
                self._call(1)
            else:
                self._queue.leave(ticket)
            raise
        self.num_running += 1
        try:
            yield ticket
        finally:
            self.num_running -= 1
            self._queue.settle(ticket)
            self._call(1)

    def _call(self, given_back: int = 0) -> None:
        """Give free turns, also those that were ``given_back``, to the next answers."""
        self._free += given_back
        while self._free > 0 and (ticket := self._queue.next()) is not None:
            self._free -= 1
            ticket.called.set()

    async def drained(self, timeout_s: float) -> bool:
        """Admit no more requests, and wait until all answers are written; False if that took too long."""
        self.closed = True
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._empty.wait()
        return not self.num_admitted
