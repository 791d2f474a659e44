"""The router: a stateless gRPC and HTTP ingress that admits requests, opens sessions at the full tier and streams answers."""

import asyncio
import logging
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from ray.serve.handle import DeploymentHandle
from starlette.types import ASGIApp

from cascade.settings.config import CascadeConfig
from deployments.full_tier import FullTier
from deployments.gateway.admission.admission import Admission
from deployments.gateway.chat.assistant import Assistant
from deployments.gateway.grpc.api import GrpcApi
from deployments.gateway.grpc.server import GrpcServer
from deployments.gateway.http.api import HttpApi
from deployments.gateway.http.server import HttpServer
from deployments.gateway.model import ServedModel
from deployments.links.leases import lessor
from deployments.links.replica_status import Siblings, Tiers, may_be_zero
from deployments.links.tls import check
from deployments.ops.collector import Collector
from deployments.ops.metrics import ROUTER, report
from deployments.ops.tracing import flush
from deployments.replica import starting

log = logging.getLogger(__name__)

DRAIN_MARGIN_S = 3.0  # part of Serve's shutdown timeout that is reserved for closing
LINGER_S = 0.1  # time in which requests that came before the ports closed are still admitted
CLOSE_GRACE_S = 1.0  # time for running answers when the servers close


class Router(GrpcApi):
    """Serves `cascade.v1.Cascade`, and the HTTP API as the ASGI application ``http``, from `start` to `close`."""

    _started = False

    async def start(
        self,
        config: Mapping[str, Any],
        handles: Mapping[str, DeploymentHandle],
        limits: Mapping[str, Mapping[str, int]] = MappingProxyType({}),
        learner: DeploymentHandle | None = None,
    ) -> None:
        """Start to take requests; ``handles`` has all tiers, bottom to top; ``limits`` has their models' limits, by tier."""
        self._config = CascadeConfig.model_validate(config)
        if self._config.link_tls is not None:
            check(self._config.link_tls)
        full, alignment, self._siblings = self._config.tiers[-1], self._config.alignment, Siblings()
        self.admission = admission = Admission(self._config)
        self.model, self._tiers, metrics = ServedModel(), Tiers(self._config, handles, limits), admission.metrics
        await self.model.load(self._config, self._tiers)
        self.assistant = Assistant(self.model, self._config.router.tool_format)
        self._collector = None if learner is None or alignment is None else Collector(learner, metrics, alignment.row_tokens)
        self._full = FullTier(self._config, lessor(handles[full.name]), self.model, admission, self._collector)
        metrics.gauges["full_min_replicas"].set(not may_be_zero(full))
        metrics.also(self._full.downlink.readings)
        reporting = report(full.model_loading_config.model_id, ROUTER, metrics.readings)
        self._background = [asyncio.create_task(work) for work in (self._tiers.count(metrics.replicas), reporting)]
        self.api = HttpApi(self.model, self.assistant, admission, self._full)
        self.http = self.api.application()
        await self._listen()
        self._started = True

    async def _listen(self) -> None:
        """Start the router's own servers, if configured; otherwise clients come through Ray Serve's proxies."""
        listen, limits = self._config.router.listen, self.admission.limits
        self._servers = None if listen is None else (HttpServer(self.http, listen, limits), GrpcServer(self, listen, limits))
        for server in self._servers or ():
            await server.open()

    async def drain(self) -> None:
        """Stop listening, so that other routers on the same ports get new requests, and let running requests end."""
        timeout_s = max(0.0, self._config.router.deployment_config.graceful_shutdown_timeout_s - DRAIN_MARGIN_S)
        if self._servers is not None:
            http, grpc = self._servers
            await grpc.leave(timeout_s + CLOSE_GRACE_S)
            await http.leave()
            await asyncio.sleep(LINGER_S)
        if not await self.admission.places.drained(timeout_s):
            log.warning("Requests that did not end within %g s are aborted", timeout_s)
            self.admission.abort_all()

    async def close(self) -> None:
        """Drain, then close everything; nothing if it has not started."""
        if not self._started:
            return
        for task in self._background:
            task.cancel()
        if self._collector is not None:
            await self._collector.close()
        await self.drain()
        await asyncio.gather(*(server.close(CLOSE_GRACE_S) for server in self._servers or ()))
        await self._full.downlink.close()
        await asyncio.to_thread(flush)


class RouterReplica(Router):
    """A router as a deployment of Ray Serve, which awaits its start and its shutdown."""

    @starting()
    async def __init__(self, *arguments: Any) -> None:  # type: ignore[misc]
        await self.start(*arguments)

    def __serve_build_asgi_app__(self) -> ASGIApp:
        """The HTTP API, for Ray Serve's proxies."""
        return self.http

    async def __del__(self) -> None:
        await self.close()
