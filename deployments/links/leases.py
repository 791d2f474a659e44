"""Leases, with which sessions hold replicas of the tiers below.

A lease is a streaming Ray Serve call. It yields the link address and secret of a replica, and stays open as long as it is held,
so that Serve sees the true load. Callers have a `LeasePool`, replicas have `GivenLease`s.
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

PATIENCE_S = 3.0  # time after which a second lease is requested beside one that was not given
MOST_HELD = 2  # unused leases on a tier that are kept at most
HELD_PLACES = 16  # a replica that takes fewer sessions has no place for unused leases
OPEN_TIMEOUT_S = 10.0  # time after which a lease without an open session ends


class Lease(Protocol):
    """The call of a lease: yields ``address secret`` of a replica, then stays open until either side ends it."""

    def __aiter__(self) -> AsyncIterator[str]: ...

    def cancel(self) -> Any: ...


# requests the lease of this name from a replica, preferably at one of these addresses; without addresses, requests with one
# affinity preferably go to one replica
Lessor: TypeAlias = Callable[[str, Sequence[str], str], Lease]


def lessor(handle: DeploymentHandle) -> Lessor:
    """The `Lessor` for a Ray Serve deployment."""
    return handle.options(stream=True).lease.remote


# the caller's side


@dataclass(frozen=True, slots=True, eq=False)
class HeldLease:
    """A lease that was given; sessions use it one after another until it expires."""

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
    """Takes leases on the tiers below, and keeps some for later sessions.

    Taking a lease costs milliseconds, which would delay the first token. So a lease may be reused until ``hold_s`` seconds
    after it was given. Serve counts unused leases as ongoing requests, and balances load only when a lease is taken: so few are
    kept, and not for long. If a lease has ended meanwhile, its replica refuses it, and the session fails.

    With ``prefixes``, replicas are preferred that have scored the beginning of a text.

    Made and used in a running event loop. Leases are taken in an empty context: in the context of a request, Serve would cancel
    them when the request ends.
    """

    def __init__(
        self, lessors: Mapping[str, Lessor], *, timeout_s: float = 5.0, hold_s: float = 0.0, prefixes: Prefixes | None = None
    ) -> None:
        self.lessors = lessors
        self.timeout_s = timeout_s
        self.hold_s = hold_s
        self.prefixes = prefixes
        self._held: list[HeldLease] = []

    async def take(self, spec: SessionSpec, affinity: str = "") -> HeldLease:
        """A lease for a session: an unused one, on a preferred replica if there is one, or a new one.

        Raises `TimeoutError`, or what Serve raises if there is no replica. Serve may choose a replica that it cannot reach,
        without noticing. So every `PATIENCE_S` it requests a second lease, on any replica, and waits for both.
        """
        preferred = () if self.prefixes is None else self.prefixes.find(spec, affinity)
        anywhere = not preferred and (self.prefixes is None or not affinity)
        for lease in reversed(self._held):
            if lease.tier == spec.tier and (anywhere or lease.address in preferred):
                self._held.remove(lease)
                return lease
        if affinity:  # Serve's router chooses the session's replica
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
            for address in preferred:  # so that the next try goes to another replica
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
        """Keep the lease of an ended session for a later one; False if it shall be released."""
        old = asyncio.get_running_loop().time() >= lease.until
        if not self.hold_s or old or len(self._held) >= MOST_HELD:
            return False
        self._held.append(lease)
        return True

    def forget(self, address: str) -> None:
        """Prefer the replica at ``address`` no more, and keep no lease on it."""
        if self.prefixes is not None:
            self.prefixes.forget(address)
        for lease in [lease for lease in self._held if lease.address == address]:
            self._drop(lease)

    def close(self) -> None:
        """Release all unused leases, and keep none from now on."""
        self.hold_s = 0.0
        for lease in list(self._held):
            self._drop(lease)

    def _drop(self, lease: HeldLease) -> None:
        """Release a lease, unless a session uses it and so will release it."""
        if lease in self._held:
            self._held.remove(lease)
            lease.release()


def _withdraw(task: "asyncio.Task[HeldLease]") -> None:
    task.add_done_callback(lambda task: None if task.cancelled() or task.exception() else task.result().release())
    task.cancel()


def _cancel(call: Lease) -> None:
    with contextlib.suppress(Exception):  # the lease of a dead replica has ended anyway
        call.cancel()


# the replica's side


@dataclass(slots=True, eq=False)
class GivenLease:
    """A lease on this replica, used by one session at a time."""

    session: str = ""  # the open session
    idle_since: float = field(default_factory=lambda: time.monotonic())
    over: asyncio.Event = field(default_factory=asyncio.Event)

    async def ended(self) -> None:
        """Wait until the lease has ended, or had no session for `OPEN_TIMEOUT_S`, since Serve does not report dead callers."""
        while (left_s := OPEN_TIMEOUT_S - (0.0 if self.session else time.monotonic() - self.idle_since)) > 0:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self.over.wait(), left_s)
                return

    def end(self, *, keep: bool) -> None:
        """End its session, and also the lease unless the caller keeps it for another session."""
        self.session, self.idle_since = "", time.monotonic()
        if not keep:
            self.over.set()
