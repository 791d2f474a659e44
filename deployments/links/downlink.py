"""The upper end of links: an Open takes a lease on a replica of its tier; later messages of its session follow it there."""

import asyncio
import contextlib
import contextvars
import logging
from collections.abc import AsyncIterable, Callable, Coroutine, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import grpc

from cascade.client.rpc import LINK, stub_of
from cascade.messages import Close, Failed, Link, Message, Open, Routing
from cascade.settings.config import LinkTLS
from cascade.v1 import link_pb2 as pb
from deployments.links.codec import decode, encode
from deployments.links.leases import HeldLease, LeasePool
from deployments.links.tls import channel
from deployments.links.uplink import CHANNEL_OPTIONS, Mailbox, authorization, race
from deployments.ops.metrics import Reading
from deployments.ops.tracing import UNTRACED, SessionSpans, Trace, Tracing

log = logging.getLogger(__name__)

TOTALS = ("leases_taken", "lease_wait_seconds", "failovers")  # totals by tier


@dataclass(slots=True)
class Route:
    """Where the messages of one session go."""

    tier: str
    waiting: list[Message] = field(default_factory=list)  # messages that wait for the lease
    opening: "asyncio.Task[None] | None" = None  # the task that takes the lease
    lease: HeldLease | None = None
    mailbox: Mailbox | None = None  # mailbox of the leased replica
    answered: bool = False


class Downlink(Link):
    """Connects this process to replicas of the tiers below, with one stream to each for all of its sessions.

    Leases come from ``leases``; ``deliver`` gets messages of replicas, in the event loop's thread. Made in a running event
    loop; `send` may be called from any thread. After each new lease, ``locate`` is called with the tier, and whether one of its
    leased replicas runs on ``host``.
    """

    def __init__(
        self,
        leases: LeasePool,
        deliver: Callable[[Sequence[Message]], object],
        *,
        tls: LinkTLS | None = None,
        tracing: Tracing = UNTRACED,
        host: str = "",
        locate: Callable[[str, bool], object] = lambda tier, near: None,
    ) -> None:
        self.leases = leases
        self._host = host
        self._locate = locate
        self._spans = SessionSpans(tracing)
        self._deliver = deliver
        self._tls = tls
        self._loop = asyncio.get_running_loop()
        self._totals = {(name, tier): 0.0 for name in TOTALS for tier in leases.lessors}
        self._routes: dict[str, Route] = {}
        self._mailboxes: dict[str, Mailbox] = {}  # mailboxes of streams, by address
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def num_sessions(self) -> int:
        return len(self._routes)

    def readings(self) -> Iterator[Reading]:
        """Totals of sessions so far, and their present number."""
        yield Reading("sessions_below", (), self.num_sessions)
        for (name, tier), total in self._totals.items():
            yield Reading(name, (tier,), total)

    def send(self, messages: Sequence[Message]) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed, because the process ends
            self._loop.call_soon_threadsafe(self.put, messages)

    def put(self, messages: Sequence[Message]) -> None:
        """`send`, from the loop's own thread."""
        for message in messages:
            if isinstance(message, Open):
                opened = self._routes[message.session] = Route(message.spec.tier)
                opened.opening = self._start(self._open(message, self._spans.opened(message), opened))
            elif (route := self._routes.get(message.session)) is None:
                continue
            elif isinstance(message, Close):
                self._close(route, message)
            elif route.mailbox is None:
                route.waiting.append(message)
            else:
                route.mailbox.put([message])

    async def close(self) -> None:
        self.leases.close()
        for session in list(self._routes):
            self._leave(session)
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    # sessions

    def _close(self, route: Route, message: Close) -> None:
        """End a session, and keep its lease for the next one if the link works."""
        kept = route.answered and route.lease is not None and self.leases.keep(route.lease)
        if route.mailbox is not None:
            route.mailbox.put([Close(message.session, kept)])
        self._leave(message.session, keep=kept)

    async def _open(self, opening: Open, trace: Trace, route: Route) -> None:
        """Open a session at a replica; cancelled if the session is closed before."""
        since = self._loop.time()
        try:
            lease = await self.leases.take(opening.spec, opening.routing.affinity)
        except (Exception, asyncio.CancelledError) as error:  # Ray may raise anything if the tier is not available
            reason = f"no replica of {route.tier} could be leased ({type(error).__name__})"
            route.opening = None
            if opening.session in self._routes:  # else it has been closed
                log.info("Session %s: %s: %s", opening.session, reason, error)
                self._fail(opening.session, reason)
            return
        route.opening = None
        self._totals["lease_wait_seconds", route.tier] += self._loop.time() - since
        route.lease = lease
        self._totals["leases_taken", route.tier] += 1
        held = [other.lease.address for other in self._routes.values() if other.lease and other.tier == route.tier]
        self._locate(route.tier, any(address.rpartition(":")[0].strip("[]") == self._host for address in held))
        if self.leases.prefixes is not None:
            self.leases.prefixes.sent(opening.spec, opening.routing.affinity, lease.address)
        self._spans.event(opening.session, "leased", server_address=lease.address)
        route.mailbox = self._stream(lease.ticket)
        sent = Open(opening.session, opening.spec, Routing(lease.name, *trace))
        route.mailbox.put([sent, *route.waiting])

    def _leave(self, session: str, reason: str = "", *, lost: bool = False, keep: bool = False) -> None:
        """Forget a session (with a ``reason`` if it failed), and release its lease unless ``keep``."""
        route = self._routes.pop(session, None)
        if route is None:
            return
        self._spans.end(session, reason)
        if lost:
            self._totals["failovers", route.tier] = self._totals.get(("failovers", route.tier), 0.0) + 1
        if route.opening is not None:
            route.opening.cancel()
        if route.lease is not None and not keep:
            route.lease.release()

    def _fail(self, session: str, reason: str) -> None:
        if (route := self._routes.get(session)) is not None:
            self._leave(session, reason, lost=True)
            self._deliver([Failed(session, reason, route.tier)])

    # streams

    def _stream(self, ticket: str) -> Mailbox:
        """The mailbox of the stream to a replica."""
        address, _, secret = ticket.partition(" ")
        if address not in self._mailboxes:
            mailbox = self._mailboxes[address] = Mailbox(self._loop)
            self._start(self._run(address, secret, mailbox))
        return self._mailboxes[address]

    def _start(self, work: Coroutine[Any, Any, None]) -> "asyncio.Task[None]":
        task = self._loop.create_task(work, context=contextvars.Context())  # an empty one: see `LeasePool`
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _run(self, address: str, secret: str, mailbox: Mailbox) -> None:
        """Carry messages both ways until the link breaks, which fails its sessions."""
        reason = "the replica closed it"
        joined: grpc.aio.Channel | None = None
        try:
            joined = channel(address, CHANNEL_OPTIONS, self._tls)
            call = stub_of(joined, LINK).Connect(metadata=(("authorization", authorization(secret)),))
            await race(self._read(call, address), _write(call, mailbox))
        except grpc.aio.AioRpcError as error:
            reason = error.details() or str(error.code())
        except Exception as error:  # the sessions must continue without this replica in any case
            log.exception("The link to %s broke", address)
            reason = f"{type(error).__name__}: {error}"
        finally:
            del self._mailboxes[address]
            self.leases.forget(address)
            for session in [session for session, route in self._routes.items() if route.mailbox is mailbox]:
                self._fail(session, f"the link to {address} broke ({reason})")
            if joined is not None:
                await joined.close(None)

    async def _read(self, call: AsyncIterable[pb.Batch], address: str) -> None:
        async for batch in call:
            self._receive(decode(batch), address)

    def _receive(self, messages: Sequence[Message], address: str) -> None:
        current = [message for message in messages if message.session in self._routes]
        if any(isinstance(message, Failed) and not message.fault for message in current):
            self.leases.forget(address)  # the next try shall meet another replica
        for message in current:
            if isinstance(message, Failed):
                self._leave(message.session, message.reason, lost=not message.fault)
            elif (route := self._routes.get(message.session)) is not None and not route.answered:
                route.answered = True
                self._spans.event(message.session, "answered")
        if current:
            self._deliver(current)


async def _write(call: Any, mailbox: Mailbox) -> None:
    while True:
        await call.write(encode(await mailbox.take()))
