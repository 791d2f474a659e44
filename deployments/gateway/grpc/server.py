"""The router's own gRPC server, in its process in place of Ray Serve's proxy.

It listens on its own port, applies backpressure to slow readers, knows deadlines, and saves a hop.
"""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable
from types import SimpleNamespace, TracebackType
from typing import Any

import grpc
from google.protobuf.descriptor import MethodDescriptor
from google.protobuf.message import DecodeError, Message
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from cascade.client.rpc import CASCADE, handlers_of
from cascade.settings.router import ListenConfig, RequestLimits
from cascade.v1 import serving_pb2 as pb
from deployments.gateway.admission.admission import UNKNOWN_FAILURE
from deployments.links.tls import check, server_credentials

log = logging.getLogger(__name__)

MAX_METADATA_BYTES = 16 * 2**10

Context = grpc.aio.ServicerContext[Any, Any]


class Patience:
    """A context for each write to one client: raises `TimeoutError` if the client reads nothing for ``timeout_s``.

    All writes share one timer, because a timer for each would take longer than most writes. Belongs to one event loop.
    """

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._loop = asyncio.get_running_loop()
        self._task: asyncio.Task[object] | None = None  # the task that writes
        self._since: float | None = None  # when the present write began
        self._over = False
        self._timer: asyncio.TimerHandle | None = None

    def __enter__(self) -> None:
        self._since, self._task = self._loop.time(), asyncio.current_task()
        if self._timer is None:
            self._timer = self._loop.call_later(self._timeout_s, self._look)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._since = None
        if self._over and self._task is not None:
            self._over = False
            if not self._task.uncancel() and kind is asyncio.CancelledError:  # unless something else cancels it, too
                raise TimeoutError from error

    def close(self) -> None:
        """Stop the timer, since all is written."""
        if self._timer is not None:
            self._timer.cancel()

    def _look(self) -> None:
        self._timer = None
        if self._since is None or self._task is None:
            return
        left_s = self._since + self._timeout_s - self._loop.time()
        if left_s > 0:
            self._timer = self._loop.call_later(left_s, self._look)
        else:
            self._over = True
            self._task.cancel()


class GrpcServer:
    """Serves a router's ``service``, health and reflection. Several routers on one machine may share the port."""

    def __init__(self, service: Any, listen: ListenConfig, limits: RequestLimits) -> None:
        self._listen = listen
        self._leaving: asyncio.Task[None] | None = None
        self._health = health.aio.HealthServicer()  # type: ignore[attr-defined]
        self._server = grpc.aio.server(
            options=[
                ("grpc.max_receive_message_length", limits.max_body_bytes),
                ("grpc.max_send_message_length", -1),
                ("grpc.max_metadata_size", MAX_METADATA_BYTES),
                ("grpc.absolute_max_metadata_size", MAX_METADATA_BYTES),
                ("grpc.keepalive_time_ms", 20_000),  # notices within half a minute that a client's host has vanished
                ("grpc.keepalive_timeout_ms", 10_000),
                ("grpc.http2.ping_timeout_ms", 10_000),
                ("grpc.http2.max_pings_without_data", 0),
            ]
        )
        self._read_timeout_s = limits.read_timeout_s
        methods = {method.name: self._method(method, getattr(service, method.name)) for method in CASCADE.methods}
        self._server.add_generic_rpc_handlers((handlers_of(SimpleNamespace(**methods), parse=parsed),))
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        reflection.enable_server_reflection((CASCADE.full_name, health.SERVICE_NAME, reflection.SERVICE_NAME), self._server)

    async def open(self) -> None:
        """Listen; raises `ConfigError` if a TLS file cannot be used, `RuntimeError` if the port is not available."""
        host = f"[{self._listen.host}]" if ":" in self._listen.host else self._listen.host
        tls, place = self._listen.tls, f"{host}:{self._listen.grpc_port}"
        if tls is None:
            self._server.add_insecure_port(place)
        else:
            check(tls)
            self._server.add_secure_port(place, server_credentials(tls))
        await self._server.start()
        for name in ("", CASCADE.full_name):
            await self._health.set(name, health_pb2.HealthCheckResponse.SERVING)

    async def leave(self, grace_s: float) -> None:
        """Stop listening, and send connected clients elsewhere; running answers have ``grace_s`` to end."""
        await self._health.enter_graceful_shutdown()
        self._leaving = asyncio.create_task(self._server.stop(grace_s))

    async def close(self, grace_s: float) -> None:
        """Stop listening, and return when all calls are answered, at the latest after ``grace_s``."""
        await self._server.stop(grace_s)
        if self._leaving is not None:
            await self._leaving

    def _method(self, method: MethodDescriptor, answer: Callable[[Any, Context], Any]) -> Callable[..., Any]:
        """A function that answers calls of a method of the protocol like Ray Serve."""

        async def whole(request: object, context: Context) -> Any:
            async with aborting(request, context):
                return await answer(request, context)

        async def stream(request: object, context: Context) -> None:
            patience = Patience(self._read_timeout_s)
            async with aborting(request, context), contextlib.aclosing(answer(request, context)) as responses:
                with contextlib.closing(patience):
                    async for response in responses:
                        await self._write(context, response, patience)

        return stream if method.server_streaming else whole

    async def _write(self, context: Context, response: pb.GenerateResponse | pb.ChatResponse, patience: Patience) -> None:
        try:
            with patience:
                await context.write(response)
        except TimeoutError:
            log.info("A client that read nothing for %g s was dropped", self._read_timeout_s)
            context.set_code(grpc.StatusCode.ABORTED)
            context.set_details(f"The client read nothing for {self._read_timeout_s:g} s")
            raise


def parsed(kind: type[Message], data: bytes) -> Message | None:
    """A request, or ``None`` for invalid bytes: gRPC's own error would show clients names of classes."""
    with contextlib.suppress(DecodeError):
        return kind.FromString(data)
    return None


@contextlib.asynccontextmanager
async def aborting(request: object, context: Context) -> AsyncIterator[None]:
    """End a failed call with the status that was set, so that a client never sees a traceback."""
    if request is None:
        await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "The request is not a message of this protocol")
    try:
        yield
    except Exception:
        code = context.code() or grpc.StatusCode.INTERNAL
        await context.abort(code, context.details() or UNKNOWN_FAILURE, context.trailing_metadata() or ())
