"""The lower end of links: a replica's gRPC server for the tiers above, and the leases by which their sessions hold it."""

import asyncio
import contextlib
import hmac
import logging
import secrets
import time
from collections.abc import AsyncIterator, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any

import grpc

from cascade.chain.tier import Tier
from cascade.errors import Unavailable
from cascade.messages import Close, Failed, Link, Message, Open
from cascade.settings.config import LinkTLS
from cascade.v1 import link_pb2 as pb
from cascade.v1 import link_pb2_grpc
from deployments.links.codec import decode, encode
from deployments.links.tls import server_credentials
from deployments.tracing.export import Tracing
from deployments.tracing.sessions import ServedSessions

log = logging.getLogger(__name__)

OPEN_TIMEOUT_S = 10.0  # a lease by which no session is open ends after that
WATCH_S = 0.5  # between two looks whether the tier hangs
REFUSAL_S = 1.0  # before a hanging tier refuses a lease: Serve prefers replicas with little to do, and it has nothing
MAX_MESSAGE_BYTES = 64 * 2**20
CHANNEL_OPTIONS = [
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    # a host that vanishes is noticed within ten seconds; a process that dies closes its connection at once
    ("grpc.keepalive_time_ms", 5000),
    ("grpc.keepalive_timeout_ms", 5000),
    ("grpc.http2.ping_timeout_ms", 5000),  # the one that counts in gRPC 1.85: 60 seconds unless set
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.http2.min_ping_interval_without_data_ms", 2000),
    ("grpc.min_reconnect_backoff_ms", 3000),  # also how long a connection may take to come about
    ("grpc.enable_http_proxy", 0),  # whatever http_proxy says: replicas reach each other
]


class Mailbox(Link):
    """Messages on their way out: any thread sends, one coroutine takes all that are there and writes them as one batch."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._messages: list[Message] = []
        self._filled = asyncio.Event()

    def send(self, messages: Sequence[Message]) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: the process ends
            self._loop.call_soon_threadsafe(self.put, messages)

    def put(self, messages: Sequence[Message]) -> None:
        """`send` from the loop's own thread."""
        self._messages += messages
        self._filled.set()

    async def take(self) -> list[Message]:
        """Everything that was sent since the last call, at least one message."""
        await self._filled.wait()
        self._filled.clear()
        messages, self._messages = self._messages, []
        return messages


@dataclass(slots=True)
class _Held:
    """What is known of a lease."""

    num: int = 0  # times it is held
    session: str = ""  # that is open
    since: float = 0.0  # when the last one ended
    over: asyncio.Event = field(default_factory=asyncio.Event)


class Leases:
    """The leases by which callers hold this replica, each for one session at a time.

    A caller that had to wait has asked for the same lease several times, and lets go of all but one.
    """

    def __init__(self) -> None:
        self._held: dict[str, _Held] = {}
        self._of: dict[str, _Held] = {}  # by session

    def __len__(self) -> int:
        return len(self._held)

    def add(self, lease: str) -> None:
        """A caller holds this replica."""
        held = self._held.setdefault(lease, _Held(since=time.monotonic()))
        held.num += 1

    async def ended(self, lease: str) -> None:
        """Return when the lease is over, or no session has been opened by it for `OPEN_TIMEOUT_S`."""
        held = self._held[lease]
        while held.session or time.monotonic() < held.since + OPEN_TIMEOUT_S:
            idle_s = 0.0 if held.session else time.monotonic() - held.since
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(held.over.wait(), OPEN_TIMEOUT_S - idle_s)
                return

    def remove(self, lease: str) -> str:
        """The caller lets go of it once, or it is over; the session that loses its last hold by that, if there is one."""
        held = self._held[lease]
        held.num -= 1
        if held.num:
            return ""
        del self._held[lease]
        self._of.pop(held.session, None)
        return held.session

    def open(self, session: str, lease: str) -> bool:
        """The session begins; False if nobody holds the lease, or if there is one already."""
        held = self._held.get(lease)
        if held is None or held.session or held.over.is_set() or session in self._of:
            return False
        held.session, self._of[session] = session, held
        return True

    def end(self, session: str, *, keep: bool = False) -> None:
        """The session is over, and its lease with it, unless that is kept for another one."""
        held = self._of.pop(session, None)
        if held is None:
            return
        if keep:
            held.session, held.since = "", time.monotonic()
        else:
            held.over.set()

    def end_unopened(self) -> None:
        """No session will begin here any more."""
        for held in self._held.values():
            if not held.session:
                held.over.set()


class LinkServer(link_pb2_grpc.LinkServicer):
    """Takes links from the tiers above and hands their messages to ``tier``; takes TLS alone if ``tls`` is given."""

    def __init__(self, tier: Tier, tls: LinkTLS | None = None, tracing: Tracing | None = None) -> None:
        self._tier = tier
        self._served = ServedSessions(tracing, tier.name)
        self._tls = tls
        self._server: grpc.aio.Server | None = None
        self._links: dict[Mailbox, set[str]] = {}  # their sessions
        self._leaving = False
        self.leases = Leases()
        self.address = ""
        self.secret = secrets.token_urlsafe(32)  # told with a lease, which only members of the Ray cluster can take

    async def start(self, host: str) -> None:
        """Listen on any free port of ``host``, the address under which other nodes reach this one."""
        self._server = grpc.aio.server(options=CHANNEL_OPTIONS)
        link_pb2_grpc.add_LinkServicer_to_server(self, self._server)
        host = f"[{host}]" if ":" in host else host
        if self._tls is None:
            port = self._server.add_insecure_port(f"{host}:0")
        else:
            port = self._server.add_secure_port(f"{host}:0", server_credentials(self._tls))
        await self._server.start()
        self.address = f"{host}:{port}"

    def leave(self) -> None:
        """Hand all sessions on: whoever opened them hears that they failed here, and goes on at another replica.

        From now on no lease is given.
        """
        self._leaving = True
        for mailbox, sessions in self._links.items():
            mailbox.put([Failed(session, "the replica is being replaced", self._tier.name) for session in sessions])
        self.leases.end_unopened()

    async def stop(self, grace_s: float = 0.0) -> None:
        """Break all links."""
        if self._server is not None:
            await self._server.stop(grace_s)

    async def lease(self, lease: str) -> AsyncIterator[str]:
        """Yield the ticket for the link, address and secret, then stay until the lease of that name is over.

        A caller that drops the lease closes its session. A replica that hangs, or leaves, gives none.
        """
        if self._tier.hangs or self._leaving:
            await asyncio.sleep(REFUSAL_S)
            raise Unavailable(f"This replica of {self._tier.name} {'hangs' if self._tier.hangs else 'leaves'}")
        self.leases.add(lease)
        try:
            yield f"{self.address} {self.secret}"
            await self.leases.ended(lease)
        finally:
            if session := self.leases.remove(lease):
                self._tier.post([Close(session)])

    async def Connect(
        self, request_iterator: AsyncIterator[pb.Batch], context: grpc.aio.ServicerContext[pb.Batch, pb.Batch]
    ) -> None:
        """Carry messages both ways on one stream. Callers that do not know the secret are refused."""
        said = dict(context.invocation_metadata() or ()).get("authorization", "")
        if not (isinstance(said, str) and hmac.compare_digest(said.encode(), authorization(self.secret).encode())):
            log.warning("%s was refused: it does not know the secret of this replica", context.peer())
            await context.abort(grpc.StatusCode.UNAUTHENTICATED, "the link's secret is missing or wrong: take a lease")
        mailbox = Mailbox(asyncio.get_running_loop())
        sessions = self._links[mailbox] = set[str]()
        try:
            ends = self._read(request_iterator, mailbox, sessions), self._write(context, mailbox, sessions), self._hang()
            await race(*ends)
        except ValueError as error:
            log.warning("A link was broken off: %s", error)
        finally:
            del self._links[mailbox]
            self._tier.drop(mailbox)
            for session in list(sessions):
                self._end(session, sessions, "the link broke")

    async def _read(self, batches: AsyncIterator[pb.Batch], mailbox: Mailbox, sessions: set[str]) -> None:
        async for batch in batches:
            known = [message for message in decode(batch) if self._admit(message, mailbox, sessions)]
            if known:
                self._tier.post([self._served.began(one) if isinstance(one, Open) else one for one in known], mailbox)

    async def _write(self, context: grpc.aio.ServicerContext[pb.Batch, pb.Batch], mailbox: Mailbox, sessions: set[str]) -> None:
        while True:
            messages = await mailbox.take()
            self._served.said(messages)
            for message in messages:
                if isinstance(message, Failed):
                    self._end(message.session, sessions, message.reason)
            await context.write(encode(messages))

    async def _hang(self) -> None:
        """Return when the tier hangs: whoever is above does better with another replica."""
        while not self._tier.hangs:
            await asyncio.sleep(WATCH_S)
        log.error("A pass of tier %s does not end: its sessions go on elsewhere", self._tier.name)

    def _admit(self, message: Message, mailbox: Mailbox, sessions: set[str]) -> bool:
        """Whether the message may reach the tier: its session must have a lease and have been opened over this link."""
        session = message.session
        if isinstance(message, Open):
            if not self.leases.open(session, message.lease or session):
                mailbox.put([Failed(session, f"nobody holds a lease for session {session}", self._tier.name)])
                return False
            sessions.add(session)
            return True
        known = session in sessions
        if isinstance(message, Close):
            self._end(session, sessions, keep=message.keep)
        return known

    def _end(self, session: str, sessions: set[str], reason: str = "", *, keep: bool = False) -> None:
        if session in sessions:  # else it is a session of another link
            self._served.ended(session, reason)
            sessions.remove(session)
            self.leases.end(session, keep=keep and not self._leaving)


def authorization(secret: str) -> str:
    """The metadata by which the upper end of a link is let in."""
    return f"Bearer {secret}"


async def race(*coroutines: Coroutine[Any, Any, None]) -> None:
    """Run all until the first one ends, then stop the others; raises what it raised."""
    tasks = [asyncio.create_task(coroutine) for coroutine in coroutines]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    for task in done:
        task.result()
