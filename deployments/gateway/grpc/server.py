"""The router's own gRPC server, in the router's process in place of Ray Serve's proxy.

It listens where it is told, slows down for slow readers, knows deadlines, and saves a hop.
"""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator
from functools import partial
from typing import Any

import grpc
from google.protobuf.message import DecodeError
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from cascade.settings.router import ListenConfig, RequestLimits
from cascade.v1 import serving_pb2 as pb
from cascade.v1 import serving_pb2_grpc
from deployments.gateway.admission.status import UNKNOWN_FAILURE
from deployments.links.tls import check_door, server_credentials

log = logging.getLogger(__name__)

SERVICE = pb.DESCRIPTOR.services_by_name["Cascade"].full_name
MAX_METADATA_BYTES = 16 * 2**10

Context = grpc.aio.ServicerContext[Any, Any]


class GrpcServer:
    """The ``service``, a router's, with health and reflection. Several routers of one machine may share the port."""

    def __init__(self, service: Any, listen: ListenConfig, limits: RequestLimits) -> None:
        self._listen = listen
        self._leaving: asyncio.Task[None] | None = None
        self._health = health.aio.HealthServicer()  # type: ignore[attr-defined]
        most = limits.max_body_bytes
        self._server = grpc.aio.server(
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
        serving_pb2_grpc.add_CascadeServicer_to_server(Servicer(service, limits.read_timeout_s), self._server)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        reflection.enable_server_reflection((SERVICE, health.SERVICE_NAME, reflection.SERVICE_NAME), self._server)

    async def open(self) -> None:
        """Listen; raises `ConfigError` if a TLS file is no good, `RuntimeError` if the port cannot be had."""
        host = f"[{self._listen.host}]" if ":" in self._listen.host else self._listen.host
        tls, place = self._listen.tls, f"{host}:{self._listen.grpc_port}"
        if tls is None:
            self._server.add_insecure_port(place)
        else:
            check_door(tls)
            self._server.add_secure_port(place, server_credentials(tls))
        await self._server.start()
        for name in ("", SERVICE):
            await self._health.set(name, health_pb2.HealthCheckResponse.SERVING)

    async def leave(self, grace_s: float) -> None:
        """Stop listening, and send clients that are connected elsewhere; what is being answered has ``grace_s`` to end."""
        await self._health.enter_graceful_shutdown()
        self._leaving = asyncio.create_task(self._server.stop(grace_s))

    async def close(self, grace_s: float) -> None:
        """`leave` if it has not, and return when all is answered, or after ``grace_s`` if that is sooner."""
        await self._server.stop(grace_s)
        if self._leaving is not None:
            await self._leaving


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
    """Calls the methods of ``service``, named like the protocol's, as Ray Serve would."""

    def __init__(self, service: Any, read_timeout_s: float) -> None:
        self._service = service
        self._read_timeout_s = read_timeout_s
        for method in pb.DESCRIPTOR.services_by_name["Cascade"].methods:
            call = self._stream if method.server_streaming else self._whole
            setattr(self, method.name, partial(call, method.name))

    async def _whole(self, method: str, request: object, context: Context) -> Any:
        async with aborting(request, context):
            return await getattr(self._service, method)(request, context)

    async def _stream(self, method: str, request: object, context: Context) -> None:
        async with (
            aborting(request, context),
            contextlib.aclosing(getattr(self._service, method)(request, context)) as responses,
        ):
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
