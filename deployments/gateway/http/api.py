"""OpenAI's and Anthropic's APIs over HTTP, and the page."""

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from dataclasses import replace
from importlib.metadata import version
from typing import Annotated, Any, Protocol, TypeVar

from fastapi import Depends, FastAPI, Header, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import HTMLResponse, JSONResponse, Response
from fastapi.security import HTTPBearer
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware

from cascade.answer import Chunk
from cascade.capabilities import Task, room
from cascade.chat.conversation import mistake
from cascade.engine.generation import with_room
from cascade.engine.grammar import unenforced
from cascade.engine.spelling import Spelling
from cascade.engine.tokenizer import Tokenizer
from cascade.errors import KINDS, CascadeError, InvalidRequest, NotFound, Unavailable
from cascade.messages import SessionSpec
from cascade.params import MAX_SEED, SamplingParams
from deployments.gateway.admission.admission import ActiveRequest, Admission
from deployments.gateway.admission.metrics import CONTENT_TYPE
from deployments.gateway.admission.status import Refusal, refusal
from deployments.gateway.chat.assistant import LONG_PROMPT, Assistant, ChatTask
from deployments.gateway.chat.reader import TurnReader
from deployments.gateway.http import page
from deployments.gateway.http.events import Events, Reply, attended, gathered, merged, streamed, unwritten, warned
from deployments.gateway.http.messages import MessageReply, MessagesBody, PromptBody, body_of
from deployments.gateway.http.middleware import Middleware, route_of
from deployments.gateway.http.openai import (
    AnswersBody,
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    SamplingBody,
    StreamOptions,
    TokenizeBody,
)
from deployments.gateway.http.reply import CompletionReply, Echo, Form, Kind
from deployments.gateway.http.responses import ResponseReply, ResponsesBody
from deployments.gateway.threads import TEXT, in_thread

Asked = TypeVar("Asked", bound=SamplingBody)
Talking = TypeVar("Talking", ChatBody, ResponsesBody, MessagesBody)
COMPLETION_TOKENS = 16  # of a completion at most, as in OpenAI's API, if neither the request nor the model says
STARTED = int(time.time())
BEARER = HTTPBearer(auto_error=False)  # only for the schema: `Middleware` looks at the key
Timeout = Annotated[float | None, Header(alias="x-request-timeout-seconds", gt=0, allow_inf_nan=False)]
TOLD = {name: {"type": "string"} for name in ("message", "type")}  # of an error, in OpenAI's form and in Anthropic's
ERROR_BODY = {"required": ["error"], "properties": {"error": {"required": [*TOLD], "properties": TOLD}}}
RESPONSES: dict[int | str, dict[str, Any]] = {
    kind.http: {"description": kind.__doc__, "content": {"application/json": {"schema": ERROR_BODY}}}
    for kind in KINDS
    if kind.http != 500
}
STREAMED: dict[int | str, dict[str, Any]] = {
    200: {"description": "The answer", "content": {"application/json": {}, "text/event-stream": {}}}
}


class Caller:
    """The HTTP side of a request."""

    def __init__(self, request: Request, timeout_s: Timeout = None) -> None:
        self.request = request
        self.timeout_s = timeout_s
        self.id: str = request.state.request_id


Asking = Annotated[Caller, Depends()]
Replying = Callable[[Sequence[Chunk]], Reply]  # what writes the answers, given what the client has of them


class Backend(Protocol):
    """The part of the router that the API uses."""

    admission: Admission
    tokenizer: Tokenizer
    max_model_len: int
    assistant: Assistant
    defaults: dict[str, Any]  # arguments of `SamplingParams` for requests that do not give them

    @property
    def model_names(self) -> tuple[str, ...]: ...

    @property
    def chain_names(self) -> tuple[str, ...]: ...

    async def adapters(self) -> Sequence[str]: ...

    async def seek(self, adapter: str) -> bool: ...

    async def encode(self, prompt: str | Sequence[int]) -> Sequence[int]: ...

    async def admit(self, task: Task) -> SessionSpec: ...

    async def known(self, specs: Sequence[SessionSpec]) -> list[Chunk]: ...

    async def metrics(self) -> bytes: ...

    def chunks(self, spec: SessionSpec, request: ActiveRequest, index: int = 0) -> AsyncGenerator[Chunk, None]: ...


class Api:
    """The HTTP API of one router."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._admission = backend.admission
        self._spelled: asyncio.Task[Spelling] | None = None

    def application(self) -> FastAPI:
        """The ASGI application."""
        app = FastAPI(title="cascade", version=version("cascade-serve"), docs_url=None, redoc_url=None)
        app.add_middleware(Middleware, admission=self._admission)
        if origins := self._admission.access.allowed_origins:  # outside: a browser's first question has no key
            allowed: dict[str, Any] = {"allow_origins": origins, "allow_methods": ["*"], "allow_headers": ["*"]}
            app.add_middleware(CORSMiddleware, **allowed, expose_headers=["x-request-id", "retry-after", "warning"])
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
        app.post("/v1/responses", **written)(self.respond)
        app.post("/v1/messages", **written)(self.message)
        app.post("/v1/messages/count_tokens", **keyed)(self.count_tokens)
        return app

    # answered without a tier

    async def page(self) -> Response:
        """The chat page."""
        return HTMLResponse(page.html(), headers={"content-security-policy": page.POLICY})

    async def health(self) -> Response:
        """Whether requests are taken."""
        if self._admission.places.closed:
            raise Unavailable("The server is shutting down")
        return JSONResponse({"status": "ok"})

    async def metrics(self) -> Response:
        """Counters for Prometheus."""
        return Response(await self._backend.metrics(), media_type=CONTENT_TYPE)

    async def models(self, request: Request) -> Response:
        """All names of the model, and its adapters."""
        names = (*self._backend.model_names, *await self._backend.adapters())
        return JSONResponse({"object": "list", "data": [self._model(name, request) for name in names]})

    async def describe_model(self, name: str, request: Request) -> Response:
        """One of these names."""
        return JSONResponse(self._model(await self._named(name), request))

    async def tokenize(self, body: TokenizeBody) -> Response:
        """Token ids of a text or a conversation."""
        await self._named(body.model)
        if (body.prompt is None) == (body.messages is None):
            raise InvalidRequest("Give either prompt or messages", "prompt")
        if body.tools and body.messages is None:
            raise InvalidRequest("tools are given without messages: leave them out", "tools")
        if body.messages is not None:
            ids = await self._backend.assistant.encode(body.messages, body.tools, body.style)
        else:
            ids = list(await self._backend.encode(body.prompt or ""))
        return JSONResponse({"count": len(ids), "max_model_len": self._backend.max_model_len, "tokens": ids})

    async def detokenize(self, body: DetokenizeBody) -> Response:
        """The text of token ids."""
        await self._named(body.model)
        return JSONResponse({"prompt": await self._decode(body.tokens)})

    # completions

    async def complete(self, body: CompletionBody, caller: Asking) -> Any:
        """Continue one or more prompts."""
        body = await self._received(body)
        prompts, most = body.prompts, self._admission.limits.max_prompts
        if len(prompts) > most:
            raise InvalidRequest(f"prompt has {len(prompts)} prompts: this server takes {most}", "prompt")
        ids = [await self._backend.encode(prompt) for prompt in prompts]
        params = body.params({"max_tokens": COMPLETION_TOKENS} | self._backend.defaults)
        echoes = [await self._echo(*both, params) if body.echo else Echo() for both in zip(prompts, ids, strict=True)]
        form = await self._form("text", body, params, f"cmpl-{caller.id}", sum(map(len, ids)))
        repeated = [echo for echo in echoes for _ in range(body.answers)]
        unread = unenforced(params.structured)
        return await self._answer(caller, body, params, ids, lambda known: CompletionReply(form, repeated, known), unread)

    async def chat(self, body: ChatBody, caller: Asking) -> Any:
        """The assistant's next turn."""
        body, task = await self._task(body)
        form = await self._form("chat", body, task.params, f"chatcmpl-{caller.id}", len(task.ids), task.reader)
        return await self._turn(caller, body, task, lambda known: CompletionReply(form, [Echo()] * body.answers, known))

    async def respond(self, body: ResponsesBody, caller: Asking) -> Any:
        """The assistant's next turn, in the Responses API."""
        body, task = await self._task(body)
        return await self._turn(caller, body, task, lambda known: ResponseReply(body, task, caller.id, self._answering(body)))

    async def message(self, body: MessagesBody, caller: Asking) -> Any:
        """The assistant's next turn, in Anthropic's Messages API."""
        body, task = await self._task(body)
        return await self._turn(caller, body, task, lambda known: MessageReply(task, caller.id, self._answering(body)))

    async def count_tokens(self, body: PromptBody) -> Response:
        """Tokens of the prompt that a message would have."""
        await self._named(body.model)
        assistant = self._backend.assistant
        task = await assistant.task(body.as_chat(assistant.template.variables), lambda room: SamplingParams())
        return JSONResponse({"input_tokens": len(task.ids)})

    async def _received(self, body: Asked) -> Asked:
        """``body`` with the adapter that its model names, if it names one; raises `NotFound` or `InvalidRequest`."""
        self._admission.places.check()  # before the work of reading it
        named = await self._named(body.model)
        if named in self._backend.model_names:
            return body
        if body.adapter not in (None, named):
            raise InvalidRequest(
                f"model names the adapter {named!r}, and adapter is {body.adapter!r}: leave one out", "adapter"
            )
        return body.model_copy(update={"adapter": named, "model": named})

    async def _task(self, body: Talking) -> tuple[Talking, ChatTask]:
        """The body as `_received` gives it, with the task of its conversation."""
        body, assistant = await self._received(body), self._backend.assistant
        said = body.as_chat(assistant.template.variables)
        return body, await assistant.task(said, lambda room: body.params(with_room(self._backend.defaults, room)))

    async def _form(
        self,
        kind: Kind,
        body: AnswersBody,
        params: SamplingParams,
        id: str,
        prompt_tokens: int,
        reader: Callable[[], TurnReader] = TurnReader,
    ) -> Form:
        options = body.stream_options or StreamOptions()
        continuous = prompt_tokens if options.continuous_usage_stats else None
        spelling = None if params.logprobs is None else await self._spelling()
        return Form(kind, id, self._answering(body), body.history, options.include_usage, continuous, spelling, reader)

    async def _turn(self, caller: Caller, body: SamplingBody, task: ChatTask, reply: Replying) -> Any:
        return await self._answer(caller, body, task.params, [task.ids], reply, task.unread)

    async def _answer(
        self,
        caller: Caller,
        body: SamplingBody,
        params: SamplingParams,
        ids: Sequence[Sequence[int]],
        reply: Replying,
        unread: Sequence[str] = (),
    ) -> Any:
        """Admit all answers at once, then write them; a header names the fields without effect, ``unread`` among them."""
        if body.answers > self._admission.limits.max_n:
            raise InvalidRequest(f"n is {body.answers}: this server takes at most {self._admission.limits.max_n}", "n")
        specs = await self._specs(body, params, ids)
        resumes = any(len(spec.tokens) > spec.prompt_len for spec in specs)
        writer = reply(await self._backend.known(specs) if resumes else [])
        cut = body.given_limits if any(spec.params.max_tokens < params.max_tokens for spec in specs) else ()
        warning = warned({"No effect here": (*body.ignored, *unread), "Cut to what the context leaves": cut})
        asked = caller.request
        with contextlib.ExitStack() as held:
            limits = asked.state.account, caller.id, caller.timeout_s, specs
            since, train = asked.state.since, body.handling.train
            admitted = self._admission.admitted(*limits, since=since, headers=asked.headers.items(), train=train)
            active = held.enter_context(admitted)
            sources = [self._backend.chunks(spec, active, index // body.answers) for index, spec in enumerate(specs)]
            if not body.writes:
                sources = [unwritten(source) for source in sources]
            if not body.stream:
                return JSONResponse(await attended(asked.receive, gathered(writer, merged(sources))), headers=warning)
            events = streamed(writer, merged(sources))
            first = await attended(asked.receive, anext(events))  # so that what fails at once has its own status
            return Events(events, first, held.pop_all(), warning)

    async def _specs(self, body: SamplingBody, params: SamplingParams, ids: Sequence[Sequence[int]]) -> list[SessionSpec]:
        """One for each answer, as long as there is room for; several answers have consecutive seeds."""
        params, specs, known = params.seeded(), list[SessionSpec](), iter(body.known(len(ids) * body.answers))
        assert params.seed is not None
        for prompt in ids:
            left = room(len(prompt), self._backend.max_model_len, body.PROMPT)
            for index in range(body.answers):
                seed, most = (params.seed + index) % (MAX_SEED + 1), min(params.max_tokens, left)
                task = Task(prompt, replace(params, seed=seed, max_tokens=most), body.drafts, body.handling, next(known))
                specs.append(await self._backend.admit(task))
        return specs

    async def _echo(self, prompt: str | Sequence[int], ids: Sequence[int], params: SamplingParams) -> Echo:
        """The prompt to repeat, with the offsets of its tokens if log-probabilities are asked for."""
        text = prompt if isinstance(prompt, str) else await self._decode(prompt)
        if params.prompt_logprobs is None:
            return Echo(text)
        begins = await in_thread(TEXT, self._backend.tokenizer.begins, ids)
        return Echo(text, tuple(min(begin, len(text)) for begin in begins))

    async def _decode(self, ids: Sequence[int]) -> str:
        most = self._backend.tokenizer.num_ids
        wrong = next((token for token in ids if token >= most), None)
        if wrong is not None:
            raise InvalidRequest(f"Token id {wrong} is out of range: ids go from 0 to {most - 1}", "prompt")
        decode = self._backend.tokenizer.decode
        return decode(ids) if len(ids) < LONG_PROMPT else await in_thread(TEXT, decode, ids)

    async def _spelling(self) -> Spelling:
        """What tokens spell; it takes up to a second where it is asked for first."""
        if self._spelled is None:
            self._spelled = asyncio.create_task(in_thread(TEXT, Spelling, self._backend.tokenizer))
        return await asyncio.shield(self._spelled)

    def _answering(self, body: SamplingBody) -> str:
        """The model's name, or the adapter's if the request named it as its model."""
        return body.model if body.model and body.model == body.adapter else self._backend.model_names[0]

    async def _named(self, name: str | None) -> str:
        """``name`` if the model or an adapter has it, and ADAPTER for Ray Serve LLM's MODEL:ADAPTER; raises `NotFound`."""
        backend = self._backend
        if name is None or name in backend.model_names:
            return name or backend.model_names[0]
        model, _, adapter = name.rpartition(":")
        named = adapter if model in backend.model_names else name
        if not await backend.seek(named):
            known = ", ".join(map(repr, (*backend.model_names, *await backend.adapters())))
            raise NotFound(f"model is {name[:200]!r}: this server has {known[:200]}", "model")
        return named

    def _model(self, name: str, request: Request) -> dict[str, Any]:
        """OpenAI's description of a model, with tiers, context length, and the limits of the caller's key."""
        backend, account = self._backend, request.state.account
        key = {"name": account.name, **account.limits.model_dump()}
        chat = backend.tokenizer.chat_template is not None
        ours = {
            "tiers": backend.chain_names,
            "max_model_len": backend.max_model_len,
            "chat": chat,
            "key": key,
            "sampling": backend.defaults,
        }
        parent = None if name in backend.model_names else backend.model_names[0]
        return {"id": name, "object": "model", "created": STARTED, "owned_by": "cascade", "parent": parent, **ours}

    # errors

    async def _refused(self, request: Request, error: Exception) -> Response:
        refused = refusal(error)
        return self._refusal(request, refused, refused.kind.http, dict(refused.metadata))

    async def _malformed(self, request: Request, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError)
        param, message = mistake(error.errors())
        refused = replace(refusal(InvalidRequest(message)), param=param)
        return self._refusal(request, refused, refused.kind.http)

    async def _no_route(self, request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        if error.status_code == 404:
            return await self._refused(request, NotFound(f"There is no {request.url.path[:200]!r} here"))
        refused = refusal(InvalidRequest(f"{request.method} {request.url.path[:200]!r}: {error.detail}"))
        return self._refusal(request, refused, error.status_code, error.headers)

    def _refusal(self, request: Request, refused: Refusal, status: int, headers: Mapping[str, str] | None = None) -> Response:
        self._admission.refused(refused, request.state.request_id, getattr(request.state, "account", None))
        return JSONResponse(body_of(refused, route_of(request.scope)), status, headers)
