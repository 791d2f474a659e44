"""The router: a stateless gRPC and HTTP ingress that admits requests, opens sessions at the full tier and streams answers.

Several models share one HTTP API: a request goes to the router of the model that it names.
"""

import asyncio
import json
import logging
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from ray.serve.handle import DeploymentHandle
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from cascade.errors import InvalidRequest, NotFound, Unauthenticated
from cascade.settings.config import CascadeConfig
from cascade.settings.router import RequestLimits
from deployments.full_tier import FullTier
from deployments.gateway.admission.admission import Admission, refusal
from deployments.gateway.chat.assistant import Assistant
from deployments.gateway.grpc.api import GrpcApi
from deployments.gateway.grpc.server import GrpcServer
from deployments.gateway.http.api import HttpApi
from deployments.gateway.http.events import ClientLeft
from deployments.gateway.http.middleware import CODING, authorization, read_body, refused_response, replay, route_of
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
LIST = "/v1/models"
BOUNDS = ("max_body_bytes", "body_timeout_s")  # limits of a body before its router is known


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
        listen, own = self._config.router.listen, admission.limits  # without `listen`, clients come through proxies
        self._servers = None if listen is None else (HttpServer(self.http, listen, own), GrpcServer(self, listen, own))
        for server in self._servers or ():
            await server.open()
        self._started = True

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


class Models:
    """Routers of one process, by model name, as one ASGI application."""

    def __init__(self, routers: Mapping[str, Router]) -> None:
        self._routers = dict(routers)
        admissions = [router.admission for router in routers.values()]
        self._access = [admission.access for admission in admissions]
        widest = {name: max(getattr(admission.limits, name) for admission in admissions) for name in BOUNDS}
        self._limits = RequestLimits(**widest)  # the widest limits of all routers

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request, or refuse it in the form of the API of its path."""
        if scope["type"] != "http":
            return
        key, body = authorization(dict(scope["headers"])), b""
        answer: ASGIApp
        try:
            if scope["method"] == "POST":
                self._check_key(key)
            body = await read_body(scope, receive, self._limits)
            if scope["method"] == "GET" and route_of(scope) == LIST:
                answer = JSONResponse({"object": "list", "data": await self._listed(key)})
            else:
                answer = self._chosen(scope, body).http
        except ClientLeft:
            return
        except Exception as error:
            answer = refused_response(refusal(error), scope)
        decoded = [pair for pair in scope["headers"] if pair[0] != CODING]
        await answer({**scope, "headers": decoded}, replay(body, receive), send)

    def _check_key(self, key: str) -> None:
        """Raise `Unauthenticated` if no router knows ``key``; the router of the request checks again."""
        refusals = []
        for access in self._access:
            try:
                access.account(key)
                return
            except Unauthenticated as error:
                refusals.append(error)
        raise refusals[0]

    def _chosen(self, scope: Scope, body: bytes) -> Router:
        """The router of the model in a request's path or body; raises `NotFound` or `InvalidRequest`.

        Routes that do not depend on the model, such as the page, go to any router.
        """
        route = route_of(scope)
        name: Any = None
        if route.startswith(f"{LIST}/"):
            name = route.removeprefix(f"{LIST}/")
        elif scope["method"] == "POST":
            try:
                request = json.loads(body)
            except (ValueError, RecursionError):
                request = None  # a router will refuse it
            name = request.get("model") if isinstance(request, dict) else None
            if name is None and isinstance(request, dict):
                raise InvalidRequest(f"model is missing: this server has {self._names}", "model")
        elif route == "/metrics":
            raise NotFound("Several models are served here: scrape Ray's own metrics, which have all of them")
        if name is None:
            return next(iter(self._routers.values()))
        if not isinstance(name, str):
            raise InvalidRequest("model must be text", "model")
        router = self._routers.get(name) or self._routers.get(name.rpartition(":")[0])  # MODEL:ADAPTER
        if router is None:
            raise NotFound(f"model is {name[:200]!r}: this server has {self._names}", "model")
        return router

    @property
    def _names(self) -> str:
        return ", ".join(map(repr, self._routers))[:200]

    async def _listed(self, key: str) -> list[dict[str, Any]]:
        """Descriptions of all models for a key; raises `Unauthenticated` if a router does not know the key."""
        accounts = [(router, router.admission.access.account(key)) for router in self._routers.values()]
        return [described for router, account in accounts for described in await router.api.listed(account)]


class ModelsReplica:
    """The ingress of several models as a deployment of Ray Serve; ``arguments`` are those of their routers."""

    @starting()
    async def __init__(self, arguments: Mapping[str, Sequence[Any]]) -> None:  # type: ignore[misc]  # Serve awaits it
        self._routers = {name: Router() for name in arguments}
        for name, router in self._routers.items():
            await router.start(*arguments[name])

    def __serve_build_asgi_app__(self) -> ASGIApp:
        """The HTTP API, for Ray Serve's proxies."""
        return Models(self._routers)

    async def __del__(self) -> None:
        await asyncio.gather(*(router.close() for router in self._routers.values()))
