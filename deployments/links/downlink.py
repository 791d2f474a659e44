"""The upper end of links: an Open takes a lease on a replica of the tier that it names; later messages follow it there."""

import asyncio
import contextlib
import contextvars
import logging
from collections import defaultdict
from collections.abc import AsyncIterable, Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import grpc

from cascade.messages import Close, Failed, Link, Message, Open
from cascade.settings.config import LinkTLS
from cascade.v1 import link_pb2 as pb
from cascade.v1 import link_pb2_grpc
from deployments.links.codec import decode, encode
from deployments.links.leases import HeldLease, LeasePool
from deployments.links.tls import channel
from deployments.links.uplink import CHANNEL_OPTIONS, Mailbox, authorization, race
from deployments.ops.metrics.series import Reading
from deployments.ops.tracing import UNTRACED, SessionSpans, Tracing

log = logging.getLogger(__name__)


@dataclass(slots=True)
class Counts:
    """Totals of the sessions opened at one tier."""

    leases: int = 0  # that sessions got, reused ones included
    wait_s: float = 0.0  # for leases
    failed: int = 0  # sessions that were lost


@dataclass(slots=True)
class Route:
    """Where the messages of one session go."""

    tier: str
    waiting: list[Message]  # until there is a stream
    stream: "Stream | None" = None
    opening: "asyncio.Task[None] | None" = None
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
    """Joins this process to replicas of the tiers below, which ``leases`` are of. ``deliver`` gets what they say, in the loop's
    thread.

    Made in a running event loop; `send` may be called from any thread.
    """

    def __init__(
        self,
        leases: LeasePool,
        deliver: Callable[[Sequence[Message]], object],
        *,
        tls: LinkTLS | None = None,
        tracing: Tracing = UNTRACED,
    ) -> None:
        self.leases = leases
        self._spans = SessionSpans(tracing)
        self._deliver = deliver
        self._tls = tls
        self._loop = asyncio.get_running_loop()
        self._counts: dict[str, Counts] = defaultdict(Counts, {tier: Counts() for tier in leases.lessors})
        self._routes: dict[str, Route] = {}
        self._streams: dict[str, Stream] = {}

    @property
    def num_sessions(self) -> int:
        return len(self._routes)

    def readings(self) -> Iterator[Reading]:
        """What became of its sessions so far, and how many there are."""
        yield Reading("sessions_below", (), self.num_sessions)
        for tier, counts in self._counts.items():
            yield Reading("leases_taken", (tier,), counts.leases)
            yield Reading("lease_wait_seconds", (tier,), counts.wait_s)
            yield Reading("failovers", (tier,), counts.failed)

    def send(self, messages: Sequence[Message]) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: the process ends
            self._loop.call_soon_threadsafe(self.put, messages)

    def put(self, messages: Sequence[Message]) -> None:
        """`send` from the loop's own thread."""
        for message in messages:
            if isinstance(message, Open):
                self._open(self._spans.asked(message))
            elif (route := self._routes.get(message.session)) is None:
                continue
            elif isinstance(message, Close):
                self._close(route, message)
            elif route.stream is None:
                route.waiting.append(message)
            else:
                route.stream.mailbox.put([message])

    async def close(self) -> None:
        await self.leases.close()
        tasks = [route.opening for route in self._routes.values() if route.opening is not None]
        for session in list(self._routes):
            self._leave(session)
        tasks += [stream.task for stream in self._streams.values() if stream.task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    # sessions

    def _open(self, opening: Open) -> None:
        route = self._routes[opening.session] = Route(opening.tier, [opening])
        lease = self.leases.reuse(opening)
        if lease is not None:
            self._join(opening, route, lease)
        else:  # an empty context: see `LeasePool`
            route.opening = self._loop.create_task(self._take_lease(opening, route), context=contextvars.Context())

    def _close(self, route: Route, message: Close) -> None:
        """End a session, and keep its lease for the next one if it has been of use."""
        kept = route.answered and route.lease is not None and self.leases.keep(route.lease)
        if route.stream is not None:
            route.stream.mailbox.put([replace(message, keep=kept)])
        self._leave(message.session, keep=kept)

    async def _take_lease(self, opening: Open, route: Route) -> None:
        """Join the session to a replica; cancelled when the session is closed before."""
        since = self._loop.time()
        try:
            lease = await self.leases.take(opening)
        except Exception as error:  # whatever Ray raises: the tier cannot be had
            reason = f"no replica of {opening.tier} could be leased ({type(error).__name__})"
            log.info("Session %s: %s: %s", opening.session, reason, error)
            self._fail(opening.session, reason)
            return
        route.opening = None
        self._counts[route.tier].wait_s += self._loop.time() - since
        self._join(opening, route, lease)

    def _join(self, opening: Open, route: Route, lease: HeldLease) -> None:
        """Send what waits for a leased replica, and what follows."""
        session, route.lease = opening.session, lease
        self._counts[route.tier].leases += 1
        if self.leases.prefixes is not None:
            self.leases.prefixes.sent(opening, lease.address)
        route.stream = self._stream(lease.ticket)
        self._spans.event(session, "leased", server_address=route.stream.address)
        route.stream.sessions.add(session)
        route.waiting[0] = replace(opening, lease=lease.name)  # the opening's own is that of the session above
        route.stream.mailbox.put(route.waiting)
        route.waiting = []

    def _leave(self, session: str, *, keep: bool = False) -> None:
        """Forget a session and release its lease, unless that is kept."""
        self._spans.end(session)
        route = self._routes.pop(session, None)
        if route is None:
            return
        if route.opening is not None:
            route.opening.cancel()
        if route.stream is not None:
            route.stream.sessions.discard(session)
        if route.lease is not None and not keep:
            route.lease.release()

    def _fail(self, session: str, reason: str) -> None:
        route = self._routes.get(session)
        if route is not None:
            route.opening = None
            self._spans.end(session, reason)
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
            self.leases.forget(stream.address)
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
                self._spans.end(message.session, message.reason)
                if (route := self._routes.get(message.session)) is not None and not message.fault:
                    self._counts[route.tier].failed += 1
                self._leave(message.session)
            elif (route := self._routes.get(message.session)) is not None and not route.answered:
                route.answered = True
                self._spans.event(message.session, "answered")
        if known:
            self._deliver(known)


async def _write(call: Any, mailbox: Mailbox) -> None:
    while True:
        await call.write(encode(await mailbox.take()))
