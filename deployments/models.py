"""Several models behind one HTTP API: a request goes to the router of the model that it names."""

import asyncio
import json
from collections.abc import AsyncGenerator, Mapping, MutableMapping
from typing import Any

from ray.exceptions import RayError
from ray.serve.exceptions import BackPressureError, RayServeException
from ray.serve.handle import DeploymentHandle
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from cascade.errors import InvalidRequest, NotFound, Overloaded, Unauthenticated, Unavailable
from cascade.settings.router import RequestLimits, RouterConfig
from deployments.gateway.admission.access import Access
from deployments.gateway.admission.status import refusal
from deployments.gateway.http.events import ClientLeft, attended
from deployments.gateway.http.messages import body_of
from deployments.gateway.http.middleware import CODING, authorization, read_body, replay, route_of
from deployments.replica import join_serves

CARRIED = ("type", "asgi", "http_version", "method", "scheme", "path", "raw_path", "query_string", "root_path", "headers")
LIST = "/v1/models"
BOUNDS = ("max_body_bytes", "body_timeout_s")  # limits of a body, before it is known which router it is for


class Models:
    """The ingress of several models: forwards requests to their ``routers``, by the name of the model. Stateless."""

    def __init__(self, routers: Mapping[str, DeploymentHandle], configs: Mapping[str, Mapping[str, Any]]) -> None:
        """``configs`` are of the routers, by the names of their models: what none of them takes is not read."""
        join_serves()
        self._routers = dict(routers)
        parsed = [RouterConfig.model_validate(config) for config in configs.values()]
        widest = {name: max(getattr(config.limits, name) for config in parsed) for name in BOUNDS}
        self._limits = RequestLimits(**widest)
        self._access = [Access(config.access) for config in parsed]

    def __serve_build_asgi_app__(self) -> ASGIApp:
        """The HTTP API, for Ray Serve's proxies."""

        async def application(scope: Scope, receive: Receive, send: Send) -> None:  # no method, which Uvicorn takes for ASGI 2
            await self._answer(scope, receive, send)

        return application

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request, or refuse it in the form of the API that its path belongs to."""
        if scope["type"] != "http":
            return
        started = False

        async def noting(message: Message) -> None:
            nonlocal started
            started = True
            await send(message)

        try:
            if scope["method"] == "POST":
                self._check_key(scope)
            body = await read_body(scope, receive, self._limits)
            if route_of(scope) == LIST:
                await self._list(scope, receive, noting)
            else:
                await attended(receive, self._forward(self._chosen(scope, body), scope, body, noting))
        except ClientLeft:
            pass
        except Exception as error:
            if started:  # a stream that breaks off tells its client that it is not whole
                raise
            refused = refusal(_shown(error))
            await JSONResponse(body_of(refused, route_of(scope)), refused.kind.http, dict(refused.metadata))(
                scope, receive, send
            )

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

    def _chosen(self, scope: Scope, body: bytes) -> DeploymentHandle:
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

    async def _forward(self, router: DeploymentHandle, scope: Scope, body: bytes, send: Send) -> None:
        """Forward a request to a router, and its answer to the client; one that leaves ends the request there, too."""
        carried = {key: scope[key] for key in CARRIED if key in scope}
        carried["headers"] = [pair for pair in scope["headers"] if pair[0] != CODING]  # the body is decoded
        answer = router.options(stream=True).relay.remote(carried, body)
        try:
            async for message in answer:
                await send(message)
        finally:
            answer.cancel()

    async def _list(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer with the models of all routers, or with the first refusal."""
        answers = await asyncio.gather(*(self._whole(router, scope) for router in self._routers.values()))
        refused = next((answer for answer in answers if answer[0] != 200), None)
        listed = [model for _, answer in answers for model in answer.get("data", ())]
        status, document = refused or (200, {"object": "list", "data": listed})
        await JSONResponse(document, status)(scope, receive, send)

    async def _whole(self, router: DeploymentHandle, scope: Scope) -> tuple[int, dict[str, Any]]:
        status, content = 0, b""

        async def take(message: Message) -> None:
            nonlocal status, content
            status = message.get("status", status)
            content += message.get("body", b"")

        await self._forward(router, scope, b"", take)
        return status, json.loads(content)


def _shown(error: Exception) -> Exception:
    """The error that the client gets; a router that is gone or full is unavailable."""
    if isinstance(error, BackPressureError):
        return Overloaded("The router of this model has too many requests: try again")
    if isinstance(error, RayError | RayServeException):
        return Unavailable("The router of this model is gone: ask again")
    return error


async def relayed(application: ASGIApp, scope: MutableMapping[str, Any], body: bytes) -> AsyncGenerator[Message, None]:
    """ASGI messages by which ``application`` answers a request with this body; closing the iterator is a client that leaves."""
    messages: asyncio.Queue[Message | None] = asyncio.Queue()

    async def gone() -> Message:
        await asyncio.get_running_loop().create_future()  # whoever asks is cancelled with the call
        raise AssertionError

    task = asyncio.ensure_future(application(scope, replay(body, gone), messages.put))
    task.add_done_callback(lambda _: messages.put_nowait(None))
    try:
        while (message := await messages.get()) is not None:
            yield message
        await task
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
