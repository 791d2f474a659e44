"""Before the application: keys, limits of bodies in size and time, clients that leave.

Bodies are parsed as JSON more strictly than Python does: UTF-8, no repeated names in an object, no lone surrogates.
"""

import asyncio
import gzip
import io
import json
import re
import time
import zlib
from collections import Counter
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any

from fastapi import Request, Response
from fastapi.routing import APIRoute
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from cascade.errors import CascadeError, DeadlineExceeded, InvalidRequest, TooLarge, UnsupportedMedia
from cascade.messages import mint
from cascade.params import LONE_SURROGATE
from cascade.settings.router import RequestLimits
from deployments.gateway.admission.admission import Admission, fits, metadata, refusal
from deployments.gateway.http.events import ClientLeft
from deployments.gateway.http.messages import PATH, message_error
from deployments.gateway.http.reply import error_body

HEALTH = "/health"  # needs no key
PAGE = "/"  # here a browser asks for the key as a password
BASIC = (("www-authenticate", 'Basic realm="cascade: an API key as password"'),)

CODING = b"content-encoding"
SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")  # JSON's escape of half a character


class Middleware:
    """Checks the key, reads the body, and puts a request's account, id and time of arrival into its state.

    Starlette's own `RequestBodyLimitMiddleware` also limits the body, but answers in plain text. OpenAI's clients, and our
    metrics, need the error in the form of `refusal`.
    """

    def __init__(self, app: ASGIApp, admission: Admission) -> None:
        self._application = app
        self._admission = admission

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._application(scope, receive, send)
            return
        headers = {name: value.decode("latin-1") for name, value in scope["headers"]}
        named = headers.get(b"x-request-id", "")
        request_id, begun = named if fits(named) else mint(), False
        state = scope.setdefault("state", {})
        state["request_id"] = request_id

        async def reply(message: Message) -> None:
            nonlocal begun
            if message["type"] == "http.response.start":
                begun = True
                message["headers"] = [*message.get("headers", ()), (b"x-request-id", request_id.encode())]
            await send(message)

        try:
            route, access = route_of(scope), self._admission.access
            if route != HEALTH and not (route == "/metrics" and access.config.open_metrics):  # before the body is read
                state["account"] = access.account(authorization(dict(scope["headers"])))
            body = await read_body(scope, receive, self._admission.limits)
            state["since"] = time.monotonic()
            await self._application(scope, replay(body, receive), reply)
        except ClientLeft:
            pass
        except Exception as error:
            refused = refusal(error)
            self._admission.refused(refused, request_id, state.get("account"))
            if not begun:
                await refused_response(refused, scope)(scope, receive, reply)


def authorization(headers: Mapping[bytes, bytes]) -> str:
    """The authorization header, also if the key comes in the header of Anthropic's clients; "" without a key."""
    key = headers.get(b"x-api-key")
    return headers.get(b"authorization", b"" if key is None else b"Bearer " + key).decode("latin-1")


def route_of(scope: Mapping[str, Any]) -> str:
    """The path of a request after the application's route prefix, which Ray Serve puts into both entries."""
    return str(scope["path"]).removeprefix(scope.get("root_path", ""))


def refused_response(error: CascadeError, scope: Mapping[str, Any]) -> JSONResponse:
    """The error in the form of the API that was called; a browser gets a request for a password."""
    path = route_of(scope)
    headers = BASIC if path == PAGE and error.http == 401 else metadata(error)
    body = message_error(error) if path.startswith(PATH) else error_body(error)
    return JSONResponse(body, error.http, dict(headers))


async def read_body(scope: Mapping[str, Any], receive: Receive, limits: RequestLimits) -> bytes:
    """The whole body, decoded; raises `TooLarge`, `UnsupportedMedia`, `DeadlineExceeded` or `ClientLeft`."""
    most = limits.max_body_bytes
    coding = dict(scope["headers"]).get(CODING, b"").decode("latin-1").strip().lower()
    if coding not in ("", "identity", "gzip"):
        raise UnsupportedMedia(f"Content-Encoding is {coding[:60]!r}: send the body as it is, or with gzip")
    length = dict(scope["headers"]).get(b"content-length", b"0")
    if length.isdigit() and int(length[:20]) > most:
        raise TooLarge(f"The body has {int(length[:20])} bytes: this server reads at most {most}")
    body = bytearray()
    try:
        async with asyncio.timeout(limits.body_timeout_s):
            while True:
                message = await receive()
                if message["type"] == "http.disconnect":
                    raise ClientLeft
                body += message.get("body", b"")
                if len(body) > most:
                    raise TooLarge(f"The body has more than {most} bytes: this server reads no more")
                if not message.get("more_body"):
                    return unzipped(body, most) if coding == "gzip" else bytes(body)
    except TimeoutError:
        raise DeadlineExceeded(f"The body did not come within {limits.body_timeout_s:g} s") from None


def unzipped(body: bytes | bytearray, most: int) -> bytes:
    """Unpack a gzip file of at most ``most`` bytes of content; raises `TooLarge` or `InvalidRequest`."""
    try:
        content = gzip.GzipFile(fileobj=io.BytesIO(body)).read(most + 1)
    except (OSError, EOFError, zlib.error):
        raise InvalidRequest("The body is not a complete gzip file, as Content-Encoding says") from None
    if len(content) > most:
        raise TooLarge(f"The body has more than {most} bytes once it is unpacked: this server reads no more")
    return content


def replay(body: bytes, receive: Receive) -> Receive:
    """A `receive` that returns ``body`` first."""
    waiting = [body]

    async def first() -> Message:
        if waiting:
            return {"type": "http.request", "body": waiting.pop(), "more_body": False}
        return await receive()

    return first


class JsonRoute(APIRoute):
    """A route that parses its body with `parsed`."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()

        async def strictly(request: Request) -> Response:
            return await handle(_JsonRequest(request.scope, request.receive))

        return strictly


class _JsonRequest(Request):
    async def json(self) -> Any:
        return parsed(await self.body())


def parsed(body: bytes) -> Any:
    """The value of a body; raises `json.JSONDecodeError`, whose message says what is wrong."""
    try:
        text = body.decode("utf-8-sig")
        value = json.loads(text, object_pairs_hook=_object)
        if SURROGATE.search(text):
            json.dumps(value, ensure_ascii=False).encode()
        return value
    except json.JSONDecodeError:
        raise
    except UnicodeDecodeError:
        reason = "it is not in UTF-8"
    except UnicodeEncodeError:
        reason = LONE_SURROGATE
    except (ValueError, RecursionError):
        reason = "it is nested too deeply, or a number has too many digits"
    raise json.JSONDecodeError(reason, "", 0)


def _object(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    members = dict(pairs)
    if len(members) < len(pairs):  # Python would silently take the last one
        [(twice, _)] = Counter(name for name, _ in pairs).most_common(1)
        raise json.JSONDecodeError(f"{twice[:60]!r} is given twice", "", 0)
    return members
