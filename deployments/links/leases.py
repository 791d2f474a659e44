"""Leases, by which sessions hold replicas of the tiers below.

A lease is one streaming call of Ray Serve. It yields the link address and secret of a replica, and stays open as long as it is
held, so that Serve sees the true load. Callers have a `LeasePool`, replicas have `GivenLeases`.
"""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeAlias

from ray.serve.handle import DeploymentHandle

from cascade.messages import SessionSpec, mint
from deployments.links.affinity import Prefixes

PATIENCE_S = 3.0  # a lease that is not given for so long has a second one asked for
MOST_HELD = 2  # leases on a tier that no session uses
HELD_PLACES = 16  # a replica that takes fewer sessions has no place for a lease that nobody uses
OPEN_TIMEOUT_S = 10.0  # a lease by which no session is open ends after that


class Lease(Protocol):
    """The call: yields ``address secret`` of a replica, then stays open until either side ends it."""

    def __aiter__(self) -> AsyncIterator[str]: ...

    def cancel(self) -> Any: ...


# calls some replica of a tier for the lease of this name, if possible one at a preferred address; without those, calls with the
# same affinity go to the same replica, if possible
Lessor: TypeAlias = Callable[[str, Sequence[str], str], Lease]


def lessor(handle: DeploymentHandle) -> Lessor:
    """The `Lessor` of Ray Serve."""
    return handle.options(stream=True).lease.remote


# the caller's side


@dataclass(frozen=True, slots=True, eq=False)
class HeldLease:
    """A lease that was given: sessions use it one after another until it is old."""

    tier: str
    name: str
    call: Lease
    ticket: str  # address and secret
    until: float  # on the loop's clock

    @property
    def address(self) -> str:
        return self.ticket.partition(" ")[0]

    def release(self) -> None:
        _cancel(self.call)


class LeasePool:
    """Takes leases on the tiers below, and keeps some whose session is over for the next one.

    Taking a lease costs milliseconds, which a first token would wait for. So a lease may be used again until ``hold_s`` have
    passed since it was given. Serve counts unused leases as ongoing requests, and chooses a replica only when one is taken: so
    few are kept, and not for long. One that has ended meanwhile is refused by its replica, and the session fails.

    With ``prefixes``, replicas are preferred that know how a text begins.

    Made and used in a running event loop. Leases are taken in an empty context: in that of a request Serve would cancel them
    when the request ends.
    """

    def __init__(
        self,
        lessors: Mapping[str, Lessor],
        *,
        timeout_s: float = 5.0,
        hold_s: float = 0.0,
        prefixes: Prefixes | None = None,
    ) -> None:
        self.lessors = lessors
        self.timeout_s = timeout_s
        self.hold_s = hold_s
        self.prefixes = prefixes
        self._held: list[HeldLease] = []

    @property
    def num_held(self) -> int:
        return len(self._held)

    async def take(self, spec: SessionSpec, affinity: str = "") -> HeldLease:
        """A lease for a session: an unused one, on a preferred replica if there is one, or a new one.

        Raises `TimeoutError`, or whatever Serve raises where there is no replica. Serve may choose a replica that is out
        of reach and not know it. So every `PATIENCE_S` a second lease is asked for, on any replica; the first one keeps its
        place in the queue.
        """
        preferred = () if self.prefixes is None else self.prefixes.find(spec, affinity)
        anywhere = not preferred and (self.prefixes is None or not affinity)
        for lease in reversed(self._held):
            if lease.tier == spec.tier and (anywhere or lease.address in preferred):
                self._held.remove(lease)
                return lease
        if affinity:  # all routers agree on a session's replica
            preferred = ()
        tasks: list[asyncio.Task[HeldLease]] = []
        try:
            async with asyncio.timeout(self.timeout_s):
                while not (given := [task for task in tasks if task.done()]):
                    if len(tasks) == 2:
                        _withdraw(tasks.pop())
                    wishes = ((), "") if tasks else (preferred, affinity)
                    tasks.append(asyncio.create_task(self._request(spec.tier, *wishes)))
                    await asyncio.wait(tasks, timeout=PATIENCE_S, return_when=asyncio.FIRST_COMPLETED)
            tasks.remove(given[0])
            return given[0].result()
        except Exception:
            for address in preferred:  # the next try shall meet another replica
                self.forget(address)
            raise
        finally:
            for task in tasks:
                _withdraw(task)

    async def _request(self, tier: str, preferred: Sequence[str], affinity: str) -> HeldLease:
        name, loop = mint(), asyncio.get_running_loop()
        call = self.lessors[tier](name, preferred, affinity)
        try:
            ticket = await anext(aiter(call))
        except BaseException:
            _cancel(call)
            raise
        lease = HeldLease(tier, name, call, ticket, loop.time() + self.hold_s)
        if self.hold_s:
            loop.call_at(lease.until, self._drop, lease)
        return lease

    def keep(self, lease: HeldLease) -> bool:
        """Keep a lease whose session is over for the next one; False if it is not wanted."""
        old = asyncio.get_running_loop().time() >= lease.until
        if not self.hold_s or old or len(self._held) >= MOST_HELD:
            return False
        self._held.append(lease)
        return True

    def forget(self, address: str) -> None:
        """The replica there is preferred no more, and no lease on it is kept."""
        if self.prefixes is not None:
            self.prefixes.forget(address)
        for lease in [lease for lease in self._held if lease.address == address]:
            self._drop(lease)

    def close(self) -> None:
        """Release the unused leases, and keep none any more."""
        self.hold_s = 0.0
        for lease in list(self._held):
            self._drop(lease)

    def _drop(self, lease: HeldLease) -> None:
        """Release a lease, unless a session uses it: that one does."""
        if lease in self._held:
            self._held.remove(lease)
            lease.release()


def _withdraw(task: "asyncio.Task[HeldLease]") -> None:
    task.add_done_callback(lambda task: None if task.cancelled() or task.exception() else task.result().release())
    task.cancel()


def _cancel(call: Lease) -> None:
    with contextlib.suppress(Exception):  # one whose replica has died is over anyway
        call.cancel()


# the replica's side


@dataclass(slots=True, eq=False)
class GivenLease:
    """A lease on this replica, used by one session at a time."""

    name: str
    session: str = ""  # the open one
    idle_since: float = field(default_factory=lambda: time.monotonic())
    over: asyncio.Event = field(default_factory=asyncio.Event)

    async def ended(self) -> None:
        """Wait until it is over, or no session was open for `OPEN_TIMEOUT_S`: Serve does not tell when a caller dies."""
        while (left_s := OPEN_TIMEOUT_S - (0.0 if self.session else time.monotonic() - self.idle_since)) > 0:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self.over.wait(), left_s)
                return


class GivenLeases:
    """All leases on this replica."""

    def __init__(self) -> None:
        self._given: dict[str, GivenLease] = {}

    def __len__(self) -> int:
        return len(self._given)

    def add(self, name: str) -> GivenLease:
        """A new lease; names are unique, because callers mint them."""
        lease = self._given[name] = GivenLease(name)
        return lease

    def remove(self, lease: GivenLease) -> str:
        """Forget a lease that is over; returns its open session, or ""."""
        self._given.pop(lease.name, None)
        return lease.session

    def open(self, session: str, name: str) -> bool:
        """Begin a session; False if there is no such lease, or it is in use."""
        lease = self._given.get(name)
        if lease is None or lease.session or lease.over.is_set() or self._of(session) is not None:
            return False
        lease.session = session
        return True

    def end(self, session: str, *, keep: bool = False) -> None:
        """End a session, and its lease unless the caller keeps that for another session."""
        lease = self._of(session)
        if lease is None:
            return
        lease.session, lease.idle_since = "", time.monotonic()
        if not keep:
            lease.over.set()

    def _of(self, session: str) -> GivenLease | None:
        return next((lease for lease in self._given.values() if lease.session == session), None)
