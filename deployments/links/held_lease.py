"""A replica held ahead for the next session: to take a lease through Ray Serve is most of what a first token waits for."""

import asyncio
import contextlib
import contextvars
import logging
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any, Protocol

from cascade.messages import mint

log = logging.getLogger(__name__)

FETCH_TIMEOUT_S = 1.0  # replicas without a free place are left to those who have a request


class Lease(Protocol):
    """A lease being held: yields the replica's address and secret, then stays open; a streaming Serve call."""

    def __aiter__(self) -> AsyncIterator[str]: ...

    def cancel(self) -> Any: ...


Lessor = Callable[[str], Lease]
"""Takes a lease for a session on some replica of a tier."""


@dataclass(slots=True)
class HeldLease:
    """A lease for a session that nobody has opened yet."""

    session: str
    lease: Lease
    ticket: str
    taken: bool = False


class HeldLeases:
    """At most one spare lease on a tier, for ``keep_s`` at most; none if that is 0.

    Made and used in a running event loop. What Serve counts as ongoing is too high by the spare: so it is taken when a session
    begins to be answered, not before there are any and not again while there are none, and ends by itself.
    """

    def __init__(self, lessor: Lessor, keep_s: float) -> None:
        self._lessor = lessor
        self._keep_s = keep_s
        self._spare: HeldLease | None = None
        self._task: asyncio.Task[None] | None = None

    @property
    def session(self) -> str | None:
        """Name of the session that the spare is for, if there is one."""
        return None if self._spare is None else self._spare.session

    def take(self, session: str) -> HeldLease | None:
        """The spare, if it is for ``session``; the caller holds it from now on."""
        spare = self._spare
        if spare is None or spare.session != session:
            return None
        spare.taken = True
        self._stop()
        return spare

    def renew(self) -> None:
        """Have a spare soon, unless there is one or one on its way."""
        if self._keep_s and self._task is None:
            # not in the context of a request, with whose end Serve would cancel it
            self._task = asyncio.get_running_loop().create_task(self._hold(), context=contextvars.Context())
            self._task.add_done_callback(self._ended)

    def distrust(self, address: str) -> None:
        """The link to the replica at ``address`` broke: a spare there is worth nothing."""
        if self._spare is not None and self._spare.ticket.startswith(f"{address} "):
            self._stop()

    async def close(self) -> None:
        """Let go."""
        self._keep_s = 0.0
        task = self._task
        self._stop()
        if task is not None:
            await asyncio.gather(task, return_exceptions=True)

    def _stop(self) -> None:
        self._spare = None
        if self._task is not None:
            self._task.cancel()

    def _ended(self, task: "asyncio.Task[None]") -> None:
        self._task = None

    async def _hold(self) -> None:
        """Take a lease and keep it until somebody else takes it, it has become old, or its replica is gone."""
        session = mint()
        lease: Lease | None = None
        spare: HeldLease | None = None
        try:
            lease = self._lessor(session)
            tickets = aiter(lease)
            async with asyncio.timeout(FETCH_TIMEOUT_S):
                ticket = await anext(tickets)
            self._spare = spare = HeldLease(session, lease, ticket)
            async with asyncio.timeout(self._keep_s):
                await anext(tickets, None)  # there is nothing more to come: a lease that says so, or fails, is over
        except TimeoutError:
            pass
        except Exception as error:  # whatever Ray raises: there is no spare
            log.info("A spare lease ended: %s", error)
        finally:
            self._spare = None
            if lease is not None and (spare is None or not spare.taken):
                with contextlib.suppress(Exception):  # a lease whose replica has died is over anyway
                    lease.cancel()
