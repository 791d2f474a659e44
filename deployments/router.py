"""The router: a stateless ingress, gRPC and HTTP, that admits requests, drives the full tier and streams the answer."""

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from importlib.metadata import version
from types import MappingProxyType
from typing import Any

from ray.serve.grpc_util import RayServegRPCContext
from ray.serve.handle import DeploymentHandle
from starlette.types import ASGIApp, Message

from cascade.answer import Chunk
from cascade.params import MOST_BRANCHES
from cascade.settings.config import CascadeConfig
from cascade.v1 import serving_pb2 as pb
from deployments.full_tier import FullTier
from deployments.gateway.admission.admission import Admission
from deployments.gateway.chat.assistant import Assistant
from deployments.gateway.grpc.requests import TextRequest, TurnRequest, metadata, refuse_streaming, refuse_unknown, reported
from deployments.gateway.grpc.server import GrpcServer
from deployments.gateway.http.api import Api
from deployments.gateway.http.server import HttpServer
from deployments.gateway.model import ServedModel
from deployments.links.leases import lessor
from deployments.links.replica_status import Tiers, may_be_zero
from deployments.links.siblings import Siblings
from deployments.links.tls import check
from deployments.models import relayed
from deployments.ops.collector import Collector
from deployments.ops.metrics.export import report
from deployments.ops.metrics.series import ROUTER
from deployments.ops.tracing import flush
from deployments.replica import join_serves, starting

log = logging.getLogger(__name__)

DESCRIBE_TIMEOUT_S = 2.0
DRAIN_MARGIN_S = 3.0  # the part of the time that Serve gives a replica to end, kept for closing
LINGER_S = 0.1  # what has come through a door before it closed is still admitted
CLOSE_GRACE_S = 1.0  # the patience with what is still being answered when the servers close


class Router:
    """Serves `cascade.v1.Cascade`; ``handles`` are of all tiers, bottom to top, ``limits`` of their models, by tier."""

    @starting()
    async def __init__(  # type: ignore[misc]  # Serve awaits it
        self,
        config: Mapping[str, Any],
        handles: Mapping[str, DeploymentHandle],
        limits: Mapping[str, Mapping[str, int]] = MappingProxyType({}),
        learner: DeploymentHandle | None = None,
    ) -> None:
        join_serves()
        self._config = CascadeConfig.model_validate(config)
        if self._config.link_tls is not None:
            check(self._config.link_tls)
        self.admission = Admission(self._config)
        self._tiers = Tiers(self._config, handles, limits)
        self.model = await ServedModel.load(self._config, self._tiers)
        self.assistant = Assistant(self.model, self._config.router.tool_format)
        full = self._config.tiers[-1]
        self._siblings = Siblings()
        metrics = self.admission.metrics
        self._collector = None if learner is None else Collector(learner, metrics)
        self._full = FullTier(self._config, lessor(handles[full.name]), self.model, self.admission, self._collector)
        metrics.gauges["full_min_replicas"].set(not may_be_zero(full))
        metrics.also(self._full.downlink.readings)
        reported = report(full.model_loading_config.model_id, ROUTER, metrics.readings)
        self._background = [asyncio.create_task(work) for work in (self._tiers.count(metrics.replicas), reported)]
        self._api = Api(self.model, self.assistant, self.admission, self._full).application()
        await self._listen()

    async def _listen(self) -> None:
        """Open own servers, if the configuration asks for them; else clients come through Ray Serve's proxies."""
        listen, limits = self._config.router.listen, self.admission.limits
        self._servers = None if listen is None else (HttpServer(self._api, listen, limits), GrpcServer(self, listen, limits))
        for server in self._servers or ():
            await server.open()

    async def Generate(
        self, request: pb.GenerateRequest, grpc_context: RayServegRPCContext
    ) -> AsyncIterator[pb.GenerateResponse]:
        """The answer, piece by piece."""
        call = TextRequest(request, self.model)
        async with self._answering(call, grpc_context) as chunks:
            async for chunk in chunks:
                yield call.piece(chunk)

    async def Complete(self, request: pb.GenerateRequest, grpc_context: RayServegRPCContext) -> pb.CompleteResponse:
        """The whole answer."""
        call = TextRequest(request, self.model)
        async with self._answering(call, grpc_context, "Generate") as chunks:
            return call.whole([chunk async for chunk in chunks])

    async def Chat(self, request: pb.ChatRequest, grpc_context: RayServegRPCContext) -> AsyncIterator[pb.ChatResponse]:
        """The assistant's next turn, piece by piece."""
        call = TurnRequest(request, self.model, self.assistant)
        async with self._answering(call, grpc_context) as chunks:
            async for chunk in chunks:
                yield call.piece(chunk)

    async def CompleteChat(self, request: pb.ChatRequest, grpc_context: RayServegRPCContext) -> pb.CompleteChatResponse:
        """The assistant's whole next turn."""
        call = TurnRequest(request, self.model, self.assistant)
        async with self._answering(call, grpc_context, "Chat") as chunks:
            return call.whole([chunk async for chunk in chunks])

    async def Abort(self, request: pb.AbortRequest, grpc_context: RayServegRPCContext) -> pb.AbortResponse:
        """End requests of the same key, at whatever router they are."""
        with reported(grpc_context, self.admission):
            refuse_unknown(request)
            key = self.admission.access.account(metadata(grpc_context).get("authorization")).name
            here = self.admission.abort(key, request.request_id)
            elsewhere = await self._siblings.ask("abort_for", key, request.request_id)
            return pb.AbortResponse(aborted=here + sum(elsewhere))

    async def abort_for(self, router: str, key: str, request_id: str) -> int | None:
        return None if router == self._siblings.name else self.admission.abort(key, request_id)

    async def Describe(self, request: pb.DescribeRequest, grpc_context: RayServegRPCContext) -> pb.DescribeResponse:
        """What is served, and how many replicas run."""
        with reported(grpc_context, self.admission):
            account = self.admission.access.account(metadata(grpc_context).get("authorization"))
            states = await self._tiers.states(DESCRIBE_TIMEOUT_S)
            response = pb.DescribeResponse(
                max_model_len=self.model.context_len,
                window=self._config.window,
                version=version("cascade-serve"),
                drafters=self._config.drafters,
                branches=MOST_BRANCHES,
                defaults=pb.Sampling(**self.model.defaults),
                key=pb.KeyLimits(name=account.name, **account.limits.model_dump(exclude_none=True)),
            )
            for tier in self._config.tiers:
                replicas, described = states[tier.name]
                state = described or {"name": tier.name, "model": tier.model_loading_config.model_id}
                fields = {name: state[name] for name in pb.Tier.DESCRIPTOR.fields_by_name if name in state}
                response.tiers.add(replicas=replicas, **fields)
            return response

    def __serve_build_asgi_app__(self) -> ASGIApp:
        """The HTTP API, for Ray Serve's proxies."""
        return self._api

    async def relay(self, scope: dict[str, Any], body: bytes) -> AsyncIterator[Message]:
        """The same, for a request that came to `deployments.models.Models`."""
        async with contextlib.aclosing(relayed(self._api, scope, body)) as messages:
            async for message in messages:
                yield message

    async def drain(self) -> None:
        """Close the servers, so that other routers behind the same ports get new requests, and let running ones end."""
        timeout_s = max(0.0, self._config.router.deployment_config.graceful_shutdown_timeout_s - DRAIN_MARGIN_S)
        if self._servers is not None:
            http, grpc = self._servers
            await grpc.leave(timeout_s + CLOSE_GRACE_S)
            await http.leave()
            await asyncio.sleep(LINGER_S)
        if not await self.admission.places.drained(timeout_s):
            log.warning("Requests that did not end within %g s are aborted", timeout_s)
            self.admission.abort_all()

    async def __del__(self) -> None:
        for task in self._background:
            task.cancel()
        if self._collector is not None:
            await self._collector.close()
        await self.drain()
        await asyncio.gather(*(server.close(CLOSE_GRACE_S) for server in self._servers or ()))
        await self._full.downlink.close()
        await asyncio.to_thread(flush)

    # requests

    @contextlib.asynccontextmanager
    async def _answering(
        self, call: TextRequest | TurnRequest, context: RayServegRPCContext, streaming: str | None = None
    ) -> AsyncIterator[AsyncGenerator[Chunk, None]]:
        """The pieces of the answer to a gRPC request; ``streaming`` is the RPC that streams such an answer."""
        with reported(context, self.admission):
            if streaming is not None:
                refuse_streaming(call.request, streaming)
            since, headers = time.monotonic(), metadata(context)
            account = self.admission.access.account(headers.get("authorization"))
            self.admission.places.check()  # before the work of reading it
            task = await call.task()
            spec = await self.model.admit(task)
            if call.request.HasField("resume"):
                call.resume(*await self.model.known([spec]))
            # Ray Serve's proxies do not tell the deadline; they cancel the call when it passes
            left_s = getattr(context, "time_remaining", lambda: None)()
            limits = account, headers.get("request_id"), left_s, [spec]
            carried, train = context.invocation_metadata() or (), task.handling.train
            with self.admission.admitted(*limits, since=since, headers=carried, train=train) as request:
                async with contextlib.aclosing(self._full.pieces(spec, request)) as chunks:
                    yield chunks
