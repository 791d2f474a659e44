"""A client's channels to servers: addresses, metadata, retries, and the library's errors for those of gRPC."""

import ipaddress
import json
import os
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import grpc

from cascade.client.exchange import Exchange
from cascade.client.rpc import stub_of
from cascade.errors import KINDS, CascadeError, ConfigError, DeadlineExceeded, Overloaded, Unauthenticated, Unavailable

SECURE = "grpcs://"  # prefix of addresses with TLS
OTHER_SCHEMES = ("http://", "https://", "grpc://")
API_KEY = "CASCADE_API_KEY"  # environment variable of the key
NO_KEY = f"The server requires an API key and this client has none: set {API_KEY}, or give api_key"
CLOSED = "The client was closed"
RETRY_AFTER = "retry-after"  # gRPC trailing metadata and HTTP header, seconds
NEAR_DOMAINS = (".localhost", ".local", ".internal")
DIRECT = ("grpc.enable_http_proxy", 0)  # keeps gRPC from using the proxies in http_proxy and https_proxy
# beginnings of gRPC's messages if no server answers
UNREACHED = ("connections to all backends failing", "failed to connect", "errors resolving", "DNS resolution failed")
HTTP = "http1.x server"  # in gRPC's message about a server that does not speak HTTP/2
PATIENCE_S = 60.0  # longer than a killed router takes to restart, also on a slow machine
FIRST_PAUSE_S = 0.05  # doubled with every failure, and cut at random by up to half, so that clients do not retry all at once
MOST_PAUSE_S = 2.0
AVOID_S = 5.0  # time for which a server that failed is used only if there is no other
CHANNEL_OPTIONS = (
    ("grpc.max_receive_message_length", -1),  # log-probabilities of a long text exceed gRPC's 4 MiB
    # A call to a host that has vanished ends within seven minutes. More frequent pings would make servers close idle
    # connections: gRPC's default, which Ray Serve's proxies keep, allows one every five minutes.
    ("grpc.keepalive_time_ms", 360_000),
    ("grpc.http2.ping_timeout_ms", 20_000),
    ("grpc.http2.max_pings_without_data", 0),  # no limit: an answer may take longer than two pings
    ("grpc.service_config", json.dumps({"loadBalancingConfig": [{"round_robin": {}}]})),  # balances over all hosts of a name
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 2_000),
    ("grpc.min_reconnect_backoff_ms", 5_000),  # time until a connection attempt is given up; gRPC's default is 20 s
)

# the library's errors by gRPC status; CANCELLED comes from a server that shuts down
ERRORS = {kind.grpc: kind for kind in KINDS if "grpc" in vars(kind)} | {"CANCELLED": Unavailable}


class Unreached(Unavailable):
    """No server answers at the address."""


@dataclass(slots=True)
class Attempts:
    """The calls for one request, within its deadline and its client's patience.

    ``patience_s``: seconds for which calls may fail one after another without a message from any server. ``unproven``: the
    addresses may be wrong, so each of ``num_servers`` is tried only once.
    """

    patience_s: float
    timeout_s: float | None
    num_servers: int = 1
    unproven: bool = False
    _start: float = field(default_factory=time.monotonic)
    _num_failed: int = 0  # calls that failed
    _num_in_vain: int = 0  # calls that failed since the last message
    _lost: float | None = None  # when the first of these failed
    _reason: CascadeError | None = None  # its error

    @property
    def left_s(self) -> float | None:
        """Seconds until the request's deadline, if it has one."""
        return None if self.timeout_s is None else max(0.0, self._start + self.timeout_s - time.monotonic())

    def received(self) -> None:
        self._num_in_vain, self.unproven, self._reason, self._lost = 0, False, None, None

    def failed(self, error: CascadeError) -> float:
        """The pause in seconds before the next call; raises ``error`` if another call is useless or too late.

        If the deadline ends a call after earlier ones failed, the error of the first of them is raised.
        """
        now = time.monotonic()
        self._num_failed += 1
        self._num_in_vain += 1
        self._reason, self._lost = self._reason or error, self._lost or now
        self.unproven &= isinstance(error, Unreached)  # any other error shows that there is a server
        pause_s: float = random.uniform(0.5, 1.0) * min(MOST_PAUSE_S, FIRST_PAUSE_S * 2 ** (self._num_in_vain - 1))
        if isinstance(error, Overloaded):
            pause_s += error.retry_after_s
        left_s = self.left_s
        patient = now + pause_s <= self._lost + self.patience_s
        if self._may_succeed(error) and patient and (left_s is None or pause_s <= left_s):
            return pause_s
        shown = self._reason if isinstance(error, DeadlineExceeded) else error
        if isinstance(shown, Unavailable) and self._num_in_vain > 1:
            shown = type(shown)(f"{shown} (tried for {now - self._lost:.1f} s)")
        raise shown from None

    def _may_succeed(self, error: CascadeError) -> bool:
        """Whether another call may succeed. A full server is retried only for a request that has lost its server."""
        if isinstance(error, Unreached) and self.unproven:
            return self._num_failed < self.num_servers
        return isinstance(error, Unavailable) or (isinstance(error, Overloaded) and self._num_failed > 1)


@dataclass(slots=True)
class Server:
    """An address, which may be a name for several hosts."""

    channel: Any
    stub: Any
    avoided_until: float = 0.0  # on the clock of `time.monotonic`; a call failed there


class Connection:
    """State of both clients: servers, and the metadata, deadline and patience of calls."""

    _channels: ClassVar[Any]  # the module that makes channels: `grpc` or `grpc.aio`

    def __init__(
        self,
        address: str | Sequence[str],
        *,
        api_key: str | None = None,
        application: str | None = None,
        timeout: float | None = None,
        authority: str | None = None,
        patience_s: float = PATIENCE_S,
    ) -> None:
        addresses = [address] if isinstance(address, str) else list(address)
        if not addresses:
            raise ConfigError("address is an empty list: give HOST:PORT of at least one server's gRPC endpoint")
        self._metadata = _metadata(application, os.environ.get(API_KEY) if api_key is None else api_key)
        self._timeout = timeout
        self._patience_s = patience_s
        self._servers = [self._open(address, authority) for address in addresses]
        self._num_calls = 0
        self._answered = False  # whether any server has ever answered
        self._closed = False

    def _open(self, address: str, authority: str | None) -> Server:
        target, credentials = _target(address, authority)
        direct = is_near(target) and not os.environ.get("grpc_proxy")  # noqa: SIM112  # gRPC's own variable
        options = (*CHANNEL_OPTIONS, DIRECT) if direct else CHANNEL_OPTIONS
        if credentials is None:
            channel = self._channels.insecure_channel(target, options)
        else:
            channel = self._channels.secure_channel(target, credentials, options)
        return Server(channel, stub_of(channel, streamed=True))

    def _attempts(self, exchange: Exchange[Any, Any]) -> Attempts:
        unproven = exchange.probing and not self._answered  # the addresses may be wrong
        return Attempts(self._patience_s, exchange.timeout_s or self._timeout, len(self._servers), unproven)

    def _next_server(self) -> Server:
        """The next server in turn; if all are avoided, the one that was avoided first."""
        self._num_calls += 1
        first = self._num_calls % len(self._servers)
        now, servers = time.monotonic(), (*self._servers[first:], *self._servers[:first])
        return min(servers, key=lambda server: max(0.0, server.avoided_until - now))

    def _call(self, server: Server, exchange: Exchange[Any, Any], attempts: Attempts) -> Any:
        if self._closed:
            raise Unavailable(CLOSED)
        return getattr(server.stub, exchange.rpc)(exchange.request, timeout=attempts.left_s, metadata=self._metadata)

    def _received(self, server: Server, attempts: Attempts) -> None:
        self._answered, server.avoided_until = True, 0.0
        attempts.received()

    def _failed(self, error: grpc.RpcError | Unavailable, server: Server, attempts: Attempts, again: bool = True) -> float:
        """The pause before the request is sent again; raises the library's error if that is useless, or not possible."""
        if self._closed:
            raise Unavailable(CLOSED) from None
        cause = _error_of(error) if isinstance(error, grpc.RpcError) else error
        if isinstance(cause, Unauthenticated) and "authorization" not in dict(self._metadata):
            cause = Unauthenticated(NO_KEY)
        if isinstance(cause, Unavailable):
            server.avoided_until = time.monotonic() + AVOID_S
        if not again:
            raise cause from None
        return attempts.failed(cause)


def _error_of(error: grpc.RpcError) -> CascadeError:
    code = error.code()
    kind, sentence = ERRORS.get(code.name, CascadeError), error.details() or str(code)
    if kind is Overloaded:
        pairs: Any = error.trailing_metadata() or ()
        try:
            return Overloaded(sentence, float(dict(pairs)[RETRY_AFTER]))
        except (KeyError, ValueError):  # the server does not say
            return Overloaded(sentence)
    if HTTP in sentence:
        return ConfigError("The client's address is an HTTP port: give the gRPC port, 9000 unless the server says otherwise")
    if kind is Unavailable and sentence.startswith(UNREACHED):
        return Unreached(f"No server answers at the client's address ({sentence}): start one, or correct the address")
    return kind(sentence)


def _target(address: str, authority: str | None) -> tuple[str, grpc.ChannelCredentials | None]:
    """The target of an address, and credentials if it uses TLS; raises `ConfigError`."""
    port = address.rpartition(":")[2]
    if port.isdecimal() and not 0 < int(port) < 2**16:  # gRPC would take the lower 16 bits of it
        raise ConfigError(f"address is {address!r}: give a port from 1 to 65535")
    if not address.startswith(SECURE):
        if authority is not None:
            raise ConfigError(f"authority is given and address is {address!r}: begin it with {SECURE} for TLS")
        if address.startswith(OTHER_SCHEMES):
            raise ConfigError(f"address is {address!r}: give HOST:PORT of its gRPC endpoint, or {SECURE}HOST:PORT for TLS")
        if ":" not in address:
            raise ConfigError(f"address is {address!r}, which names no port: give HOST:PORT, as {address}:9000")
        return address, None
    try:
        roots = None if authority is None else Path(authority).read_bytes()
    except OSError as error:
        raise ConfigError(f"authority is {authority!r}, which cannot be read: {error.strerror or error}") from None
    return address.removeprefix(SECURE), grpc.ssl_channel_credentials(roots)


def is_near(target: str) -> bool:
    """Whether a HOST:PORT is on this machine or its private network, which is reached without a web proxy."""
    place = target.rpartition("/")[2]
    host = (place if place.endswith("]") or ":" not in place else place.rpartition(":")[0]).strip("[]")
    try:
        return not ipaddress.ip_address(host).is_global
    except ValueError:
        return "." not in host or host.endswith(NEAR_DOMAINS)


def _metadata(application: str | None, api_key: str | None) -> tuple[tuple[str, str], ...]:
    for name, value in (("api_key", api_key), ("application", application)):
        if value and not (value.isascii() and value.isprintable()):
            raise ConfigError(f"{name} has characters that are not printable ASCII, which no call can carry: correct it")
    pairs = (("application", application or ""), ("authorization", f"Bearer {api_key}" if api_key else ""))
    return tuple((name, value) for name, value in pairs if value)
