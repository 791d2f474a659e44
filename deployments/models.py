"""Several models behind one HTTP API: a request goes to the router of the model that it names."""

import asyncio
import json
from collections.abc import Mapping, Sequence
from typing import Any

from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from cascade.errors import InvalidRequest, NotFound, Unauthenticated
from cascade.settings.router import RequestLimits
from deployments.gateway.admission.status import refusal
from deployments.gateway.http.events import ClientLeft
from deployments.gateway.http.middleware import CODING, authorization, read_body, refused_response, replay, route_of
from deployments.replica import join_serves, starting
from deployments.router import Router

LIST = "/v1/models"
BOUNDS = ("max_body_bytes", "body_timeout_s")  # limits of a body, before it is known which router it is for


class Models:
    """Routers of one process, by the names of their models, as one ASGI application."""

    def __init__(self, routers: Mapping[str, Router]) -> None:
        self._routers = dict(routers)
        admissions = [router.admission for router in routers.values()]
        self._access = [admission.access for admission in admissions]
        widest = {name: max(getattr(admission.limits, name) for admission in admissions) for name in BOUNDS}
        self._limits = RequestLimits(**widest)  # what no router takes is not read

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request, or refuse it in the form of the API that its path belongs to."""
        if scope["type"] != "http":
            return
        try:
            if scope["method"] == "POST":
                self._check_key(scope)
            body = await read_body(scope, receive, self._limits)
            if route_of(scope) == LIST:
                await self._list(scope, receive, send)
                return
            router = self._chosen(scope, body)
        except ClientLeft:
            return
        except Exception as error:
            await refused_response(refusal(error), scope)(scope, receive, send)
            return
        decoded = [pair for pair in scope["headers"] if pair[0] != CODING]
        await router.http({**scope, "headers": decoded}, replay(body, receive), send)

    def _check_key(self, scope: Scope) -> None:
        """Raise `Unauthenticated` if no router knows the key of a request; the one that it is for looks again."""
        refusals = []
        for access in self._access:
            try:
                access.account(authorization(dict(scope["headers"])))
                return
            except Unauthenticated as error:
                refusals.append(error)
        raise refusals[0]

    def _chosen(self, scope: Scope, body: bytes) -> Router:
        """The router of the model that a request names, in its path or its body; raises `NotFound` or `InvalidRequest`.

        Any router answers what is the same for all models, such as the page.
        """
        route = route_of(scope)
        name: Any = None
        if route.startswith(f"{LIST}/"):
            name = route.removeprefix(f"{LIST}/")
        elif scope["method"] == "POST":
            try:
                request = json.loads(body)
            except (ValueError, RecursionError):
                request = None  # a router refuses it
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

    async def _list(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer with the models of all routers, or with the first refusal."""
        answers = [await _answer(router.http, scope, receive) for router in self._routers.values()]
        refused = next((answer for answer in answers if answer[0] != 200), None)
        listed = [model for _, answer in answers for model in answer.get("data", ())]
        status, document = refused or (200, {"object": "list", "data": listed})
        await JSONResponse(document, status)(scope, receive, send)


async def _answer(application: ASGIApp, scope: Scope, receive: Receive) -> tuple[int, dict[str, Any]]:
    """Status and document by which ``application`` answers a request without a body."""
    messages: list[Message] = []

    async def take(message: Message) -> None:
        messages.append(message)

    await application({**scope, "state": {}}, replay(b"", receive), take)
    return messages[0]["status"], json.loads(b"".join(message.get("body", b"") for message in messages))


class ModelsReplica:
    """The ingress of several models as a deployment of Ray Serve; ``arguments`` are those of their routers."""

    @starting()
    async def __init__(self, arguments: Mapping[str, Sequence[Any]]) -> None:  # type: ignore[misc]  # Serve awaits it
        join_serves()
        self._routers = {name: Router() for name in arguments}
        for name, router in self._routers.items():
            await router.start(*arguments[name])

    def __serve_build_asgi_app__(self) -> ASGIApp:
        """The HTTP API, for Ray Serve's proxies."""
        return Models(self._routers)

    async def __del__(self) -> None:
        await asyncio.gather(*(router.close() for router in self._routers.values()))
