"""The upper end of links: an Open takes a lease on a replica of the tier that it names; later messages follow it there."""

import asyncio
import contextlib
import contextvars
import logging
from collections import defaultdict
from collections.abc import AsyncIterable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import grpc

from cascade.messages import Close, Failed, Link, Message, Open
from cascade.settings.config import LinkTLS
from cascade.v1 import link_pb2 as pb
from cascade.v1 import link_pb2_grpc
from deployments.links.codec import decode, encode
from deployments.links.counts import LinkCounts, readings
from deployments.links.held_lease import HeldLease, HeldLeases, Lease, Lessor, let_go
from deployments.links.prefixes import Outcome, Prefixes
from deployments.links.tls import channel
from deployments.links.uplink import CHANNEL_OPTIONS, Mailbox, authorization, race
from deployments.metrics.series import Reading
from deployments.tracing.export import Tracing
from deployments.tracing.sessions import AskedSessions

log = logging.getLogger(__name__)

PATIENCE_S = 3.0  # with a lease that is not given, before another one is asked for
MOST_ASKED = 2  # leases at once, for a session that has none: Serve's autoscaler counts both


@dataclass(slots=True)
class Route:
    """Where the messages of one session go."""

    tier: str
    waiting: list[Message]  # until there is a stream
    stream: "Stream | None" = None
    opening: "asyncio.Task[None] | None" = None
    asked: list[Lease] = field(default_factory=list)  # while none of them has been given
    lease: HeldLease | None = None
    answered: bool = False


@dataclass(slots=True)
class Stream:
    """The one stream to a replica, for all sessions that go there."""

    address: str
    secret: str
    mailbox: Mailbox
    sessions: set[str] = field(default_factory=set)
    task: "asyncio.Task[None] | None" = None


class Downlink(Link):
    """Joins this process to replicas of the tiers below. ``deliver`` gets what they say, in the loop's thread.

    Made in a running event loop; `send` may be called from any thread. Sessions use a tier's leases one after another
    for ``hold_s``; with ``ahead`` one is held for the next session before any has come back. With ``prefixes``, sessions go
    where the beginning of their text is known, and ``routed`` is told whether they did.
    """

    def __init__(
        self,
        lessors: Mapping[str, Lessor],
        deliver: Callable[[Sequence[Message]], object],
        *,
        lease_timeout_s: float = 5.0,
        hold_s: Mapping[str, float] | None = None,
        ahead: bool = False,
        tls: LinkTLS | None = None,
        prefixes: Prefixes | None = None,
        routed: Callable[[Outcome], object] = lambda outcome: None,
        tracing: Tracing | None = None,
    ) -> None:
        self._prefixes = prefixes
        self._routed = routed
        self._asked = AskedSessions(tracing)
        self._lessors = lessors
        self._deliver = deliver
        self._lease_timeout_s = lease_timeout_s
        self._tls = tls
        self._loop = asyncio.get_running_loop()
        self._counts: dict[str, LinkCounts] = defaultdict(LinkCounts, {tier: LinkCounts() for tier in lessors})
        self._routes: dict[str, Route] = {}
        self._streams: dict[str, Stream] = {}
        self._held = {tier: HeldLeases(lessor, (hold_s or {}).get(tier, 0.0)) for tier, lessor in lessors.items()}
        self._ahead = ahead

    def hold(self, tier: str, seconds: float) -> None:
        """Hold leases on a tier for so long from now on."""
        self._held[tier].hold_s = seconds

    @property
    def num_sessions(self) -> int:
        return len(self._routes)

    def readings(self) -> Iterator[Reading]:
        """What became of its sessions so far, and how many there are."""
        return readings(self._counts, self.num_sessions)

    def send(self, messages: Sequence[Message]) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: the process ends
            self._loop.call_soon_threadsafe(self.put, messages)

    def put(self, messages: Sequence[Message]) -> None:
        """`send` from the loop's own thread."""
        for message in messages:
            if isinstance(message, Open):
                self._open(self._asked.opened(message))
            elif (route := self._routes.get(message.session)) is None:
                continue
            elif isinstance(message, Close):
                self._close(route, message)
            elif route.stream is None:
                route.waiting.append(message)
            else:
                route.stream.mailbox.put([message])

    async def close(self) -> None:
        """Break all links and let go of all leases."""
        for leases in self._held.values():
            await leases.close()
        for session in list(self._routes):
            self._leave(session)
        tasks = [stream.task for stream in self._streams.values() if stream.task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    # sessions

    def _open(self, opening: Open) -> None:
        route = self._routes[opening.session] = Route(opening.tier, [opening])
        leases, preferred = self._held.get(opening.tier), self._preferred(opening)
        held = None if leases is None else leases.take(preferred)
        if held is not None:
            self._join(opening, route, held)
            return
        # an empty context: see `HeldLeases`
        work = self._take_lease(opening, route, preferred)
        route.opening = self._loop.create_task(work, context=contextvars.Context())

    def _close(self, route: Route, message: Close) -> None:
        """End a session, and keep its lease for another one if that is wanted."""
        lease, kept = route.lease, False
        if route.stream is not None:
            kept = lease is not None and route.answered and self._held[route.tier].keep(lease)
            route.stream.mailbox.put([replace(message, keep=kept)])
        self._leave(message.session, keep=kept)

    async def _take_lease(self, opening: Open, route: Route, preferred: tuple[str, ...]) -> None:
        session, since = opening.session, self._loop.time()
        try:
            async with asyncio.timeout(self._lease_timeout_s):
                lease = await self._first_lease(opening, route, preferred)
        except Exception as error:  # whatever Ray raises: the tier cannot be had
            if self._routes.get(session) is not route:
                return  # the session was closed meanwhile, and its lease cancelled
            for address in preferred:  # the next try is to meet another one
                self._forget(address)
            reason = f"no replica of {opening.tier} could be leased ({type(error).__name__})"
            log.info("Session %s: %s: %s", session, reason, error)
            self._fail(session, reason)
            return
        if self._routes.get(session) is not route:  # closed meanwhile
            return
        route.opening = None
        self._counts[route.tier].lease_wait_s += self._loop.time() - since
        self._join(opening, route, lease)

    async def _first_lease(self, opening: Open, route: Route, preferred: tuple[str, ...]) -> HeldLease:
        """The lease asked for first, which keeps its place in Serve's queue, and of others asked for while none is given.

        Serve may choose a replica that is out of reach and not know it; then another lease is likely to be one on another
        replica. The route is left with the lease that was given.
        """
        lessor = self._lessors[opening.tier]
        asked: dict[asyncio.Task[str], Lease] = {}
        try:
            while not (given := [task for task in asked if task.done()]):
                if len(asked) == MOST_ASKED:
                    task, lease = asked.popitem()
                    _withdraw(task, lease)
                lease = lessor(opening.session, () if asked else preferred)
                asked[asyncio.create_task(_ticket(lease))] = lease
                route.asked = list(asked.values())
                await asyncio.wait(asked, timeout=PATIENCE_S, return_when=asyncio.FIRST_COMPLETED)
            lease = asked.pop(given[0])
            route.asked = [lease]
            return self._held[opening.tier].given(opening.session, lease, given[0].result())
        finally:
            for task, lease in asked.items():
                _withdraw(task, lease)

    def _preferred(self, opening: Open) -> tuple[str, ...]:
        """Addresses of the replicas that know how the text begins."""
        return () if self._prefixes is None else self._prefixes.find(opening)

    def _forget(self, address: str) -> None:
        """The replica there is preferred for nothing that it has read."""
        if self._prefixes is not None:
            self._prefixes.forget(address)

    def _join(self, opening: Open, route: Route, lease: HeldLease) -> None:
        """Send what waits for a leased replica, and what follows."""
        session, route.lease, route.asked = opening.session, lease, []
        self._counts[route.tier].leases += 1
        if self._prefixes is not None:
            self._routed(self._prefixes.sent(opening, lease.address))
        route.stream = self._stream(lease.ticket)
        self._asked.leased(session, route.stream.address)
        route.stream.sessions.add(session)
        route.waiting[0] = replace(opening, lease=lease.name)  # the opening's own is that of the session above
        route.stream.mailbox.put(route.waiting)
        route.waiting = []

    def _leave(self, session: str, *, keep: bool = False) -> None:
        """Forget a session and let go of its lease, unless that is kept."""
        self._asked.ended(session)
        route = self._routes.pop(session, None)
        if route is None:
            return
        if route.opening is not None:
            route.opening.cancel()
        if route.stream is not None:
            route.stream.sessions.discard(session)
        for lease in route.asked:
            let_go(lease)
        if route.lease is not None and not keep:
            route.lease.let_go()

    def _fail(self, session: str, reason: str) -> None:
        route = self._routes.get(session)
        if route is not None:
            route.opening = None
            self._asked.failed(session, reason)
            self._leave(session)
            self._counts[route.tier].failed += 1
            self._deliver([Failed(session, reason, route.tier)])

    # streams

    def _stream(self, ticket: str) -> Stream:
        address, _, secret = ticket.partition(" ")
        if address not in self._streams:
            stream = self._streams[address] = Stream(address, secret, Mailbox(self._loop))
            stream.task = self._loop.create_task(self._run(stream))
        return self._streams[address]

    async def _run(self, stream: Stream) -> None:
        """Carry messages both ways until the link breaks; then its sessions have failed."""
        reason = "the replica closed it"
        joined: grpc.aio.Channel | None = None
        try:
            joined = channel(stream.address, CHANNEL_OPTIONS, self._tls)
            call = link_pb2_grpc.LinkStub(joined).Connect(metadata=(("authorization", authorization(stream.secret)),))
            await race(self._read(call), _write(call, stream.mailbox))
        except grpc.aio.AioRpcError as error:
            reason = error.details() or str(error.code())
        except Exception as error:  # of any kind: the sessions must go on without this replica
            log.exception("The link to %s broke", stream.address)
            reason = f"{type(error).__name__}: {error}"
        finally:
            self._streams.pop(stream.address, None)
            self._forget(stream.address)
            for leases in self._held.values():
                leases.distrust(stream.address)
            for session in list(stream.sessions):
                self._fail(session, f"the link to {stream.address} broke ({reason})")
            if joined is not None:
                await joined.close(None)

    async def _read(self, call: AsyncIterable[pb.Batch]) -> None:
        async for batch in call:
            self._hear(decode(batch))

    def _hear(self, messages: Sequence[Message]) -> None:
        known = [message for message in messages if message.session in self._routes]
        for message in known:
            if isinstance(message, Failed):
                self._asked.failed(message.session, message.reason)
                if (route := self._routes.get(message.session)) is not None and not message.fault:
                    self._counts[route.tier].failed += 1
                self._leave(message.session)
            else:
                self._answered(message.session)
        if known:
            self._deliver(known)

    def _answered(self, session: str) -> None:
        """Take a lease for the next session once this one has its first answer: now that delays nobody."""
        route = self._routes.get(session)
        if route is not None and not route.answered:
            route.answered = True
            self._asked.answered(session)
            if self._ahead:
                self._held[route.tier].renew()


async def _ticket(lease: Lease) -> str:
    return await anext(aiter(lease))


def _withdraw(task: "asyncio.Task[str]", lease: Lease) -> None:
    task.add_done_callback(lambda task: task.cancelled() or task.exception())  # whatever it says: nobody waits for it
    task.cancel()
    let_go(lease)


async def _write(call: Any, mailbox: Mailbox) -> None:
    while True:
        await call.write(encode(await mailbox.take()))
