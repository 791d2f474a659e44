"""Leases held for the sessions that come next: taking one through Ray Serve is most of what a first token waits for."""

import asyncio
import contextlib
import contextvars
import logging
from collections.abc import AsyncIterator, Collection, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from cascade.messages import mint

log = logging.getLogger(__name__)

FETCH_TIMEOUT_S = 1.0  # the places of a full replica are left to sessions that wait for one
MOST_HELD = 2  # leases at once that no session uses
HELD_PLACES = 16  # a replica that takes fewer sessions has none to spare for them


class Lease(Protocol):
    """A lease being held: yields the replica's address and secret, then stays open; a streaming Serve call."""

    def __aiter__(self) -> AsyncIterator[str]: ...

    def cancel(self) -> Any: ...


class Lessor(Protocol):
    """Takes a lease by its name on some replica of a tier, one at a preferred address where that is as good."""

    def __call__(self, name: str, preferred: Sequence[str] = (), /) -> Lease: ...


@dataclass(slots=True, eq=False)
class HeldLease:
    """A lease that was given: sessions use it one after another until it is old."""

    name: str
    lease: Lease
    ticket: str  # address and secret
    until: float  # by the loop's clock
    watch: "asyncio.Task[None] | None" = None

    @property
    def address(self) -> str:
        """Of the replica."""
        return self.ticket.partition(" ")[0]

    @property
    def over(self) -> bool:
        """It is old, or the replica or Serve has ended it, as far as anybody looked."""
        return asyncio.get_running_loop().time() >= self.until or (self.watch is not None and self.watch.done())

    def let_go(self) -> None:
        """The replica may have another session for it."""
        if self.watch is not None:
            self.watch.cancel()
        let_go(self.lease)


class HeldLeases:
    """Holds leases on a tier for ``hold_s`` since they were given, `MOST_HELD` of them at most; none if that is 0.

    Made and used in a running event loop. Serve counts held leases as ongoing requests, and chooses a replica only when one is
    taken. So they are few, and end by themselves. They come from sessions that are over, and one is taken ahead when a session
    has its first answer, if no other will be there for a while (`renew`).
    """

    def __init__(self, lessor: Lessor, hold_s: float) -> None:
        self._lessor = lessor
        self.hold_s = hold_s
        self._held: list[HeldLease] = []
        self._coming: asyncio.Task[None] | None = None
        self._watching: set[asyncio.Task[None]] = set()

    def __len__(self) -> int:
        return len(self._held)

    def given(self, name: str, lease: Lease, ticket: str) -> HeldLease:
        """A lease that a session has waited for."""
        return HeldLease(name, lease, ticket, asyncio.get_running_loop().time() + self.hold_s)

    def take(self, preferred: Collection[str] = ()) -> HeldLease | None:
        """One that is held, on a replica at a preferred address if there are any; from now on it is the caller's."""
        for held in reversed(self._held):
            if not held.over and (not preferred or held.address in preferred):
                self._held.remove(held)
                return held
        return None

    def keep(self, held: HeldLease) -> bool:
        """Take back a lease whose session is over; False if it is not wanted."""
        if not self.hold_s or held.over or len(self._held) >= MOST_HELD:
            return False
        if held.watch is None:
            held.watch = self._begin(self._see_off(held))
            asyncio.get_running_loop().call_at(held.until, self._drop, held)
        self._held.append(held)
        return True

    def renew(self) -> None:
        """Begin to take a lease, unless one is on its way or held for long enough yet."""
        wanted = asyncio.get_running_loop().time() + self.hold_s / 2
        if self.hold_s and self._coming is None and all(held.until < wanted for held in self._held):
            self._coming = self._begin(self._fetch())
            self._coming.add_done_callback(self._came)

    def distrust(self, address: str) -> None:
        """Let go of leases on the replica at ``address``, whose link broke."""
        for held in [held for held in self._held if held.address == address]:
            self._drop(held)

    async def close(self) -> None:
        """Let go of all leases, and take no more."""
        self.hold_s = 0.0
        for held in self._held:
            let_go(held.lease)
        self._held.clear()
        for task in self._watching:
            task.cancel()
        await asyncio.gather(*self._watching, return_exceptions=True)

    def _begin(self, work: Any) -> "asyncio.Task[None]":
        # an empty context: in that of a request Serve would cancel the lease when the request ends
        task = asyncio.get_running_loop().create_task(work, context=contextvars.Context())
        self._watching.add(task)
        task.add_done_callback(self._watching.discard)
        return task

    def _came(self, task: "asyncio.Task[None]") -> None:
        self._coming = None

    async def _fetch(self) -> None:
        name, lease, held = mint(), None, None
        try:
            lease = self._lessor(name)
            async with asyncio.timeout(FETCH_TIMEOUT_S):
                held = self.given(name, lease, await anext(aiter(lease)))
        except TimeoutError:
            pass
        except Exception as error:  # of any kind that Ray raises: sessions take their own leases
            log.info("No lease could be held: %s", error)
        finally:
            if lease is not None and (held is None or not self.keep(held)):
                let_go(lease)

    async def _see_off(self, held: HeldLease) -> None:
        """Wait until a lease is over. Not with a timeout: to end this wait is to end the lease, which a session may use."""
        with contextlib.suppress(Exception):  # of any kind that Ray raises where a replica has died
            await anext(aiter(held.lease), None)
        self._drop(held)

    def _drop(self, held: HeldLease) -> None:
        """Let go of a lease, unless a session uses it: that one does."""
        if held in self._held:
            self._held.remove(held)
            held.let_go()


def let_go(lease: Lease) -> None:
    """End a lease; one whose replica has died is over anyway."""
    with contextlib.suppress(Exception):
        lease.cancel()
