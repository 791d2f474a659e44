"""Who is served now, who waits, who is refused at once; and how a request ends before its time."""

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field

from cascade.errors import Aborted, DeadlineExceeded, InvalidRequest, Overloaded, Unavailable

RETRY_AFTER_S = 1.0
LATE = "The request's deadline passed before its text was complete"


@dataclass(slots=True)
class Life:
    """How long a request may live. Whoever waits on its behalf lets itself be woken, and then asks `check`."""

    deadline: float = float("inf")  # of `time.monotonic`
    aborted: bool = False
    _wakes: list[Callable[[], object]] = field(default_factory=list)

    @classmethod
    def of(cls, timeout_s: float | None) -> "Life":
        return cls() if timeout_s is None else cls(time.monotonic() + timeout_s)

    @property
    def left_s(self) -> float:
        return max(0.0, self.deadline - time.monotonic())

    def abort(self) -> None:
        """End it now."""
        self.aborted = True
        for wake in list(self._wakes):
            wake()

    @contextlib.contextmanager
    def waking(self, wake: Callable[[], object]) -> Iterator[None]:
        """Have ``wake`` called by `abort` while in here."""
        self._wakes.append(wake)
        try:
            yield
        finally:
            self._wakes.remove(wake)

    def check(self) -> None:
        """Raise `Aborted` or `DeadlineExceeded` if it is over."""
        if self.aborted:
            raise Aborted("The request was aborted")
        if not self.left_s:
            raise DeadlineExceeded(LATE)


class Gate:
    """At most ``max_running`` answers are written at once, and ``max_waiting`` more wait for their turn, in order."""

    def __init__(self, max_running: int, max_waiting: int) -> None:
        self._max_running = max_running
        self._max_waiting = max_waiting
        self._waiting: deque[asyncio.Future[None]] = deque()
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
        room = self._max_running + self._max_waiting
        if self.closed:
            raise Unavailable("The server is shutting down")
        if num_answers > room:
            raise InvalidRequest(
                f"The request asks for {num_answers} answers at once: the server takes {room}; "
                "send fewer prompts, or a smaller n"
            )
        if self.num_admitted + num_answers > room:
            raise Overloaded(
                f"The server is full: {self.num_running} answers are being written and {self.num_waiting} wait", RETRY_AFTER_S
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
    async def turn(self, life: Life) -> AsyncIterator[None]:
        """Wait for the turn of one admitted answer; raises what ends its ``life`` before."""
        if self.num_running < self._max_running:
            self.num_running += 1
        else:
            await self._wait(life)
        try:
            yield
        finally:
            self._next()

    async def drained(self, timeout_s: float) -> bool:
        """Admit nothing more, and wait until all answers are written; False if that took too long."""
        self.closed = True
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._empty.wait()
        return not self.num_admitted

    async def _wait(self, life: Life) -> None:
        mine = asyncio.get_running_loop().create_future()
        self._waiting.append(mine)
        left_s = None if life.deadline == float("inf") else life.left_s
        try:
            with life.waking(mine.cancel):
                async with asyncio.timeout(left_s):
                    await mine
        except (asyncio.CancelledError, TimeoutError) as end:
            if mine.done() and not mine.cancelled():
                self._next()  # the turn came together with the end
            elif mine in self._waiting:
                self._waiting.remove(mine)
            life.check()
            if isinstance(end, TimeoutError):  # clocks differ by a tick
                raise DeadlineExceeded(LATE) from None
            raise

    def _next(self) -> None:
        """Hand the turn on, or give it back."""
        while self._waiting:
            first = self._waiting.popleft()
            if not first.done():
                first.set_result(None)
                return
        self.num_running -= 1
