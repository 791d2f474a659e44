"""What every request passes before it reaches a tier, by whatever protocol it came: keys, limits, places, counters."""

import asyncio
import contextlib
import logging
import re
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from cascade.answer import Chunk
from cascade.chain.scheduler import PRIORITY_S
from cascade.errors import Aborted, CascadeError, DeadlineExceeded, InvalidRequest, Overloaded, TooLarge, Unavailable
from cascade.messages import Open, mint
from cascade.settings.config import CascadeConfig
from deployments.admission.access import ANONYMOUS, Access, Account
from deployments.admission.fair_queue import FairQueue, Ticket
from deployments.admission.metrics import RouterMetrics
from deployments.admission.status import status_of
from deployments.tracing.export import tracing
from deployments.tracing.request import UNTRACED, RequestTrace, request_trace

T = TypeVar("T")
access = logging.getLogger("deployments.access")

REQUEST_ID = re.compile(r"[A-Za-z0-9_.:-]{1,128}")
LEAVING = "The server is shutting down"
LATE = "The request's deadline passed before its text was complete"
FULL_RETRY_AFTER_S = 1.0  # when a client should ask a full server again


def request_id(given: str) -> str:
    """The name that a client gave its request; raises `InvalidRequest` if it is not fit for headers and logs."""
    if not REQUEST_ID.fullmatch(given):
        raise InvalidRequest("The request id is not 1 to 128 letters, digits, dots, colons, dashes or underscores")
    return given


@dataclass(slots=True)
class Lifetime:
    """How long a request may live. What happens on its behalf is awaited by `wait`, so that it ends with it.

    Belongs to one event loop.
    """

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

        Raises `Aborted` or `DeadlineExceeded` when the request has ended, `TimeoutError` when only the seconds are over.
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


class Places:
    """At most ``max_running`` answers are written at once, and ``max_waiting`` more wait for their turn, see `FairQueue`."""

    def __init__(self, max_running: int, max_waiting: int) -> None:
        self._room = max_running + max_waiting
        self._free = max_running  # turns that nobody has
        self._queue = FairQueue()
        self._calls: dict[Ticket, asyncio.Future[None]] = {}  # of those that wait
        self._empty = asyncio.Event()
        self._empty.set()
        self.num_admitted = 0
        self.num_running = 0
        self.closed = False

    @property
    def num_waiting(self) -> int:
        return self.num_admitted - self.num_running

    def check(self, num_answers: int = 1) -> None:
        """Raise `Overloaded` or `Unavailable` if there is no room for so many answers, `InvalidRequest` if there never is."""
        if self.closed:
            raise Unavailable(LEAVING)
        if num_answers > self._room:
            raise InvalidRequest(
                f"The request asks for {num_answers} answers at once: the server takes {self._room}; "
                "send fewer prompts, or a smaller n"
            )
        if self.num_admitted + num_answers > self._room:
            raise Overloaded(
                f"The server is full: {self.num_running} answers are being written and {self.num_waiting} wait",
                FULL_RETRY_AFTER_S,
            )

    @contextlib.contextmanager
    def admitted(self, num_answers: int) -> Iterator[None]:
        """Hold places for the answers of a request; raises what `check` raises, at once."""
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
        """Wait for the turn of one admitted answer of key ``name``, and hold it; raises what ends its ``lifetime`` before.

        The answer reads so many tokens, and writes at most so many: how many it did, the caller counts on the ticket.
        """
        ticket = self._queue.join(name, weight, read, most, rank)
        await self._called(ticket, lifetime)
        self.num_running += 1
        try:
            yield ticket
        finally:
            self.num_running -= 1
            self._queue.settle(ticket)
            self._free += 1
            self._call()

    async def _called(self, ticket: Ticket, lifetime: Lifetime) -> None:
        """Return when it is the answer's turn; one that leaves before takes none along."""
        called = self._calls[ticket] = asyncio.get_running_loop().create_future()
        self._call()
        try:
            await lifetime.wait(lambda: called)
        except BaseException:
            if self._calls.pop(ticket, None) is not None:
                self._queue.leave(ticket)
            elif not called.cancelled():  # called in the very moment in which it left
                self._queue.undo(ticket)
                self._free += 1
                self._call()
            raise

    def _call(self) -> None:
        """Give free turns to those who are next."""
        while self._free and (ticket := self._queue.next()) is not None:
            called = self._calls.pop(ticket)
            if called.cancelled():  # it is about to leave
                self._queue.undo(ticket)
            else:
                self._free -= 1
                called.set_result(None)

    async def idle(self) -> None:
        """Wait until nothing is admitted."""
        await self._empty.wait()

    async def drained(self, timeout_s: float) -> bool:
        """Admit nothing more, and wait until all answers are written; False if that took too long."""
        self.closed = True
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._empty.wait()
        return not self.num_admitted


@dataclass(eq=False, slots=True)
class ActiveRequest:
    """One request while it is served; it may have several answers."""

    id: str
    account: Account
    lifetime: Lifetime
    since: float = field(default_factory=time.monotonic)  # when it arrived
    outcomes: list[str] = field(default_factory=list)  # of its answers that are over
    num_read: int = 0  # tokens of prompts
    num_written: int = 0
    trace: RequestTrace = UNTRACED

    def ended(self, outcome: str, num_read: int, num_written: int) -> None:
        """One of its answers is over."""
        self.outcomes.append(outcome)
        self.num_read += num_read
        self.num_written += num_written

    @property
    def summary(self) -> dict[str, object]:
        """What the log says of it: nothing that anybody wrote."""
        return {
            "request_id": self.id,
            "key": self.account.name,
            "outcomes": ",".join(sorted(set(self.outcomes))) or "none",
            "answers": len(self.outcomes),
            "prompt_tokens": self.num_read,
            "output_tokens": self.num_written,
            "seconds": round(time.monotonic() - self.since, 3),
        }


class Admission:
    """Admits requests, counts and charges their answers, and ends them before their time."""

    def __init__(self, config: CascadeConfig) -> None:
        self.limits = config.router.limits
        self.access = Access.load(config.router.access)
        self.places = Places(config.router.max_running, config.router.max_waiting)
        self.metrics = RouterMetrics(self.places, config.names)
        self.tracing = tracing("router")
        self._logs = config.router.access.log
        self._active: set[ActiveRequest] = set()

    @contextlib.contextmanager
    def admitted(
        self,
        account: Account,
        id: str | None,
        timeout_s: float | None,
        openings: Sequence[Open],
        *,
        since: float,
        headers: Iterable[tuple[str, object]] = (),
    ) -> Iterator[ActiveRequest]:
        """Hold what a request needs that came at ``since`` with ``headers``, or metadata, and has an answer for each opening.

        Raises `PermissionDenied`, `InvalidRequest`, `Overloaded` or `Unavailable` at once.
        """
        num_answers = len(openings)
        for priority in {opening.priority for opening in openings}:
            account.check_priority(priority)
        request = ActiveRequest(mint() if id is None else request_id(id), account, Lifetime.of(timeout_s), since)
        request.lifetime.check()
        with account.admitted(num_answers), self.places.admitted(num_answers):
            self._active.add(request)
            request.trace = request_trace(self.tracing, headers, since)
            try:
                yield request
            finally:
                self._active.discard(request)
                summary = request.summary
                request.trace.end(summary)
                if self._logs:
                    access.info(" ".join(f"{name}={value}" for name, value in summary.items()), extra=summary)

    def check_length(self, num_chars: int) -> None:
        """Raise `TooLarge` if a prompt has more characters than are tokenized."""
        most = self.limits.max_prompt_chars
        if num_chars > most:
            raise TooLarge(f"The prompt has {num_chars} characters: at most {most} are tokenized")

    def _turn(self, opening: Open, request: ActiveRequest) -> contextlib.AbstractAsyncContextManager[Ticket]:
        """The turn of one of its answers."""
        account, read = request.account, len(opening.tokens)
        most = opening.params.max_tokens - (read - opening.prompt_len)
        rank = request.since + PRIORITY_S * opening.priority  # as at the tiers
        return self.places.turn(request.lifetime, account.name, account.limits.weight, read, most, rank)

    def abort(self, key: str, id: str) -> int:
        """End the requests with this id of the key of this name; how many there were."""
        found = [request for request in self._active if request.id == id and request.account.name == key]
        for request in found:
            request.lifetime.abort()
        return len(found)

    def abort_all(self) -> None:
        """End all requests: the server goes."""
        for request in list(self._active):
            request.lifetime.abort(leaving=True)

    async def counted(
        self, chunks: AsyncGenerator[Chunk, None], opening: Open, request: ActiveRequest
    ) -> AsyncGenerator[Chunk, None]:
        """``chunks`` of one answer when its turn has come, counted and charged."""
        outcome, num_tokens, last = "failed", 0, request.since
        request.account.charge(len(opening.tokens))
        if len(opening.tokens) > opening.prompt_len:
            self.metrics.resumed()
        try:
            async with self._turn(opening, request) as ticket, contextlib.aclosing(chunks):
                request.trace.turn(opening.session)
                async for chunk in chunks:
                    if not chunk.token_ids and chunk.completion is None:  # brings only lanes, to a request that is watched
                        yield chunk
                        continue
                    now = time.monotonic()
                    if num_tokens == 0:
                        request.trace.first_piece(opening.session)
                    self.metrics.piece(now - last, first=num_tokens == 0)
                    num_tokens += len(chunk.token_ids)
                    ticket.written = num_tokens
                    request.account.charge(len(chunk.token_ids))
                    if chunk.completion is not None:
                        outcome = chunk.completion.finish_reason
                        self.metrics.completed(chunk.completion)
                    yield chunk
                    last = time.monotonic()
        except (GeneratorExit, asyncio.CancelledError):  # a client that leaves behind the last piece has its answer
            outcome = "left" if outcome == "failed" else outcome
            raise
        except CascadeError as error:
            outcome = status_of(error).code
            raise
        finally:
            self.metrics.ended(outcome, opening.prompt_len, num_tokens)
            request.ended(outcome, opening.prompt_len, num_tokens)
            request.trace.ended(opening.session, outcome, opening.prompt_len, num_tokens)
