"""OpenAI's API over HTTP, and the page."""

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any, Literal, Protocol

from fastapi import Depends, FastAPI, Header, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import HTMLResponse, JSONResponse, Response
from fastapi.security import HTTPBearer
from starlette.exceptions import HTTPException

from cascade.answer import Chunk
from cascade.engine.tokenizer import Tokenizer
from cascade.errors import CascadeError, InvalidRequest, NotFound, Unavailable
from cascade.messages import Open
from cascade.params import MAX_SEED, Handling, SamplingParams, Speculation
from deployments.admission.front import Call, Front
from deployments.admission.metrics import CONTENT_TYPE
from deployments.admission.status import mistake, refusal
from deployments.chat.assistant import LONG_PROMPT, Assistant
from deployments.chat.reader import TurnReader
from deployments.http.merge import gathered, merged, streamed
from deployments.http.middleware import Events, Guard, attended
from deployments.http.openai import (
    DEFAULT_COMPLETION_TOKENS,
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    SamplingBody,
    TokenizeBody,
)
from deployments.http.reply import Echo, Form

PAGE = Path(__file__).with_name("page.html")
PAGE_POLICY = "; ".join(
    (
        "default-src 'none'",
        "style-src 'unsafe-inline'",
        "script-src 'unsafe-inline'",
        "connect-src 'self'",
        "img-src data:",
        "base-uri 'none'",
    )
)
STARTED = int(time.time())
BEARER = HTTPBearer(auto_error=False)  # for the schema; `Guard` asks for the key
Timeout = Annotated[float | None, Header(alias="x-request-timeout-seconds", gt=0, allow_inf_nan=False)]
REFUSALS = {
    400: "The request cannot be honoured",
    401: "No known API key",
    404: "No such model or path",
    413: "Too large",
    429: "Overloaded: try again after Retry-After seconds",
    499: "Aborted",
    503: "No replica, or shutting down",
    504: "Deadline exceeded",
}
ERROR_BODY = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": "string"},
            },
        }
    },
}
RESPONSES: dict[int | str, dict[str, Any]] = {
    status: {"description": text, "content": {"application/json": {"schema": ERROR_BODY}}} for status, text in REFUSALS.items()
}
STREAMED: dict[int | str, dict[str, Any]] = {
    200: {"description": "The answer", "content": {"application/json": {}, "text/event-stream": {}}}
}


class Engine(Protocol):
    """What of the router the API needs."""

    front: Front
    tokenizer: Tokenizer
    max_model_len: int
    assistant: Assistant

    @property
    def model(self) -> str: ...

    @property
    def names(self) -> tuple[str, ...]: ...

    async def check(self, params: SamplingParams) -> None: ...
    async def observe(self) -> None: ...

    def opening(
        self, ids: Sequence[int], params: SamplingParams, speculation: Speculation, handling: Handling = Handling()
    ) -> Open: ...

    def chunks(self, opening: Open, call: Call, index: int = 0) -> AsyncGenerator[Chunk, None]: ...


class Api:
    """Answers of one engine."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._front = engine.front

    def application(self) -> FastAPI:
        """The ASGI application."""
        app = FastAPI(title="cascade", version=version("cascade-serve"), docs_url=None, redoc_url=None)
        app.add_middleware(Guard, front=self._front)
        app.add_exception_handler(RequestValidationError, self._malformed)
        app.add_exception_handler(HTTPException, self._no_route)
        app.add_exception_handler(CascadeError, self._refused)
        open_: dict[str, Any] = {"response_model": None}
        keyed: dict[str, Any] = {"response_model": None, "responses": RESPONSES, "dependencies": [Depends(BEARER)]}
        written: dict[str, Any] = {**keyed, "responses": RESPONSES | STREAMED}
        app.get("/", include_in_schema=False, **open_)(self.page)
        app.get("/metrics", include_in_schema=False, **open_)(self.metrics)
        app.get("/health", responses={503: RESPONSES[503]}, **open_)(self.health)
        for path, answer in (("/", self.page), ("/health", self.health)):  # as load balancers ask
            app.head(path, include_in_schema=False, **open_)(answer)
        app.get("/v1/models", **keyed)(self.models)
        app.get("/v1/models/{name:path}", **keyed)(self.describe_model)
        app.post("/tokenize", **keyed)(self.tokenize)
        app.post("/detokenize", **keyed)(self.detokenize)
        app.post("/v1/completions", **written)(self.complete)
        app.post("/v1/chat/completions", **written)(self.chat)
        return app

    # what needs no tier

    async def page(self) -> Response:
        """The page to look at."""
        return HTMLResponse(PAGE.read_text(encoding="utf-8"), headers={"content-security-policy": PAGE_POLICY})

    async def health(self) -> Response:
        """Whether requests are taken."""
        if self._front.gate.closed:
            raise Unavailable("The server is shutting down")
        return JSONResponse({"status": "ok"})

    async def metrics(self) -> Response:
        """Counters for Prometheus."""
        await self._engine.observe()
        return Response(self._front.metrics.text(), media_type=CONTENT_TYPE)

    async def models(self) -> Response:
        """What is served."""
        return JSONResponse({"object": "list", "data": [self._model()]})

    async def describe_model(self, name: str) -> Response:
        """The model, if it is this one."""
        self._check_model(name)
        return JSONResponse(self._model())

    async def tokenize(self, body: TokenizeBody) -> Response:
        """Token ids of a text or a conversation."""
        self._check_model(body.model)
        if (body.prompt is None) == (body.messages is None):
            raise InvalidRequest("Give either prompt or messages")
        if body.tools is not None and body.messages is None:
            raise InvalidRequest("tools are given without messages: leave them out")
        if body.messages is not None:
            ids = await self._engine.assistant.encode(body.messages, body.tools, body.style)
        else:
            ids = await self._encode(body.prompt or "")
        return JSONResponse({"count": len(ids), "max_model_len": self._engine.max_model_len, "tokens": ids})

    async def detokenize(self, body: DetokenizeBody) -> Response:
        """The text of token ids."""
        self._check_model(body.model)
        return JSONResponse({"prompt": await self._decode(body.tokens)})

    # completions

    async def complete(self, body: CompletionBody, request: Request, timeout_s: Timeout = None) -> Any:
        """Go on with one or more prompts."""
        self._front.gate.check()  # before the work of reading it
        prompts = self._prompts(body)
        ids = [await self._encode(prompt) if isinstance(prompt, str) else list(prompt) for prompt in prompts]
        params = body.params(body.max_tokens or DEFAULT_COMPLETION_TOKENS)
        echoes = [await self._echo(*both, params) if body.echo else Echo() for both in zip(prompts, ids, strict=True)]
        return await self._answer("text", body, params, ids, echoes, request, timeout_s)

    async def chat(self, body: ChatBody, request: Request, timeout_s: Timeout = None) -> Any:
        """The assistant's next turn."""
        self._front.gate.check()
        task = await self._engine.assistant.task(body, lambda room: body.params(body.limit or room))
        return await self._answer("chat", body, task.params, [task.ids], [Echo()], request, timeout_s, task.reader)

    async def _answer(
        self,
        kind: Literal["chat", "text"],
        body: SamplingBody,
        params: SamplingParams,
        ids: Sequence[list[int]],
        echoes: Sequence[Echo],
        request: Request,
        timeout_s: float | None,
        reader: Callable[[], TurnReader] | None = None,
    ) -> Any:
        """Admit everything at once, then write it, whole or in pieces."""
        self._check_model(body.model)
        if body.answers > self._front.limits.max_n:
            raise InvalidRequest(f"n is {body.answers}: this server takes at most {self._front.limits.max_n}")
        if body.stream_options is not None and not body.stream:
            raise InvalidRequest("stream_options is given without stream: set stream to true")
        if body.watch and not body.stream:
            raise InvalidRequest("watch is given without stream: set stream to true")
        await self._engine.check(params)
        openings = self._openings(body, params, ids)
        id = f"{'chatcmpl' if kind == 'chat' else 'cmpl'}-{request.state.request_id}"
        usage = body.stream_options is not None and body.stream_options.include_usage
        name = None if params.logprobs is None else self._name
        form = Form(kind, id, self._engine.model, history=body.history, usage=usage, name=name, reader=reader)
        echoes = [echo for echo in echoes for _ in range(body.answers)]
        with contextlib.ExitStack() as held:
            said = request.state
            admitted = self._front.call(said.account, said.request_id, timeout_s, len(openings), since=said.since)
            call = held.enter_context(admitted)
            sources = [self._engine.chunks(opening, call, index // body.answers) for index, opening in enumerate(openings)]
            if not body.stream:
                return JSONResponse(await attended(request.receive, gathered(form, merged(sources), echoes)))
            events = streamed(form, merged(sources), echoes)
            first = await attended(request.receive, anext(events))  # so that what fails at once has its own status
            return Events(events, first, held.pop_all())

    def _openings(self, body: SamplingBody, params: SamplingParams, ids: Sequence[list[int]]) -> list[Open]:
        """One for each answer; the seeds of several answers follow each other."""
        params = params.seeded()
        assert params.seed is not None
        seeds = [(params.seed + index) % (MAX_SEED + 1) for index in range(body.answers)]
        drafts, handling = body.drafts(), body.handling()
        asked = [(prompt, replace(params, seed=seed)) for prompt in ids for seed in seeds]
        return [self._engine.opening(prompt, one, drafts, handling) for prompt, one in asked]

    def _prompts(self, body: CompletionBody) -> Sequence[str | Sequence[int]]:
        prompts = body.prompts
        if len(prompts) > self._front.limits.max_prompts:
            raise InvalidRequest(f"prompt has {len(prompts)} prompts: this server takes {self._front.limits.max_prompts}")
        return prompts

    async def _encode(self, text: str) -> list[int]:
        self._front.check_length(len(text))
        tokenizer = self._engine.tokenizer
        return tokenizer.encode(text) if len(text) < LONG_PROMPT else await asyncio.to_thread(tokenizer.encode, text)

    async def _echo(self, prompt: str | Sequence[int], ids: Sequence[int], params: SamplingParams) -> Echo:
        """The prompt to repeat, with the places of its tokens if log-probabilities are asked for."""
        text = prompt if isinstance(prompt, str) else await self._decode(prompt)
        if params.prompt_logprobs is None:
            return Echo(text)
        begins = await asyncio.to_thread(self._engine.tokenizer.begins, ids)
        return Echo(text, tuple(min(begin, len(text)) for begin in begins))

    async def _decode(self, ids: Sequence[int]) -> str:
        most = self._engine.tokenizer.num_ids
        wrong = next((token for token in ids if token >= most), None)
        if wrong is not None:
            raise InvalidRequest(f"Token id {wrong} is out of range: ids go from 0 to {most - 1}")
        decode = self._engine.tokenizer.decode
        return decode(ids) if len(ids) < LONG_PROMPT else await asyncio.to_thread(decode, ids)

    def _name(self, token: int) -> str:
        """The text of one token, special ones too."""
        return str(self._engine.tokenizer.backend.decode([token], skip_special_tokens=False))

    def _check_model(self, name: str | None) -> None:
        if name is not None and name != self._engine.model:
            raise NotFound(f"model is {name[:200]!r}: this server has {self._engine.model!r}")

    def _model(self) -> dict[str, Any]:
        engine = self._engine
        tiers = {"tiers": engine.names, "max_model_len": engine.max_model_len}
        return {"id": engine.model, "object": "model", "created": STARTED, "owned_by": "cascade", **tiers}

    # errors

    async def _refused(self, request: Request, error: Exception) -> Response:
        refused = refusal(error)
        self._front.metrics.refused(refused.status.code)
        return JSONResponse(refused.body, refused.status.http, dict(refused.metadata))

    async def _malformed(self, request: Request, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError)
        param, message = mistake(error.errors())
        refused = replace(refusal(InvalidRequest(message)), param=param)
        self._front.metrics.refused(refused.status.code)
        return JSONResponse(refused.body, refused.status.http)

    async def _no_route(self, request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        if error.status_code == 404:
            return await self._refused(request, NotFound(f"There is no {request.url.path[:200]!r} here"))
        refused = refusal(InvalidRequest(f"{request.method} {request.url.path[:200]!r}: {error.detail}"))
        self._front.metrics.refused(refused.status.code)
        return JSONResponse(refused.body, error.status_code, error.headers)
