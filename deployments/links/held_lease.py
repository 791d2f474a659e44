"""A lease held for the next session: taking one through Ray Serve is most of what a first token waits for."""

import asyncio
import contextlib
import contextvars
import logging
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from cascade.messages import mint

log = logging.getLogger(__name__)

FETCH_TIMEOUT_S = 1.0  # the places of a full replica are left to sessions that wait for one


class Lease(Protocol):
    """A lease being held: yields the replica's address and secret, then stays open; a streaming Serve call."""

    def __aiter__(self) -> AsyncIterator[str]: ...

    def cancel(self) -> Any: ...


class Lessor(Protocol):
    """Takes a lease for a session on some replica of a tier, one at a preferred address where that is as good."""

    def __call__(self, session: str, preferred: Sequence[str] = (), /) -> Lease: ...


@dataclass(slots=True)
class HeldLease:
    """A lease for a session that nobody has opened yet."""

    session: str
    lease: Lease
    ticket: str
    taken: bool = False


class HeldLeases:
    """Holds at most one lease on a tier, for ``hold_s`` at most; none if that is 0.

    Made and used in a running event loop. Serve counts the held lease as an ongoing request. So it is taken only when a session
    has its first answer, ends by itself, and is not renewed while no session begins.
    """

    def __init__(self, lessor: Lessor, hold_s: float) -> None:
        self._lessor = lessor
        self.hold_s = hold_s
        self._held: HeldLease | None = None
        self._task: asyncio.Task[None] | None = None

    @property
    def session(self) -> str | None:
        """Name of the session that the held lease is for, if there is one."""
        return None if self._held is None else self._held.session

    @property
    def address(self) -> str | None:
        """Of the replica that is held."""
        return None if self._held is None else self._held.ticket.partition(" ")[0]

    def take(self, session: str) -> HeldLease | None:
        """The held lease, if it is for ``session``; from now on it is the caller's."""
        held = self._held
        if held is None or held.session != session:
            return None
        held.taken = True
        self._stop()
        return held

    def renew(self) -> None:
        """Begin to take a lease, unless one is held or on its way."""
        if self.hold_s and self._task is None:
            # an empty context: in that of a request Serve would cancel the lease when the request ends
            self._task = asyncio.get_running_loop().create_task(self._hold(), context=contextvars.Context())
            self._task.add_done_callback(self._ended)

    def distrust(self, address: str) -> None:
        """Let go of a lease on the replica at ``address``, whose link broke."""
        if self._held is not None and self._held.ticket.startswith(f"{address} "):
            self._stop()

    async def close(self) -> None:
        """Let go of the lease, and take no more."""
        self.hold_s = 0.0
        task = self._task
        self._stop()
        if task is not None:
            await asyncio.gather(task, return_exceptions=True)

    def _stop(self) -> None:
        self._held = None
        if self._task is not None:
            self._task.cancel()

    def _ended(self, task: "asyncio.Task[None]") -> None:
        self._task = None

    async def _hold(self) -> None:
        """Take a lease and keep it until somebody else takes it, it has become old, or its replica is gone."""
        session = mint()
        lease: Lease | None = None
        held: HeldLease | None = None
        try:
            lease = self._lessor(session)
            tickets = aiter(lease)
            async with asyncio.timeout(FETCH_TIMEOUT_S):
                ticket = await anext(tickets)
            self._held = held = HeldLease(session, lease, ticket)
            async with asyncio.timeout(self.hold_s):
                await anext(tickets, None)  # returns or raises only when the lease is over
        except TimeoutError:
            pass
        except Exception as error:  # of any kind that Ray raises: sessions take their own leases
            log.info("A held lease ended: %s", error)
        finally:
            self._held = None
            if lease is not None and (held is None or not held.taken):
                with contextlib.suppress(Exception):  # a lease whose replica has died is over anyway
                    lease.cancel()
