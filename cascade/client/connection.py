"""Where a client's requests go: the address, what every call carries, and the library's errors in place of gRPC's."""

import contextlib
import ipaddress
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import grpc

from cascade.errors import (
    Aborted,
    CascadeError,
    ConfigError,
    DeadlineExceeded,
    InvalidRequest,
    ModelError,
    NotFound,
    Overloaded,
    Unauthenticated,
    Unavailable,
)
from cascade.v1 import serving_pb2_grpc

SECURE = "grpcs://"  # before the address of a server that speaks TLS
OTHER_SCHEMES = ("http://", "https://", "grpc://")
RETRY_AFTER = "retry-after"  # gRPC trailing metadata and HTTP header, seconds
NEAR_DOMAINS = (".localhost", ".local", ".internal")
DIRECT = ("grpc.enable_http_proxy", 0)  # else gRPC takes what http_proxy and https_proxy name
UNREACHED = ("failed to connect", "errors resolving", "DNS resolution failed")  # how gRPC's sentences begin
# What reaches a server in the moment in which it closes is cancelled by gRPC before anybody has seen it.
RETRIES = {"maxAttempts": 3, "initialBackoff": "0.05s", "maxBackoff": "1s", "backoffMultiplier": 4}
SERVICE = {"methodConfig": [{"name": [{}], "retryPolicy": {**RETRIES, "retryableStatusCodes": ["CANCELLED"]}}]}
CHANNEL_OPTIONS = (
    ("grpc.max_receive_message_length", -1),  # log-probabilities of a long text are more than gRPC's 4 MiB
    # A call to a host that has vanished ends within seven minutes, not never. Servers break off connections that ping more
    # often than every five minutes while nothing is sent (gRPC's default, which Ray Serve's proxies keep).
    ("grpc.keepalive_time_ms", 360_000),
    ("grpc.http2.ping_timeout_ms", 20_000),
    ("grpc.http2.max_pings_without_data", 0),  # no limit: an answer may be waited for longer than two pings
    ("grpc.service_config", json.dumps(SERVICE)),
)

ERRORS: dict[grpc.StatusCode, type[CascadeError]] = {
    grpc.StatusCode.INVALID_ARGUMENT: InvalidRequest,
    grpc.StatusCode.NOT_FOUND: NotFound,
    grpc.StatusCode.UNAUTHENTICATED: Unauthenticated,
    grpc.StatusCode.RESOURCE_EXHAUSTED: Overloaded,
    grpc.StatusCode.UNAVAILABLE: Unavailable,
    grpc.StatusCode.ABORTED: Aborted,
    grpc.StatusCode.DEADLINE_EXCEEDED: DeadlineExceeded,
    grpc.StatusCode.FAILED_PRECONDITION: ModelError,
}


class Connection:
    """What both clients hold: a channel to one server, and the metadata and the deadline of its calls."""

    _channels: ClassVar[Any]  # makes channels: `grpc`, or `grpc.aio`

    def __init__(
        self,
        address: str,
        *,
        api_key: str | None = None,
        application: str | None = None,
        timeout_s: float | None = None,
        authority: str | None = None,
    ) -> None:
        self._metadata = _metadata(application, api_key)
        self._timeout_s = timeout_s
        target, credentials = _target(address, authority)
        direct = is_near(target) and not os.environ.get("grpc_proxy")  # noqa: SIM112  # gRPC's own name, meant for it
        options = (*CHANNEL_OPTIONS, DIRECT) if direct else CHANNEL_OPTIONS
        if credentials is None:
            self._channel = self._channels.insecure_channel(target, options)
        else:
            self._channel = self._channels.secure_channel(target, credentials, options)
        self._stub = serving_pb2_grpc.CascadeStub(self._channel)

    def _begin(self, rpc: str, request: Any, timeout_s: float | None = None) -> Any:
        """Call ``rpc`` with the connection's metadata, and its deadline unless another is given."""
        return getattr(self._stub, rpc)(request, timeout=timeout_s or self._timeout_s, metadata=self._metadata)


@contextlib.contextmanager
def errors() -> Iterator[None]:
    """Raise the library's errors instead of gRPC's."""
    try:
        yield
    except grpc.RpcError as error:
        code = error.code()
        if code is grpc.StatusCode.CANCELLED:
            raise
        kind, sentence = ERRORS.get(code, CascadeError), error.details() or str(code)
        if kind is Overloaded:
            raise Overloaded(sentence, _retry_after_s(error)) from None
        if sentence.startswith(UNREACHED):
            sentence = f"No server answers at the client's address ({sentence}): start one, or mend the address"
        raise kind(sentence) from None


def _retry_after_s(error: grpc.RpcError) -> float:
    """Seconds after which the server may take another try; 1 if it does not say."""
    pairs: Any = error.trailing_metadata() or ()
    try:
        return float(dict(pairs).get(RETRY_AFTER, 1))
    except ValueError:
        return 1.0


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
