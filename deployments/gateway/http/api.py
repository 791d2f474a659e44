"""OpenAI's and Anthropic's APIs over HTTP, and the chat page."""

import contextlib
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any, TypeVar

from fastapi import Depends, FastAPI, Header, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import HTMLResponse, JSONResponse, Response
from fastapi.security import HTTPBearer
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware

from cascade.chat.conversation import mistake
from cascade.engine.grammar import unenforced
from cascade.engine.spelling import Spelling
from cascade.errors import KINDS, CascadeError, InvalidRequest, NotFound, Unavailable
from cascade.messages import SessionSpec, room
from cascade.params import MAX_SEED, SamplingParams
from deployments.full_tier import FullTier
from deployments.gateway.admission.access import Account
from deployments.gateway.admission.admission import Admission, Caller, refusal
from deployments.gateway.admission.metrics import CONTENT_TYPE
from deployments.gateway.chat.assistant import Assistant, ChatTask
from deployments.gateway.http.events import Events, Reply, attended, gathered, merged, streamed, unwritten, warned
from deployments.gateway.http.messages import MessageReply, MessagesBody, PromptBody
from deployments.gateway.http.middleware import JsonRoute, Middleware, refused_response
from deployments.gateway.http.openai import ChatBody, CompletionBody, DetokenizeBody, SamplingBody, TokenizeBody
from deployments.gateway.http.reply import CompletionReply, Echo
from deployments.gateway.http.responses import ResponseReply, ResponsesBody
from deployments.gateway.model import ServedModel, reading

AnyBody = TypeVar("AnyBody", bound=SamplingBody)
TurnBody = TypeVar("TurnBody", ChatBody, ResponsesBody, MessagesBody)
COMPLETION_TOKENS = 16  # default limit of completions, as in OpenAI's API, if the model has none
STARTED = int(time.time())
FOLDER = Path(__file__).parent
POLICY = (  # of the chat page, which loads nothing from other hosts
    "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'; "
    "img-src data:; base-uri 'none'"
)
BEARER = HTTPBearer(auto_error=False)  # only for the schema: `Middleware` checks the key
Timeout = Annotated[float | None, Header(alias="x-request-timeout-seconds", gt=0, allow_inf_nan=False)]
ERROR_FIELDS = {name: {"type": "string"} for name in ("message", "type")}  # fields of both OpenAI's and Anthropic's errors
ERROR_BODY = {"required": ["error"], "properties": {"error": {"required": [*ERROR_FIELDS], "properties": ERROR_FIELDS}}}
RESPONSES: dict[int | str, dict[str, Any]] = {
    kind.http: {"description": kind.__doc__, "content": {"application/json": {"schema": ERROR_BODY}}}
    for kind in KINDS
    if kind.http != 500
}
KINDS_OF_ANSWERS: dict[str, Any] = {"application/json": {}, "text/event-stream": {}}
STREAMED: dict[int | str, dict[str, Any]] = {200: {"description": "The answer", "content": KINDS_OF_ANSWERS}}


class Call:
    """The HTTP side of a request for answers."""

    def __init__(self, request: Request, timeout_s: Timeout = None) -> None:
        state, headers = request.state, request.headers.items()
        self.id: str = state.request_id
        self.caller = Caller(state.account, self.id, state.since, headers, timeout_s)
        self.receive = request.receive


HttpCall = Annotated[Call, Depends()]


class HttpApi:
    """The HTTP API of one router."""

    def __init__(self, model: ServedModel, assistant: Assistant, admission: Admission, full: FullTier) -> None:
        self._model = model
        self._assistant = assistant
        self._admission = admission
        self._full = full

    def application(self) -> FastAPI:
        """The ASGI application."""
        app = FastAPI(title="cascade", version=version("cascade-serve"), docs_url=None, redoc_url=None)
        app.router.route_class = JsonRoute
        app.add_middleware(Middleware, admission=self._admission)
        if origins := self._admission.access.config.allowed_origins:  # outermost: a browser's preflight has no key
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
        for path, answer in (("/", self.page), ("/health", self.health)):  # for load balancers
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

    # routes that need no tier

    async def page(self) -> Response:
        """The chat page."""
        return HTMLResponse(chat_page(), headers={"content-security-policy": POLICY})

    async def health(self) -> Response:
        """Whether requests are taken."""
        if self._admission.places.closed:
            raise Unavailable("The server is shutting down")
        return JSONResponse({"status": "ok"})

    async def metrics(self) -> Response:
        """Counters for Prometheus."""
        return Response(self._admission.metrics.text(), media_type=CONTENT_TYPE)

    async def models(self, request: Request) -> Response:
        """All names of the model and of its adapters."""
        return JSONResponse({"object": "list", "data": await self.listed(request.state.account)})

    async def describe_model(self, name: str, request: Request) -> Response:
        """One of these names."""
        return JSONResponse(self._described(await self._model.adapter(name) or name, request.state.account))

    async def tokenize(self, body: TokenizeBody) -> Response:
        """Token ids of a text or a conversation."""
        await self._model.adapter(body.model)
        if (body.prompt is None) == (body.messages is None):
            raise InvalidRequest("Give either prompt or messages", "prompt")
        if body.tools and body.messages is None:
            raise InvalidRequest("tools are given without messages: leave them out", "tools")
        if body.messages is not None:
            ids = await self._assistant.encode(body.messages, body.tools, body.style)
        else:
            ids = list(await self._model.encode(body.prompt or ""))
        return JSONResponse({"count": len(ids), "max_model_len": self._model.context_len, "tokens": ids})

    async def detokenize(self, body: DetokenizeBody) -> Response:
        """The text of token ids."""
        await self._model.adapter(body.model)
        return JSONResponse({"prompt": await self._model.decode(body.tokens)})

    # completions

    async def complete(self, body: CompletionBody, call: HttpCall) -> Any:
        """Continue one or more prompts."""
        body = await self._received(body)
        prompts, most = body.prompts, self._admission.limits.max_prompts
        if len(prompts) > most:
            raise InvalidRequest(f"prompt has {len(prompts)} prompts: this server takes {most}", "prompt")
        ids = [await self._model.encode(prompt) for prompt in prompts]
        params = body.params(self._model.defaults_for(0, COMPLETION_TOKENS))
        echoes = [await self._echo(*both, params) if body.echo else Echo() for both in zip(prompts, ids, strict=True)]
        repeated = [echo for echo in echoes for _ in range(body.answers)]
        spelling = await self._spelling(params)
        writer = CompletionReply(body, call.id, self._answering(body), repeated, sum(map(len, ids)), spelling)
        return await self._answer(call, body, params, ids, writer, unenforced(params.structured))

    async def chat(self, body: ChatBody, call: HttpCall) -> Any:
        """The assistant's next turn."""
        body, task = await self._task(body)
        echoes, spelling = [Echo()] * body.answers, await self._spelling(task.params)
        writer = CompletionReply(body, call.id, self._answering(body), echoes, len(task.ids), spelling, task.reader)
        return await self._turn(call, body, task, writer)

    async def respond(self, body: ResponsesBody, call: HttpCall) -> Any:
        """The assistant's next turn, in the Responses API."""
        body, task = await self._task(body)
        return await self._turn(call, body, task, ResponseReply(body, task, call.id, self._answering(body)))

    async def message(self, body: MessagesBody, call: HttpCall) -> Any:
        """The assistant's next turn, in Anthropic's Messages API."""
        body, task = await self._task(body)
        return await self._turn(call, body, task, MessageReply(task, call.id, self._answering(body)))

    async def count_tokens(self, body: PromptBody) -> Response:
        """Count the prompt tokens of a message."""
        await self._model.adapter(body.model)
        _, ids = await self._assistant.prompt(body.as_chat(self._assistant.template))
        return JSONResponse({"input_tokens": len(ids)})

    async def _received(self, body: AnyBody) -> AnyBody:
        """``body`` with the adapter that its ``model`` names, if any; raises `NotFound` or `InvalidRequest`."""
        self._admission.places.check()  # before more work on the request
        named = await self._model.adapter(body.model)
        if named is None:
            return body
        if body.adapter not in (None, named):
            sentence = f"model names the adapter {named!r}, and adapter is {body.adapter!r}: leave one out"
            raise InvalidRequest(sentence, "adapter")
        return body.model_copy(update={"adapter": named, "model": named})

    async def _task(self, body: TurnBody) -> tuple[TurnBody, ChatTask]:
        """The body after `_received`, and the task of its conversation."""
        body = await self._received(body)
        return body, await self._assistant.task(body.as_chat(self._assistant.template), body.params)

    async def _spelling(self, params: SamplingParams) -> Spelling | None:
        return None if params.logprobs is None else await self._model.spelling()

    async def _turn(self, call: Call, body: SamplingBody, task: ChatTask, writer: Reply) -> Any:
        return await self._answer(call, body, task.params, [task.ids], writer, task.unread)

    async def _answer(
        self,
        call: Call,
        body: SamplingBody,
        params: SamplingParams,
        ids: Sequence[Sequence[int]],
        writer: Reply,
        unread: Sequence[str],
    ) -> Any:
        """Admit all answers at once, then write them; a header names fields without effect, including ``unread``."""
        if body.answers > self._admission.limits.max_n:
            raise InvalidRequest(f"n is {body.answers}: this server takes at most {self._admission.limits.max_n}", "n")
        specs = await self._specs(body, params, ids)
        if any(len(spec.tokens) > spec.prompt_len for spec in specs):
            writer.resume(await self._model.delivered(specs))
        cut = [*body.limits] if any(spec.params.max_tokens < params.max_tokens for spec in specs) else []
        inert = (*body.ignored(self._assistant.template), *unread)
        warning = warned({"No effect here": inert, "Cut to what the context leaves": cut})
        with contextlib.ExitStack() as held:
            active = held.enter_context(self._admission.admitted(call.caller, specs, train=body.handling.train))
            sources = [self._full.pieces(spec, active, index // body.answers) for index, spec in enumerate(specs)]
            if not body.writes:
                sources = [unwritten(source) for source in sources]
            if not body.stream:
                return JSONResponse(await attended(call.receive, gathered(writer, merged(sources))), headers=warning)
            events = streamed(writer, merged(sources))
            first = await attended(call.receive, anext(events))  # so that an immediate failure has its own status
            return Events(events, first, held.pop_all(), warning)

    async def _specs(self, body: SamplingBody, params: SamplingParams, ids: Sequence[Sequence[int]]) -> list[SessionSpec]:
        """A spec for each answer; several answers have consecutive seeds."""
        params, specs, delivered = params.seeded(), list[SessionSpec](), iter(body.delivered(len(ids) * body.answers))
        assert params.seed is not None
        for prompt in ids:
            left = room(len(prompt), self._model.context_len, body.PROMPT)
            for index in range(body.answers):
                seed, most = (params.seed + index) % (MAX_SEED + 1), min(params.max_tokens, left)
                own = replace(params, seed=seed, max_tokens=most)
                specs.append(await self._model.admit(prompt, own, body.drafts, body.handling, next(delivered)))
        return specs

    async def _echo(self, prompt: str | Sequence[int], ids: Sequence[int], params: SamplingParams) -> Echo:
        """The prompt to repeat, with the offsets of its tokens if log-probabilities are requested."""
        text = prompt if isinstance(prompt, str) else await self._model.decode(prompt)
        if params.prompt_logprobs is None:
            return Echo(text)
        begins = await reading(len(ids), self._model.tokenizer.begins, ids)
        return Echo(text, tuple(min(begin, len(text)) for begin in begins))

    def _answering(self, body: SamplingBody) -> str:
        """The model's name, or the adapter's if the request gave it as ``model``."""
        return body.model if body.model and body.model == body.adapter else self._model.names[0]

    async def listed(self, account: Account) -> list[dict[str, Any]]:
        """Descriptions of the model, by each of its names, and of its adapters."""
        return [self._described(name, account) for name in (*self._model.names, *await self._model.adapters())]

    def _described(self, name: str, account: Account) -> dict[str, Any]:
        """OpenAI's description of a model, with tiers, context length, and the limits of the caller's key."""
        model = self._model
        key, chat = {"name": account.name, **account.limits.model_dump()}, model.tokenizer.chat_template is not None
        ours = {"tiers": model.chain_names, "max_model_len": model.context_len, "chat": chat, "key": key}
        parent = None if name in model.names else model.names[0]
        openais = {"id": name, "object": "model", "created": STARTED, "owned_by": "cascade", "parent": parent}
        return {**openais, **ours, "sampling": model.defaults}

    # errors

    async def _refused(self, request: Request, error: Exception) -> Response:
        refused = refusal(error)
        self._admission.refused(refused, request.state.request_id, getattr(request.state, "account", None))
        return refused_response(refused, request.scope)

    async def _malformed(self, request: Request, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError)
        param, message = mistake(error.errors())
        return await self._refused(request, InvalidRequest(message, param))

    async def _no_route(self, request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        if error.status_code == 404:
            return await self._refused(request, NotFound(f"There is no {request.url.path[:200]!r} here"))
        refused = InvalidRequest(f"{request.method} {request.url.path[:200]!r}: {error.detail}")
        response = await self._refused(request, refused)
        response.status_code = error.status_code
        response.headers.update(error.headers or {})
        return response


@cache
def chat_page() -> str:
    """The chat page as one file with its scripts and libraries."""
    scripts = [*sorted((FOLDER / "libraries").glob("*.js")), FOLDER / "page.js"]
    tags = [f"<script>\n{path.read_text(encoding='utf-8')}</script>\n" for path in scripts]
    return (FOLDER / "page.html").read_text(encoding="utf-8").replace("<!-- scripts -->", "".join(tags))
