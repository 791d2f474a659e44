"""The router's own servers: gRPC and HTTP in the router's process, in place of Ray Serve's proxies.

They listen where they are told, slow down for slow readers, know deadlines, and save a hop.
"""

import asyncio
import contextlib
import logging
import socket
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any, Protocol

import grpc
import h11
import uvicorn
from google.protobuf.message import DecodeError
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import H11Protocol

from cascade.settings.config import ListenConfig, RequestLimits
from cascade.v1 import serving_pb2 as pb
from cascade.v1 import serving_pb2_grpc
from deployments.admission.status import UNKNOWN_FAILURE
from deployments.links.tls import check_door, server_credentials

log = logging.getLogger(__name__)

SERVICE = pb.DESCRIPTOR.services_by_name["Cascade"].full_name
BACKLOG = 2048
MAX_METADATA_BYTES = 16 * 2**10


Context = grpc.aio.ServicerContext[Any, Any]


class Service(Protocol):
    """The methods of `cascade.v1.Cascade`, as Ray Serve calls them."""

    def Generate(self, request: pb.GenerateRequest, grpc_context: Any) -> AsyncIterator[pb.GenerateResponse]: ...
    async def Complete(self, request: pb.GenerateRequest, grpc_context: Any) -> pb.CompleteResponse: ...
    def Chat(self, request: pb.ChatRequest, grpc_context: Any) -> AsyncIterator[pb.ChatResponse]: ...
    async def CompleteChat(self, request: pb.ChatRequest, grpc_context: Any) -> pb.CompleteChatResponse: ...
    async def Abort(self, request: pb.AbortRequest, grpc_context: Any) -> pb.AbortResponse: ...
    async def Describe(self, request: pb.DescribeRequest, grpc_context: Any) -> pb.DescribeResponse: ...


class Door:
    """Both servers of one router. Several routers of one machine share the ports."""

    def __init__(self, service: Service, application: ASGIApp, listen: ListenConfig, limits: RequestLimits) -> None:
        self._listen = listen
        self._limits = limits
        self._health = health.aio.HealthServicer()  # type: ignore[attr-defined]
        self._grpc = self._grpc_server(service)
        tls = listen.tls
        self._http = _HttpServer(
            uvicorn.Config(
                application,
                http=protocol(limits.body_timeout_s),
                ws="none",
                lifespan="off",
                log_config=None,
                access_log=False,
                server_header=False,
                ssl_certfile=None if tls is None else tls.certificate,
                ssl_keyfile=None if tls is None else tls.key,
            )
        )
        self._serving: asyncio.Task[None] | None = None
        self.grpc_address = ""
        self.http_address = ""

    async def open(self) -> None:
        """Listen."""
        host = f"[{self._listen.host}]" if ":" in self._listen.host else self._listen.host
        tls, place = self._listen.tls, f"{host}:{self._listen.grpc_port}"
        if tls is None:
            port = self._grpc.add_insecure_port(place)
        else:
            check_door(tls)
            port = self._grpc.add_secure_port(place, server_credentials(tls))
        self.grpc_address = f"{host}:{port}"
        listening = listener(self._listen.host, self._listen.http_port, self._limits.read_timeout_s)
        self.http_address = f"{'https' if tls else 'http'}://{host}:{listening.getsockname()[1]}"
        await self._grpc.start()
        self._serving = asyncio.create_task(self._http.serve([listening]))
        for name in ("", SERVICE):
            await self._health.set(name, health_pb2.HealthCheckResponse.SERVING)

    async def leave(self) -> None:
        """Tell whoever asks that it will close."""
        await self._health.enter_graceful_shutdown()

    async def close(self, grace_s: float = 1.0) -> None:
        """Stop listening; what is still being answered has ``grace_s`` to end."""
        self._http.should_exit = True
        await self._grpc.stop(grace_s)
        if self._serving is not None:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(grace_s + 1):
                    await asyncio.shield(self._serving)
            self._http.force_exit = True
            await asyncio.gather(self._serving, return_exceptions=True)

    def _grpc_server(self, service: Service) -> grpc.aio.Server:
        most = self._limits.max_body_bytes
        server = grpc.aio.server(
            interceptors=(Parsing(),),
            options=[
                ("grpc.max_receive_message_length", most),
                ("grpc.max_send_message_length", -1),
                ("grpc.max_metadata_size", MAX_METADATA_BYTES),
                ("grpc.absolute_max_metadata_size", MAX_METADATA_BYTES),
                ("grpc.keepalive_time_ms", 20_000),  # a client's host that vanishes is noticed within half a minute
                ("grpc.keepalive_timeout_ms", 10_000),
                ("grpc.http2.ping_timeout_ms", 10_000),
                ("grpc.http2.max_pings_without_data", 0),
            ],
        )
        serving_pb2_grpc.add_CascadeServicer_to_server(Servicer(service, self._limits.read_timeout_s), server)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, server)
        reflection.enable_server_reflection((SERVICE, health.SERVICE_NAME, reflection.SERVICE_NAME), server)
        return server


class Parsing(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]
    """Hands requests that are no protobuf to the service as ``None``: gRPC would tell clients names of classes."""

    async def intercept_service(self, continuation: Any, handler_call_details: grpc.HandlerCallDetails) -> Any:
        handler: Any = await continuation(handler_call_details)
        if handler is None or not handler_call_details.method.startswith(f"/{SERVICE}/"):
            return handler

        def parse(data: bytes) -> Any:
            with contextlib.suppress(DecodeError):
                return handler.request_deserializer(data)

        return handler._replace(request_deserializer=parse)


class Servicer(serving_pb2_grpc.CascadeServicer):
    """Calls the router as Ray Serve would."""

    def __init__(self, service: Service, read_timeout_s: float) -> None:
        self._service = service
        self._read_timeout_s = read_timeout_s

    async def Generate(self, request: pb.GenerateRequest, context: Context) -> None:
        await self._stream(self._service.Generate, request, context)

    async def Complete(self, request: pb.GenerateRequest, context: Context) -> pb.CompleteResponse:
        async with aborting(request, context):
            return await self._service.Complete(request, context)

    async def Chat(self, request: pb.ChatRequest, context: Context) -> None:
        await self._stream(self._service.Chat, request, context)

    async def CompleteChat(self, request: pb.ChatRequest, context: Context) -> pb.CompleteChatResponse:
        async with aborting(request, context):
            return await self._service.CompleteChat(request, context)

    async def Abort(self, request: pb.AbortRequest, context: Context) -> pb.AbortResponse:
        async with aborting(request, context):
            return await self._service.Abort(request, context)

    async def Describe(self, request: pb.DescribeRequest, context: Context) -> pb.DescribeResponse:
        async with aborting(request, context):
            return await self._service.Describe(request, context)

    async def _stream(self, method: Callable[[Any, Any], Any], request: object, context: Context) -> None:
        async with aborting(request, context), contextlib.aclosing(method(request, context)) as responses:
            async for response in responses:
                await self._write(context, response)

    async def _write(self, context: Context, response: pb.GenerateResponse | pb.ChatResponse) -> None:
        try:
            async with asyncio.timeout(self._read_timeout_s):
                await context.write(response)
        except TimeoutError:
            log.info("A client that took nothing for %g s was dropped", self._read_timeout_s)
            context.set_code(grpc.StatusCode.ABORTED)
            context.set_details(f"The client took nothing for {self._read_timeout_s:g} s")
            raise


def protocol(head_timeout_s: float) -> type[H11Protocol]:
    """Uvicorn's own, but for connections that bring no whole head of a request in time: those are closed.

    Uvicorn waits for the first head, and for the rest of one that has begun, for ever.
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


class _HttpServer(uvicorn.Server):
    """Leaves signals to whoever runs the process."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


@contextlib.asynccontextmanager
async def aborting(request: object, context: Context) -> AsyncIterator[None]:
    """End a failed call with the status that was set; a client never sees a traceback."""
    if request is None:
        await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "The request is no message of this protocol")
    try:
        yield
    except Exception:
        code = context.code() or grpc.StatusCode.INTERNAL
        await context.abort(code, context.details() or UNKNOWN_FAILURE, context.trailing_metadata() or ())


def listener(host: str, port: int, timeout_s: float) -> socket.socket:
    """A listening socket that other routers of this machine may share; raises `OSError`.

    The kernel drops clients that take nothing for ``timeout_s``.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listening = socket.socket(family, socket.SOCK_STREAM)
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        if hasattr(socket, "TCP_USER_TIMEOUT"):  # accepted connections inherit it
            listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(timeout_s * 1e3))
        listening.bind((host, port))
        listening.listen(BACKLOG)  # at once: clients may come before the server's first turn
    except OSError:
        listening.close()
        raise
    return listening
