"""The lower end of links: a replica's gRPC server for the tiers above, and the leases by which their sessions hold it."""

import asyncio
import contextlib
import hmac
import logging
import random
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable, Sequence
from functools import partial
from typing import Any

import grpc

from cascade.errors import ConfigError, Unavailable
from cascade.messages import Close, Failed, Link, Message, Open
from cascade.settings.config import LinkTLS
from cascade.tier.tier import Tier
from cascade.v1 import link_pb2 as pb
from cascade.v1 import link_pb2_grpc
from deployments.links.codec import decode, encode
from deployments.links.leases import GivenLeases
from deployments.links.tls import server_credentials
from deployments.ops.tracing import UNTRACED, SessionSpans, Tracing

log = logging.getLogger(__name__)

FETCH_S = 60.0  # that an adapter has to come from its bucket
WATCH_S = 0.5  # between two looks whether the tier hangs
CHECKS_MISSED = 2.0  # periods without a health check, after which a replica asks whether Serve stops it
CONFIRMATIONS = 2  # answers in a row that say so
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


class LinkServer(link_pb2_grpc.LinkServicer):
    """Takes links from the tiers above and hands their messages to ``tier``; takes TLS alone if ``tls`` is given."""

    def __init__(
        self,
        tier: Tier,
        tls: LinkTLS | None = None,
        tracing: Tracing = UNTRACED,
        ports: tuple[int, int] | None = None,
        fetch: Callable[[str], object] | None = None,
    ) -> None:
        """``fetch``, called in a thread, brings an adapter to this machine before the first session that names it."""
        self._tier = tier
        self._fetch = fetch
        self._spans = SessionSpans(tracing)
        self._tls = tls
        self._ports = ports
        self._server: grpc.aio.Server | None = None
        self._links: dict[Mailbox, set[str]] = {}  # their sessions
        self._leaving = False
        self.leases = GivenLeases()
        self.address = ""
        self.secret = secrets.token_urlsafe(32)  # told with a lease, which only members of the Ray cluster can take

    async def start(self, host: str) -> None:
        """Listen on a free port of ``host``, the address under which other nodes reach this one; one of ``ports`` if given.

        Raises `ConfigError` if none of these is free.
        """
        # without it two replicas of a machine would listen at one port, and each get links of the other
        self._server = grpc.aio.server(options=[*CHANNEL_OPTIONS, ("grpc.so_reuseport", 0)])
        link_pb2_grpc.add_LinkServicer_to_server(self, self._server)
        host = f"[{host}]" if ":" in host else host
        port = next(filter(None, map(partial(self._listen, host), self._candidates())), None)
        if port is None:
            raise ConfigError(f"link_ports are {self._ports}, and none of them is free at {host}: name more, or others")
        await self._server.start()
        self.address = f"{host}:{port}"

    def _candidates(self) -> Iterable[int]:
        """Ports to try; 0 is any free one. At random, so that replicas that start together seldom try the same."""
        if self._ports is None:
            return (0,)
        first, last = self._ports
        return random.sample(range(first, last + 1), last + 1 - first)

    def _listen(self, host: str, port: int) -> int | None:
        """The port at which it listens; ``None`` if it is taken."""
        assert self._server is not None
        address = f"{host}:{port}"
        try:
            if self._tls is None:
                return self._server.add_insecure_port(address)
            return self._server.add_secure_port(address, server_credentials(self._tls))
        except RuntimeError:
            if port:
                return None
            raise

    def leave(self) -> None:
        """Hand over all sessions: they fail here, so that their callers go on at other replicas. Give no lease any more."""
        self._leaving = True
        for mailbox, sessions in self._links.items():
            mailbox.put([Failed(session, "the replica is being replaced", self._tier.name) for session in sessions])
        self.leases.end_unopened()

    async def stop(self, grace_s: float = 0.0) -> None:
        if self._server is not None:
            await self._server.stop(grace_s)

    async def lease(self, name: str) -> AsyncIterator[str]:
        """Yield ``address secret`` for the link, then stay until the lease of that name is over.

        A caller that cancels the lease closes its session. Raises `Unavailable` if the replica hangs or leaves.
        """
        if self._tier.hangs or self._leaving:
            await asyncio.sleep(REFUSAL_S)
            raise Unavailable(f"This replica of {self._tier.name} {'hangs' if self._tier.hangs else 'leaves'}")
        lease = self.leases.add(name)
        try:
            yield f"{self.address} {self.secret}"
            await lease.ended()
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
            if self._fetch is not None:
                for adapter in {one.params.adapter for one in known if isinstance(one, Open)} - {""}:
                    with contextlib.suppress(TimeoutError):  # the pass tells that it is not there
                        await asyncio.wait_for(asyncio.to_thread(self._fetch, adapter), FETCH_S)
            if known:
                self._tier.post([self._spans.served(one) if isinstance(one, Open) else one for one in known], mailbox)

    async def _write(self, context: grpc.aio.ServicerContext[pb.Batch, pb.Batch], mailbox: Mailbox, sessions: set[str]) -> None:
        while True:
            messages = await mailbox.take()
            self._spans.proposed(messages)
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
            self._spans.end(session, reason)
            sessions.remove(session)
            self.leases.end(session, keep=keep and not self._leaving)


class Handover:
    """Calls ``leave`` once Serve routes to others of the ``running`` replicas, and no longer to ``me``.

    Serve (2.60) does not tell a replica that it stops it: it waits until its requests, which are leases here, have ended, and
    kills it after ``graceful_shutdown_timeout_s``. But its health is checked no more, every ``period_s`` before: that is when
    the others are asked for. While there are none, sessions have nowhere to go, and stay.
    """

    def __init__(
        self, me: str, running: Callable[[], Awaitable[list[str]]], leave: Callable[[], object], period_s: float
    ) -> None:
        self._me = me
        self._running = running
        self._leave = leave
        self._gap_s = period_s  # the longest lately
        self._checked = time.monotonic()

    def check(self) -> None:
        """Serve checks this replica's health."""
        now = time.monotonic()
        self._gap_s, self._checked = max(now - self._checked, 0.9 * self._gap_s), now

    async def watch(self) -> None:
        """Return when the sessions have been handed over."""
        found = 0
        while found < CONFIRMATIONS:
            await asyncio.sleep(self._gap_s / 4)
            missed = time.monotonic() - self._checked > CHECKS_MISSED * self._gap_s
            running = await self._running() if missed else []
            found = found + 1 if running and self._me not in running else 0
        log.info("This replica is being stopped: its sessions go on at others")
        self._leave()


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
