"""Several models behind one HTTP API: a request goes to the router of the model that it names."""

import asyncio
import json
from collections.abc import Mapping, Sequence
from typing import Any

from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from cascade.errors import InvalidRequest, NotFound, Unauthenticated
from cascade.settings.router import RequestLimits
from deployments.gateway.admission.admission import refusal
from deployments.gateway.http.events import ClientLeft
from deployments.gateway.http.middleware import CODING, authorization, read_body, refused_response, replay, route_of
from deployments.replica import starting
from deployments.router import Router

LIST = "/v1/models"
BOUNDS = ("max_body_bytes", "body_timeout_s")  # limits of a body before its router is known


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
