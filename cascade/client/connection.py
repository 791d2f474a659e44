"""Where a client's requests go: addresses, what every call carries, and the library's errors in place of gRPC's."""

import ipaddress
import json
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import grpc

from cascade.client.retries import Attempts, Unreached
from cascade.errors import KINDS, CascadeError, ConfigError, Overloaded, Unavailable
from cascade.v1 import serving_pb2_grpc

SECURE = "grpcs://"  # before the address of a server that speaks TLS
OTHER_SCHEMES = ("http://", "https://", "grpc://")
API_KEY = "CASCADE_API_KEY"  # environment variable
RETRY_AFTER = "retry-after"  # gRPC trailing metadata and HTTP header, seconds
NEAR_DOMAINS = (".localhost", ".local", ".internal")
DIRECT = ("grpc.enable_http_proxy", 0)  # else gRPC takes what http_proxy and https_proxy name
# how gRPC's sentences begin
UNREACHED = ("connections to all backends failing", "failed to connect", "errors resolving", "DNS resolution failed")
# What reaches a server in the moment in which it closes is cancelled by gRPC before anybody has seen it.
RETRIES = {"maxAttempts": 3, "initialBackoff": "0.05s", "maxBackoff": "1s", "backoffMultiplier": 4}
SERVICE = {
    "methodConfig": [{"name": [{}], "retryPolicy": {**RETRIES, "retryableStatusCodes": ["CANCELLED"]}}],
    "loadBalancingConfig": [{"round_robin": {}}],  # over all hosts that a name stands for
}
PATIENCE_S = 30.0
SHUT_S = 5.0  # for which a server that failed is asked only if there is no other
CHANNEL_OPTIONS = (
    ("grpc.max_receive_message_length", -1),  # log-probabilities of a long text are more than gRPC's 4 MiB
    # A call to a host that has vanished ends within seven minutes, not never. Servers break off connections that ping more
    # often than every five minutes while nothing is sent (gRPC's default, which Ray Serve's proxies keep).
    ("grpc.keepalive_time_ms", 360_000),
    ("grpc.http2.ping_timeout_ms", 20_000),
    ("grpc.http2.max_pings_without_data", 0),  # no limit: an answer may be waited for longer than two pings
    ("grpc.service_config", json.dumps(SERVICE)),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 2_000),
    ("grpc.min_reconnect_backoff_ms", 5_000),  # how long a connection may take to come about: gRPC's own 20 s at a dead host
)

ERRORS = {kind.grpc: kind for kind in KINDS if "grpc" in vars(kind)} | {"CANCELLED": Unavailable}  # by a server that closes


@dataclass(slots=True)
class Door:
    """A way to servers: one address, or one name for several."""

    channel: Any
    stub: Any
    shut_until: float = 0.0  # of `time.monotonic`; a call failed there


class Connection:
    """What both clients hold: channels to servers, and the metadata, the deadline and the patience of its calls."""

    _channels: ClassVar[Any]  # makes channels: `grpc`, or `grpc.aio`

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
            raise ConfigError("address is an empty list: give HOST:PORT of at least one server's gRPC door")
        self._metadata = _metadata(application, os.environ.get(API_KEY) if api_key is None else api_key)
        self._timeout = timeout
        self._patience_s = patience_s
        self._doors = [self._open(one, authority) for one in addresses]
        self._num_calls = 0
        self._answered = False  # by any server, ever
        self._closed = False

    def _open(self, address: str, authority: str | None) -> Door:
        target, credentials = _target(address, authority)
        direct = is_near(target) and not os.environ.get("grpc_proxy")  # noqa: SIM112  # gRPC's own name, meant for it
        options = (*CHANNEL_OPTIONS, DIRECT) if direct else CHANNEL_OPTIONS
        if credentials is None:
            channel = self._channels.insecure_channel(target, options)
        else:
            channel = self._channels.secure_channel(target, credentials, options)
        return Door(channel, serving_pb2_grpc.CascadeStub(channel))

    def _attempts(self, timeout_s: float | None = None) -> Attempts:
        """For one request, with the connection's deadline unless another is given."""
        return Attempts(self._patience_s, timeout_s or self._timeout, len(self._doors), not self._answered)

    def _door(self) -> Door:
        """The next one in turn, and one that is shut only if all are: the one that was shut first."""
        self._num_calls += 1
        first = self._num_calls % len(self._doors)
        now, doors = time.monotonic(), (*self._doors[first:], *self._doors[:first])
        return min(doors, key=lambda door: max(0.0, door.shut_until - now))

    def _begin(self, door: Door, rpc: str, request: Any, attempts: Attempts) -> Any:
        """Call ``rpc`` there, with the connection's metadata."""
        return getattr(door.stub, rpc)(request, timeout=attempts.left_s, metadata=self._metadata)

    def _heard(self, door: Door, attempts: Attempts) -> None:
        self._answered, door.shut_until = True, 0.0
        attempts.heard()

    def _failed(self, error: grpc.RpcError | Unavailable, door: Door, attempts: Attempts, again: bool = True) -> float:
        """The pause before the request is sent again; raises the library's error where that is of no use, or cannot be."""
        if self._closed and isinstance(error, grpc.RpcError):
            raise error
        cause = _error_of(error) if isinstance(error, grpc.RpcError) else error
        if isinstance(cause, Unavailable):
            door.shut_until = time.monotonic() + SHUT_S
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
        except (KeyError, ValueError):  # it does not say
            return Overloaded(sentence)
    if kind is Unavailable and sentence.startswith(UNREACHED):
        return Unreached(f"No server answers at the client's address ({sentence}): start one, or mend the address")
    return kind(sentence)


def _target(address: str, authority: str | None) -> tuple[str, grpc.ChannelCredentials | None]:
    """What to connect to, and whom to trust there if it speaks TLS; raises `ConfigError`."""
    if not address.startswith(SECURE):
        if authority is not None:
            raise ConfigError(f"authority is given and address is {address!r}: begin it with {SECURE} for TLS")
        if address.startswith(OTHER_SCHEMES):
            raise ConfigError(f"address is {address!r}: give HOST:PORT of the server's gRPC door, or {SECURE}HOST:PORT for TLS")
        return address, None
    try:
        roots = None if authority is None else Path(authority).read_bytes()
    except OSError as error:
        raise ConfigError(f"authority is {authority!r}, which cannot be read: {error.strerror or error}") from None
    return address.removeprefix(SECURE), grpc.ssl_channel_credentials(roots)


def is_near(target: str) -> bool:
    """Whether a HOST:PORT is of this machine or its network, which no proxy for the web should stand before."""
    place = target.rpartition("/")[2]
    host = (place if place.endswith("]") or ":" not in place else place.rpartition(":")[0]).strip("[]")
    try:
        return not ipaddress.ip_address(host).is_global
    except ValueError:
        return "." not in host or host.endswith(NEAR_DOMAINS)


def _metadata(application: str | None, api_key: str | None) -> tuple[tuple[str, str], ...]:
    """What every call says about its sender; raises `ConfigError`."""
    for name, value in (("api_key", api_key), ("application", application)):
        if value and not (value.isascii() and value.isprintable()):
            raise ConfigError(f"{name} has characters that are not printable ASCII, which no call can carry: mend it")
    pairs = (("application", application or ""), ("authorization", f"Bearer {api_key}" if api_key else ""))
    return tuple((name, value) for name, value in pairs if value)
