"""Leases: the open calls by which sessions hold replicas of the tiers below, from the request to the release.

A lease is one streaming call of Ray Serve. It yields the link address and secret of a replica, and stays open as long as it is
held, so that Serve sees the true load. Callers have a `LeasePool`, replicas have the `GivenLeases`.
"""

import asyncio
import contextlib
import contextvars
import logging
import time
from collections.abc import AsyncIterator, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Protocol

from ray.serve.handle import DeploymentHandle

from cascade.errors import Unavailable
from cascade.messages import Open, mint
from deployments.links.affinity import Prefixes
from deployments.links.replica_status import ReplicaStatus

log = logging.getLogger(__name__)

PATIENCE_S = 3.0  # with a lease that is not given, before a second one is asked for
MOST_HELD = 2  # leases on a tier that no session uses
HELD_PLACES = 16  # a replica that takes fewer sessions has no place for a lease that nobody uses
OPEN_TIMEOUT_S = 10.0  # a lease by which no session is open ends after that
COUNT_S = 1.0  # between two counts of the replicas of tiers that may be scaled to zero


class Lease(Protocol):
    """The call: yields ``address secret`` of a replica, then stays open until either side ends it."""

    def __aiter__(self) -> AsyncIterator[str]: ...

    def cancel(self) -> Any: ...


class Lessor(Protocol):
    """Makes the call, by the name of the lease, to some replica of a tier: to one at a preferred address where it can.

    Where none is preferred, calls of the same ``affinity`` go to the same one where they can.
    """

    def __call__(self, name: str, preferred: Sequence[str] = (), affinity: str = "", /) -> Lease: ...


def lessor(handle: DeploymentHandle) -> Lessor:
    """Takes leases through Ray Serve."""
    streaming = handle.options(stream=True)
    return lambda name, preferred=(), affinity="": streaming.lease.remote(name, preferred, affinity)


# the caller's side


@dataclass(slots=True, eq=False)
class HeldLease:
    """A lease that was given: sessions use it one after another until it is old."""

    tier: str
    name: str
    call: Lease
    ticket: str  # address and secret
    until: float  # by the loop's clock
    watch: "asyncio.Task[None] | None" = None

    @property
    def address(self) -> str:
        return self.ticket.partition(" ")[0]

    @property
    def over(self) -> bool:
        """It is old, or the replica or Serve has ended it, as far as is known."""
        return asyncio.get_running_loop().time() >= self.until or (self.watch is not None and self.watch.done())

    def release(self) -> None:
        if self.watch is not None:
            self.watch.cancel()
        _cancel(self.call)


class LeasePool:
    """Takes leases on the tiers below, and holds those that came back for the next sessions.

    Taking a lease costs milliseconds, which a first token would wait for. So a lease whose session is over is held, until
    ``hold_s`` of its tier have passed since it was given (none where that is 0). Serve counts held leases as ongoing requests
    and chooses a replica only when one is taken: so few are held, and not for long.

    The tiers ``scaled_to_zero`` may have no replica. While they have none no lease is taken: one that waits would make Serve
    start a replica, whatever its policy says. With ``prefixes``, replicas are preferred that know how a text begins.

    Made and used in a running event loop. Leases are taken in an empty context: in that of a request Serve would cancel them
    when the request ends.
    """

    def __init__(
        self,
        lessors: Mapping[str, Lessor],
        *,
        timeout_s: float = 5.0,
        hold_s: Mapping[str, float] = MappingProxyType({}),
        scaled_to_zero: Collection[str] = (),
        prefixes: Prefixes | None = None,
    ) -> None:
        self.lessors = lessors
        self.timeout_s = timeout_s
        self.hold_s = dict(hold_s)
        self.prefixes = prefixes
        self._held: list[HeldLease] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self._at_zero: set[str] = set()
        if counted := {*scaled_to_zero} & {*lessors}:
            self._start(self._count(counted))

    @property
    def num_held(self) -> int:
        return len(self._held)

    def reuse(self, opening: Open) -> HeldLease | None:
        """A held lease for a session, on a preferred replica if there is one; from now on it is the caller's."""
        preferred = self.preferred(opening)
        anywhere = not preferred and (self.prefixes is None or not opening.affinity)
        for held in reversed(self._held):
            if held.tier == opening.tier and not held.over and (anywhere or held.address in preferred):
                self._held.remove(held)
                return held
        return None

    async def take(self, opening: Open) -> HeldLease:
        """A new lease for a session; raises `TimeoutError`, or whatever Serve raises where there is no replica.

        Serve may choose a replica that is out of reach and not know it. So every `PATIENCE_S` a second lease is asked for; the
        first one keeps its place in Serve's queue.
        """
        if opening.tier in self._at_zero:
            raise Unavailable(f"tier {opening.tier} is scaled to zero")
        lessor = self.lessors[opening.tier]
        preferred = () if opening.affinity else self.preferred(opening)  # all routers agree on a session's replica
        asked: dict[asyncio.Task[str], tuple[str, Lease]] = {}
        try:
            async with asyncio.timeout(self.timeout_s):
                while not (given := [task for task in asked if task.done()]):
                    if len(asked) == 2:
                        _withdraw(*asked.popitem())
                    name = mint()
                    call = lessor(name) if asked else lessor(name, preferred, opening.affinity)
                    asked[asyncio.create_task(_ticket(call))] = name, call
                    await asyncio.wait(asked, timeout=PATIENCE_S, return_when=asyncio.FIRST_COMPLETED)
            ticket = given[0].result()
            name, call = asked.pop(given[0])
            until = asyncio.get_running_loop().time() + self.hold_s.get(opening.tier, 0.0)
            return HeldLease(opening.tier, name, call, ticket, until)
        except Exception:
            for address in preferred:  # the next try shall meet another replica
                self.forget(address)
            raise
        finally:
            for task, one in asked.items():
                _withdraw(task, one)

    def keep(self, lease: HeldLease) -> bool:
        """Hold a lease whose session is over for the next one; False if it is not wanted."""
        if not self.hold_s.get(lease.tier) or lease.over or sum(h.tier == lease.tier for h in self._held) >= MOST_HELD:
            return False
        if lease.watch is None:
            lease.watch = self._start(self._until_over(lease))
            asyncio.get_running_loop().call_at(lease.until, self._drop, lease)
        self._held.append(lease)
        return True

    def preferred(self, opening: Open) -> tuple[str, ...]:
        """Addresses of the replicas that know how the text begins, or had the client's session."""
        return () if self.prefixes is None else self.prefixes.find(opening)

    def forget(self, address: str) -> None:
        """The replica there is preferred no more, and no lease on it is held."""
        if self.prefixes is not None:
            self.prefixes.forget(address)
        for held in [held for held in self._held if held.address == address]:
            self._drop(held)

    async def close(self) -> None:
        """Release what is held, and hold nothing more."""
        self.hold_s.clear()
        for held in list(self._held):
            self._drop(held)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _start(self, work: Any) -> "asyncio.Task[None]":
        task = asyncio.get_running_loop().create_task(work, context=contextvars.Context())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _until_over(self, lease: HeldLease) -> None:
        """Not with a timeout: to cancel this wait is to cancel the lease, which a session may use."""
        with contextlib.suppress(Exception):  # of any kind that Ray raises where a replica has died
            await anext(aiter(lease.call), None)
        self._drop(lease)

    def _drop(self, lease: HeldLease) -> None:
        """Release a lease, unless a session uses it: that one does."""
        if lease in self._held:
            self._held.remove(lease)
            lease.release()

    async def _count(self, names: Collection[str]) -> None:
        status = ReplicaStatus()
        while True:
            with contextlib.suppress(Unavailable):  # then what was known holds
                replicas = await status.replicas()
                self._at_zero = {name for name in names if not replicas.get(name)}
            await asyncio.sleep(COUNT_S)


async def _ticket(call: Lease) -> str:
    return await anext(aiter(call))


def _withdraw(task: "asyncio.Task[str]", asked: tuple[str, Lease]) -> None:
    task.add_done_callback(lambda task: task.cancelled() or task.exception())  # nobody waits for it
    task.cancel()
    _cancel(asked[1])


def _cancel(call: Lease) -> None:
    with contextlib.suppress(Exception):  # one whose replica has died is over anyway
        call.cancel()


# the replica's side


@dataclass(slots=True, eq=False)
class GivenLease:
    """A lease on this replica."""

    name: str
    session: str = ""  # that is open
    idle_since: float = field(default_factory=lambda: time.monotonic())
    over: asyncio.Event = field(default_factory=asyncio.Event)

    async def ended(self) -> None:
        """Return when it is over, or no session was open for `OPEN_TIMEOUT_S`: Serve does not tell when a caller dies."""
        while self.session or time.monotonic() < self.idle_since + OPEN_TIMEOUT_S:
            idle_s = 0.0 if self.session else time.monotonic() - self.idle_since
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self.over.wait(), OPEN_TIMEOUT_S - idle_s)
                return


class GivenLeases:
    """The leases by which callers hold this replica, each for one session at a time."""

    def __init__(self) -> None:
        self._given: dict[str, GivenLease] = {}
        self._of: dict[str, GivenLease] = {}  # by session

    def __len__(self) -> int:
        return len(self._given)

    def add(self, name: str) -> GivenLease:
        """A caller holds this replica; names are minted, so no two leases have the same."""
        lease = self._given[name] = GivenLease(name)
        return lease

    def remove(self, lease: GivenLease) -> str:
        """The lease is over; the session that was open by it, if there is one."""
        self._given.pop(lease.name, None)
        self._of.pop(lease.session, None)
        return lease.session

    def open(self, session: str, name: str) -> bool:
        """The session begins; False if there is no such lease, or it has a session."""
        lease = self._given.get(name)
        if lease is None or lease.session or lease.over.is_set() or session in self._of:
            return False
        lease.session, self._of[session] = session, lease
        return True

    def end(self, session: str, *, keep: bool = False) -> None:
        """The session is over, and its lease with it, unless that is kept for another session."""
        lease = self._of.pop(session, None)
        if lease is None:
            return
        if keep:
            lease.session, lease.idle_since = "", time.monotonic()
        else:
            lease.over.set()

    def end_unopened(self) -> None:
        """No session will begin here any more."""
        for lease in self._given.values():
            if not lease.session:
                lease.over.set()
