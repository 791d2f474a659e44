"""The router's own HTTP server, in the router's process in place of Ray Serve's proxy.

It listens on the configured port, and drops connections without a request and clients that do not read.
"""

import asyncio
import contextlib
import socket
from collections.abc import Iterator
from typing import Any

import h11
import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import H11Protocol

from cascade.errors import ConfigError
from cascade.settings.router import ListenConfig, ListenTLS, RequestLimits
from deployments.links.tls import check

BACKLOG = 2048
TICK_S = 0.02  # seconds between two checks whether Uvicorn has stopped listening
RENEW_S = 10.0  # seconds between two checks of the certificate's files


class HttpServer:
    """Serves the application of one router. Several routers on one machine may share the port."""

    def __init__(self, application: ASGIApp, listen: ListenConfig, limits: RequestLimits) -> None:
        self._listen = listen
        self._read_timeout_s = limits.read_timeout_s
        tls = listen.tls
        off: dict[str, Any] = {"ws": "none", "lifespan": "off", "log_config": None, "access_log": False, "server_header": False}
        files: dict[str, Any] = {} if tls is None else {"ssl_certfile": tls.certificate, "ssl_keyfile": tls.key}
        self._server = _Uvicorn(uvicorn.Config(application, http=protocol(limits.body_timeout_s), **off, **files))
        self._serving: asyncio.Task[None] | None = None
        self._renewing: asyncio.Task[None] | None = None

    async def open(self) -> None:
        """Listen; raises `OSError` if the port is not available."""
        listening = listener(self._listen.host, self._listen.http_port, self._read_timeout_s)
        self._serving = asyncio.create_task(self._server.serve([listening]))
        if self._listen.tls is not None:
            self._renewing = asyncio.create_task(self._renew(self._listen.tls))

    async def _renew(self, tls: ListenTLS) -> None:
        """Use changed certificate files for new connections; files that do not match (yet) are ignored."""
        while True:
            await asyncio.sleep(RENEW_S)
            context = self._server.config.ssl
            with contextlib.suppress(ConfigError):
                check(tls)  # first, since a context that has loaded half of a pair is unusable
                if context is not None:
                    context.load_cert_chain(tls.certificate, tls.key)

    async def leave(self) -> None:
        """Stop listening, and close idle connections; the others close after their answer."""
        self._server.should_exit = True
        while any(server.is_serving() for server in self._server.servers):
            await asyncio.sleep(TICK_S)

    async def close(self, grace_s: float) -> None:
        """Stop listening; running answers have ``grace_s`` and a second to end."""
        if self._renewing is not None:
            self._renewing.cancel()
        self._server.should_exit = True
        if self._serving is not None:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(grace_s + 1):
                    await asyncio.shield(self._serving)
            self._server.force_exit = True
            await asyncio.gather(self._serving, return_exceptions=True)
        for connection in list(self._server.server_state.connections):  # connections that came meanwhile, or do not end
            if (transport := getattr(connection, "transport", None)) is not None:
                transport.abort()
        await asyncio.sleep(0)  # lets their sockets close


class _Uvicorn(uvicorn.Server):
    """Does not handle signals, which belong to the process."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def protocol(head_timeout_s: float) -> type[H11Protocol]:
    """Uvicorn's protocol, which also closes connections that do not send the whole head of a request in time.

    Uvicorn itself waits for ever for the first head, and for the rest of one that has begun.
    """

    class Timed(H11Protocol):
        _timer: asyncio.TimerHandle | None = None

        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as in the class above
            super().connection_made(transport)
            self._time()

        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            self._time()

        def connection_lost(self, exc: Exception | None) -> None:
            super().connection_lost(exc)
            self._stop()

        def _time(self) -> None:
            if self.conn.their_state is not h11.IDLE:
                self._stop()
            elif self._timer is None:
                self._timer = self.loop.call_later(head_timeout_s, self.transport.abort)

        def _stop(self) -> None:
            if self._timer is not None:
                self._timer.cancel()
                self._timer = None

    return Timed


def listener(host: str, port: int, timeout_s: float) -> socket.socket:
    """A listening socket that other routers on this machine may share; raises `OSError`.

    The kernel drops clients that read nothing for ``timeout_s``.
    """
    family, dual = (socket.AF_INET6, socket.has_dualstack_ipv6()) if ":" in host else (socket.AF_INET, False)
    listening = socket.create_server((host, port), family=family, backlog=BACKLOG, reuse_port=True, dualstack_ipv6=dual)
    if hasattr(socket, "TCP_USER_TIMEOUT"):  # accepted connections inherit it
        listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(timeout_s * 1e3))
    return listening
