"""The lower end of links: a replica's gRPC server for the tiers above, whose sessions hold leases on it."""

import asyncio
import contextlib
import hmac
import logging
import random
import secrets
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from functools import partial
from typing import Any, TypeAlias

import grpc

from cascade.client.rpc import LINK, handlers_of
from cascade.errors import ConfigError, Unavailable
from cascade.messages import Close, Failed, Link, Message, Open
from cascade.params import SamplingParams
from cascade.settings.config import LinkTLS
from cascade.tier.tier import Tier
from cascade.v1 import link_pb2 as pb
from deployments.links.codec import decode, encode
from deployments.links.leases import GivenLease
from deployments.links.tls import server_credentials
from deployments.ops.tracing import UNTRACED, SessionSpans, Tracing

log = logging.getLogger(__name__)

Sessions: TypeAlias = dict[str, GivenLease]  # the sessions opened over one link

WATCH_S = 0.5  # seconds between two checks whether the tier hangs
REFUSAL_S = 1.0  # pause before a broken tier refuses a lease: Serve prefers idle replicas, and a broken one is idle
CHANNEL_OPTIONS = [
    # a batch that is refused breaks the link for all; of callers without the secret nothing is read
    ("grpc.max_receive_message_length", -1),
    ("grpc.max_send_message_length", -1),
    # detect a vanished host within ten seconds; a process that dies closes its connections at once
    ("grpc.keepalive_time_ms", 5000),
    ("grpc.keepalive_timeout_ms", 5000),
    ("grpc.http2.ping_timeout_ms", 5000),  # the effective timeout in gRPC 1.85, 60 seconds by default
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.http2.min_ping_interval_without_data_ms", 2000),
    ("grpc.min_reconnect_backoff_ms", 3000),  # also the timeout of connecting
    ("grpc.enable_http_proxy", 0),  # ignores http_proxy: replicas reach each other directly
]


class Mailbox(Link):
    """Outgoing messages: any thread sends; one coroutine takes all messages and writes them as one batch."""

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
        """Wait for messages; returns all that were sent since the last call."""
        await self._filled.wait()
        self._filled.clear()
        messages, self._messages = self._messages, []
        return messages


class LinkServer:
    """Accepts links from the tiers above, with mutual TLS if ``tls`` is given, and hands their messages to ``tier``.

    ``prepare`` loads the grammar and the adapter of a new session, in a thread, so that other sessions do not wait.
    """

    def __init__(
        self,
        tier: Tier,
        tls: LinkTLS | None = None,
        tracing: Tracing = UNTRACED,
        ports: tuple[int, int] | None = None,
        prepare: Callable[[SamplingParams], object] | None = None,
    ) -> None:
        self._tier = tier
        self._spans = SessionSpans(tracing)
        self._tls = tls
        self._ports = ports
        self._prepare = prepare
        self._held: dict[str, list[Message]] = {}  # messages of sessions that wait for `prepare`
        self._preparing = set[asyncio.Task[None]]()
        self._server: grpc.aio.Server | None = None
        self.leases: dict[str, GivenLease] = {}  # by the unique names that callers choose
        self.address = ""
        self.secret = secrets.token_urlsafe(32)  # sent with leases, which only members of the Ray cluster can take

    async def start(self, host: str) -> None:
        """Listen on a free port of ``host``, the address by which other nodes reach this one; one of ``ports`` if given.

        Raises `ConfigError` if none of these is free, or ``host`` is not an address of this machine.
        """
        # otherwise two replicas on a machine could share a port, and get each other's links
        self._server = server = grpc.aio.server(options=[*CHANNEL_OPTIONS, ("grpc.so_reuseport", 0)])
        server.add_generic_rpc_handlers((handlers_of(self, LINK),))
        host = f"[{host}]" if ":" in host else host
        first, last = self._ports or (0, 0)  # 0 is any free port
        # in random order, so that replicas that start together seldom try the same port
        for port in random.sample(range(first, last + 1), last + 1 - first):
            try:
                if self._tls is None:
                    bound = server.add_insecure_port(f"{host}:{port}")
                else:
                    bound = server.add_secure_port(f"{host}:{port}", server_credentials(self._tls))
            except RuntimeError:  # the port is taken, or the host is not here
                continue
            await server.start()
            self.address = f"{host}:{bound}"
            return
        with contextlib.suppress(RuntimeError):
            server.add_insecure_port(f"{host}:0")
            raise ConfigError(f"link_ports are {self._ports}, and none of them is free at {host}: name more, or others")
        raise ConfigError(
            f"Ray's address of this node is {host}, where nothing can listen: start Ray with another --node-ip-address"
        )

    async def stop(self, grace_s: float = 0.0) -> None:
        if self._server is not None:
            await self._server.stop(grace_s)

    async def lease(self, name: str) -> AsyncIterator[str]:
        """Yield ``address secret`` for the link, then stay open until the lease of that name ends.

        A caller that cancels the lease closes its session. Raises `Unavailable` if the replica is broken.
        """
        if not self._tier.healthy:
            await asyncio.sleep(REFUSAL_S)
            raise Unavailable(f"This replica of {self._tier.name} is broken")
        lease = self.leases[name] = GivenLease()
        try:
            yield f"{self.address} {self.secret}"
            await lease.ended()
        finally:
            self.leases.pop(name, None)
            if lease.session and self._held.pop(lease.session, None) is None:
                self._tier.post([Close(lease.session)])

    async def Connect(
        self, request_iterator: AsyncIterator[pb.Batch], context: grpc.aio.ServicerContext[pb.Batch, pb.Batch]
    ) -> None:
        """Carry messages both ways on one stream. Callers without the secret are refused."""
        given = dict(context.invocation_metadata() or ()).get("authorization", "")
        if not (isinstance(given, str) and hmac.compare_digest(given.encode(), authorization(self.secret).encode())):
            log.warning("%s was refused: it does not know the secret of this replica", context.peer())
            await context.abort(grpc.StatusCode.UNAUTHENTICATED, "the link's secret is missing or wrong: take a lease")
        mailbox = Mailbox(asyncio.get_running_loop())
        sessions: Sessions = {}
        try:
            ends = self._read(request_iterator, mailbox, sessions), self._write(context, mailbox, sessions), self._hang()
            await race(*ends)
        except ValueError as error:
            log.warning("A link was broken off: %s", error)
        finally:
            self._tier.drop(mailbox)
            for session in list(sessions):
                self._held.pop(session, None)
                self._end(session, sessions, "the link broke")

    async def _read(self, batches: AsyncIterator[pb.Batch], mailbox: Mailbox, sessions: Sessions) -> None:
        async for batch in batches:
            admitted = [message for message in decode(batch) if self._admit(message, mailbox, sessions)]
            ready = [message for message in admitted if not self._hold(message, mailbox)]
            if ready:
                served = self._spans.served
                self._tier.post([served(message) if isinstance(message, Open) else message for message in ready], mailbox)

    def _hold(self, message: Message, mailbox: Mailbox) -> bool:
        """Whether a message has to wait until its session is prepared; keeps such messages."""
        session = message.session
        if self._prepare is not None and isinstance(message, Open) and needs_preparation(message.spec.params):
            held = self._held[session] = [self._spans.served(message)]
            task = asyncio.create_task(self._follow(partial(self._prepare, message.spec.params), session, held, mailbox))
            self._preparing.add(task)
            task.add_done_callback(self._preparing.discard)
        elif session in self._held:
            self._held[session].append(message)
        else:
            return False
        return True

    async def _follow(self, prepare: Callable[[], object], session: str, held: list[Message], mailbox: Mailbox) -> None:
        """Prepare a session, then hand over its messages, unless it has ended."""
        try:
            await asyncio.to_thread(prepare)
        except Exception as error:  # the tier gets the same error, and reports it
            log.info("What session %s needs is not ready: %s", session, error)
        if self._held.get(session) is held:
            del self._held[session]
            self._tier.post(held, mailbox)

    async def _write(self, context: grpc.aio.ServicerContext[pb.Batch, pb.Batch], mailbox: Mailbox, sessions: Sessions) -> None:
        while True:
            messages = await mailbox.take()
            for message in messages:
                if isinstance(message, Failed):
                    self._end(message.session, sessions, message.reason)
            await context.write(encode(messages))

    async def _hang(self) -> None:
        """Wait until the tier hangs; its sessions should then move to another replica."""
        while not self._tier.hangs:
            await asyncio.sleep(WATCH_S)
        log.error("A pass of tier %s does not end: its sessions go on elsewhere", self._tier.name)

    def _admit(self, message: Message, mailbox: Mailbox, sessions: Sessions) -> bool:
        """Whether the message may reach the tier: its session must have a lease and have been opened over this link."""
        session = message.session
        if isinstance(message, Open):
            lease = self.leases.get(message.routing.lease or session)
            is_open = any(other.session == session for other in self.leases.values())
            if lease is None or lease.session or lease.over.is_set() or is_open:
                mailbox.put([Failed(session, f"there is no lease for session {session}", self._tier.name)])
                return False
            lease.session, sessions[session] = session, lease
            return True
        if isinstance(message, Failed):  # cannot be opened here
            mailbox.put([message])
            return False
        admitted = session in sessions
        if isinstance(message, Close):
            self._end(session, sessions, keep=message.keep)
        return admitted

    def _end(self, session: str, sessions: Sessions, reason: str = "", *, keep: bool = False) -> None:
        if (lease := sessions.pop(session, None)) is not None:  # not a session of another link
            self._spans.end(session, reason)
            lease.end(keep=keep)


def needs_preparation(params: SamplingParams) -> bool:
    """Whether a session may need slow preparation: compiling a grammar or fetching an adapter."""
    return params.structured is not None or bool(params.adapter)


def authorization(secret: str) -> str:
    """The value of the header `authorization` of callers."""
    return f"Bearer {secret}"


async def race(*coroutines: Coroutine[Any, Any, None]) -> None:
    """Run all until the first one ends, then cancel the others; raises the error of the first, if any."""
    tasks = [asyncio.create_task(coroutine) for coroutine in coroutines]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    for task in done:
        task.result()
