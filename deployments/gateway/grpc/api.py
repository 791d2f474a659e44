"""The gRPC API of one router: the methods of `cascade.v1.Cascade`.

Requests become the library's values (conversations OpenAI's JSON), and pieces of answers become messages.
"""

import contextlib
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from importlib.metadata import version
from itertools import islice
from typing import Any, TypeVar

import grpc
from google.protobuf.message import Message as ProtoMessage
from google.protobuf.unknown_fields import UnknownFieldSet
from ray.serve.grpc_util import RayServegRPCContext

from cascade.answer import Chunk, joined
from cascade.chat.conversation import MAX_MESSAGES, MAX_TOOLS, Conversation
from cascade.chat.template import parsed_object
from cascade.client.chat import UNCONVERTED
from cascade.client.wire import decode_handling, decode_sampling, decode_speculation, encode_edge, values
from cascade.engine.grammar import unenforced
from cascade.errors import InvalidRequest
from cascade.messages import origin_level, origin_replaced
from cascade.params import MOST_BRANCHES, SamplingParams
from cascade.settings.config import CascadeConfig
from cascade.v1 import serving_pb2 as pb
from deployments.full_tier import FullTier
from deployments.gateway.admission.admission import Admission, Caller, metadata, refusal
from deployments.gateway.chat.assistant import Assistant
from deployments.gateway.chat.calls import CallDelta, call_body
from deployments.gateway.chat.reader import TurnReader
from deployments.gateway.model import ServedModel
from deployments.links.replica_status import Siblings, Tiers

T = TypeVar("T")

DESCRIBE_TIMEOUT_S = 2.0


class GrpcApi:
    """The methods, which Ray Serve or the router's own server calls by their names in the protocol; a router has the rest."""

    model: ServedModel
    assistant: Assistant
    admission: Admission
    _config: CascadeConfig
    _full: FullTier
    _tiers: Tiers
    _siblings: Siblings

    async def Generate(
        self, request: pb.GenerateRequest, grpc_context: RayServegRPCContext
    ) -> AsyncIterator[pb.GenerateResponse]:
        """The answer, piece by piece."""
        call = TextCall(request, self.model)
        async with self._answering(call, grpc_context) as chunks:
            async for chunk in chunks:
                yield call.piece(chunk)

    async def Complete(self, request: pb.GenerateRequest, grpc_context: RayServegRPCContext) -> pb.CompleteResponse:
        """The whole answer."""
        call = TextCall(request, self.model)
        async with self._answering(call, grpc_context, "Generate") as chunks:
            return call.whole([chunk async for chunk in chunks])

    async def Chat(self, request: pb.ChatRequest, grpc_context: RayServegRPCContext) -> AsyncIterator[pb.ChatResponse]:
        """The assistant's next turn, piece by piece."""
        call = TurnCall(request, self.assistant)
        async with self._answering(call, grpc_context) as chunks:
            async for chunk in chunks:
                yield call.piece(chunk)

    async def CompleteChat(self, request: pb.ChatRequest, grpc_context: RayServegRPCContext) -> pb.CompleteChatResponse:
        """The assistant's whole next turn."""
        call = TurnCall(request, self.assistant)
        async with self._answering(call, grpc_context, "Chat") as chunks:
            return call.whole([chunk async for chunk in chunks])

    async def Abort(self, request: pb.AbortRequest, grpc_context: RayServegRPCContext) -> pb.AbortResponse:
        """Abort requests of the same key at all routers."""
        with self._reporting(grpc_context) as caller:
            refuse_unknown(request)
            here = self.admission.abort(caller.account.name, request.request_id)
            elsewhere = await self._siblings.ask("abort_for", caller.account.name, request.request_id)
            return pb.AbortResponse(aborted=here + sum(elsewhere))

    async def abort_for(self, router: str, key: str, request_id: str) -> int | None:
        return None if router == self._siblings.name else self.admission.abort(key, request_id)

    async def Describe(self, request: pb.DescribeRequest, grpc_context: RayServegRPCContext) -> pb.DescribeResponse:
        """Describe the models, the tiers and their running replicas."""
        with self._reporting(grpc_context) as caller:
            states = await self._tiers.states(DESCRIBE_TIMEOUT_S)
            limits = caller.account.limits.model_dump(exclude_none=True)
            response = pb.DescribeResponse(
                max_model_len=self.model.context_len,
                window=self._config.window,
                version=version("cascade-serve"),
                drafters=self._config.drafters,
                branches=MOST_BRANCHES,
                defaults=pb.Sampling(**self.model.defaults_for(0, SamplingParams().max_tokens)),
                key=pb.KeyLimits(name=caller.account.name, **limits),
            )
            for tier in self._config.tiers:
                replicas, described = states[tier.name]
                state = described or {"name": tier.name, "model": tier.model_loading_config.model_id}
                fields = {name: state[name] for name in pb.Tier.DESCRIPTOR.fields_by_name if name in state}
                response.tiers.add(replicas=replicas, **fields)
            return response

    @contextlib.asynccontextmanager
    async def _answering(
        self, call: "TextCall | TurnCall", context: RayServegRPCContext, streaming: str | None = None
    ) -> AsyncIterator[AsyncGenerator[Chunk, None]]:
        """The pieces of the answer to a call; ``streaming`` is the RPC for streams, if this one gives whole answers."""
        with self._reporting(context) as caller:
            resumes = call.request.HasField("resume")
            if streaming is not None and resumes:
                raise InvalidRequest(f"resume is set: only streams can be resumed, so call {streaming}")
            self.admission.places.check()  # before the request is parsed
            ids, params = await call.task()
            if call.inert:
                context.set_trailing_metadata((("warning", f"No effect here: {', '.join(call.inert)}"),))
            speculation, handling = decode_speculation(call.request.speculation), decode_handling(call.request)
            spec = await self.model.admit(ids, params, speculation, handling, call.request.resume.token_ids)
            if resumes:
                call.resume(*await self.model.delivered([spec]))
            with self.admission.admitted(caller, [spec], train=handling.train) as request:
                async with contextlib.aclosing(self._full.pieces(spec, request)) as chunks:
                    yield chunks

    @contextlib.contextmanager
    def _reporting(self, context: RayServegRPCContext) -> Iterator[Caller]:
        """Give a call that fails inside the context its gRPC status and message; raises `Unauthenticated`."""
        since, pairs = time.monotonic(), [*(context.invocation_metadata() or ())]
        headers = {name: value for name, value in reversed(pairs) if isinstance(value, str)}  # the first of repeated ones
        account = None
        try:
            account = self.admission.access.account(headers.get("authorization"))
            # Ray Serve's proxies do not pass the deadline on; they cancel the call when it passes
            left_s = getattr(context, "time_remaining", lambda: None)()
            yield Caller(account, headers.get("request_id"), since, pairs, left_s)
        except Exception as error:
            refused = refusal(error)
            self.admission.refused(refused, headers.get("request_id"), account)
            context.set_code(grpc.StatusCode[refused.grpc])
            context.set_details(str(refused))
            context.set_trailing_metadata(metadata(refused))
            raise


# requests and answers


class TextCall:
    """A request for the text after a prompt."""

    def __init__(self, request: pb.GenerateRequest, model: ServedModel) -> None:
        self.request = request
        self._model = model
        self._reader = TurnReader()
        self.inert: Sequence[str] = ()  # given fields without effect

    async def task(self) -> tuple[Sequence[int], SamplingParams]:
        """The prompt's tokens, and the parameters; raises `InvalidRequest`."""
        request = self.request
        refuse_unknown(request)
        kind = request.WhichOneof("input")
        if kind is None:
            raise InvalidRequest("The request has neither prompt nor token_ids: set one of them")
        ids = await self._model.encode(request.prompt if kind == "prompt" else list(request.token_ids.ids))
        params = parse_sampling(request, self._model.defaults_for(len(ids), SamplingParams().max_tokens))
        self.inert = unenforced(params.structured)
        return ids, params

    def resume(self, delivered: Chunk) -> None:
        """The client already has ``delivered``; later pieces do not depend on it."""

    def piece(self, chunk: Chunk) -> pb.GenerateResponse:
        """The next piece of the answer."""
        return pb.GenerateResponse(
            text=chunk.text, tokens=tokens(chunk), finish=finish(chunk, self._reader), prompt=prompt(chunk), seed=chunk.seed
        )

    def whole(self, chunks: Sequence[Chunk]) -> pb.CompleteResponse:
        """The answer of these pieces."""
        answer = self.piece(joined(chunks))
        return pb.CompleteResponse(text=answer.text, tokens=answer.tokens, finish=answer.finish, prompt=answer.prompt)


class TurnCall:
    """A request for the assistant's next turn; `task` must be called before the pieces are made."""

    def __init__(self, request: pb.ChatRequest, assistant: Assistant) -> None:
        self.request = request
        self._assistant = assistant
        self._reader = TurnReader()
        self.inert: Sequence[str] = ()  # given keywords and fields without effect

    async def task(self) -> tuple[Sequence[int], SamplingParams]:
        """The prompt's tokens, and the parameters; raises `InvalidRequest`."""
        task = await self._assistant.task(conversation(self.request), partial(parse_sampling, self.request))
        self._reader, self.inert = task.reader(), task.unread
        return task.ids, task.params

    def resume(self, delivered: Chunk) -> None:
        """Parse what the client already has, without sending it again."""
        self._reader.take(delivered)

    def piece(self, chunk: Chunk) -> pb.ChatResponse:
        """The next piece of the answer."""
        reader = self._reader
        delta = reader.take(chunk)
        return pb.ChatResponse(
            content=delta.content,
            tool_calls=map(_called, delta.calls),
            tokens=tokens(chunk),
            finish=finish(chunk, reader),
            prompt=prompt(chunk),
            text=None if reader.plain else chunk.text,
            reasoning_content=delta.thoughts,
            seed=chunk.seed,
        )

    def whole(self, chunks: Sequence[Chunk]) -> pb.CompleteChatResponse:
        """The answer of these pieces."""
        turn = self.piece(joined(chunks))
        message = pb.ChatMessage(
            role="assistant",
            content=turn.content or (None if turn.tool_calls else ""),
            tool_calls=turn.tool_calls,
            reasoning_content=turn.reasoning_content or None,
        )
        text = turn.text if turn.HasField("text") else None
        return pb.CompleteChatResponse(message=message, tokens=turn.tokens, finish=turn.finish, prompt=turn.prompt, text=text)


def parse_sampling(request: pb.GenerateRequest | pb.ChatRequest, defaults: Mapping[str, Any]) -> SamplingParams:
    """Sampling parameters, with the model's ``defaults`` for unset fields; raises `InvalidRequest`."""
    sampling = pb.Sampling(**defaults)
    sampling.MergeFrom(request.sampling)
    return decode_sampling(sampling)


def refuse_unknown(message: ProtoMessage, where: str = "the request") -> None:
    """Raise `InvalidRequest` if a message, or one in it, has fields that this version does not know.

    Every parameter is honoured or refused. Of lists that are too long only the beginning is checked.
    """
    unknown = [field.field_number for field in UnknownFieldSet(message)]  # type: ignore[attr-defined]
    if unknown:
        numbers = ", ".join(map(str, unknown))
        raise InvalidRequest(f"There are unknown fields in {where} (numbers {numbers}): is the client newer than the server?")
    for field, value in message.ListFields():
        kind = field.message_type
        if kind is not None and not kind.GetOptions().map_entry:
            for part in islice(value, MAX_MESSAGES + 1) if field.is_repeated else [value]:
                refuse_unknown(part, field.name)


def tokens(chunk: Chunk) -> list[pb.Token]:
    """Tokens of a piece with their history."""
    tokens = [
        pb.Token(id=id, level=origin_level(byte), replaced=origin_replaced(byte), end=end)
        for id, byte, end in zip(chunk.token_ids, chunk.origins, chunk.ends, strict=True)
    ]
    if chunk.logprobs:
        for token, logprobs in zip(tokens, chunk.logprobs, strict=True):
            token.logprob = logprobs.logprob
            token.top.extend(_likeliest(logprobs.top))
    return tokens


def prompt(chunk: Chunk) -> list[pb.PromptToken]:
    """Tokens of the prompt, which come with the first piece if requested."""
    return [pb.PromptToken(id=token.id, logprob=token.logprob, top=_likeliest(token.top)) for token in chunk.prompt]


def _likeliest(top: Iterable[tuple[int, float]]) -> list[pb.TopToken]:
    return [pb.TopToken(id=id, logprob=logprob) for id, logprob in top]


def finish(chunk: Chunk, reader: TurnReader) -> pb.Finish | None:
    """The end of the answer, which comes with the last piece, and the tokens of its thoughts if they are separated."""
    if (completion := chunk.completion) is None:
        return None
    stats = completion.stats
    return pb.Finish(
        reason=reader.finish_reason(completion),
        seed=completion.seed,
        prompt_tokens=stats.prompt_tokens,
        completion_tokens=stats.completion_tokens,
        edges=[pb.Edge(**encode_edge(edge), mean_accepted_len=edge.mean_accepted_len) for edge in stats.edges],
        first_token_s=stats.first_token_s,
        undrafted=stats.undrafted,
        cached_tokens=stats.cached_tokens,
        stop_string=completion.stop_string,
        reasoning_tokens=reader.num_thought_tokens,
    )


def conversation(request: pb.ChatRequest) -> Conversation:
    """The conversation and its tools; raises `InvalidRequest` with the same messages as over HTTP."""
    refuse_unknown(request)
    body = values(request, UNCONVERTED)
    body["messages"] = _listed(_message, request.messages, MAX_MESSAGES)
    if request.tools:
        body["tools"] = _listed(_tool, list(enumerate(request.tools)), MAX_TOOLS)
    if request.HasField("tool_choice"):
        body["tool_choice"] = _choice(request.tool_choice)
    if request.HasField("chat_template_kwargs"):
        body["chat_template_kwargs"] = _object(request.chat_template_kwargs, "chat_template_kwargs")
    return Conversation.of(body)


def _listed(form: Callable[[T], Any], given: Sequence[T], most: int) -> list[Any]:
    """Elements in OpenAI's form. Of a list that is too long only so many are converted that its length is refused."""
    return [form(element) for element in given[:most]] + [None] * (len(given) - most)


def _message(message: pb.ChatMessage) -> dict[str, Any]:
    body = values(message)
    if calls := body.pop("tool_calls"):
        body["tool_calls"] = [call_body(call.id, call.function.name, call.function.arguments) for call in calls]
    return body


def _tool(numbered: tuple[int, pb.Tool]) -> dict[str, Any]:
    index, tool = numbered
    function = values(tool.function)
    if "parameters" in function:
        function["parameters"] = _object(tool.function.parameters, f"tools.{index}.function.parameters")
    return {"type": "function", "function": function}


def _choice(choice: pb.ToolChoice) -> str | dict[str, Any]:
    kind = choice.WhichOneof("kind")
    if kind is None:
        raise InvalidRequest("tool_choice has neither mode nor function: set one of them")
    return choice.mode if kind == "mode" else {"type": "function", "function": {"name": choice.function}}


def _object(text: str, where: str) -> dict[str, Any]:
    try:
        return parsed_object(text)
    except ValueError as error:
        raise InvalidRequest(f"{where}: {error}") from None


def _called(call: CallDelta) -> pb.ToolCall:
    function = pb.CalledFunction(name=call.name or None, arguments=call.arguments)
    return pb.ToolCall(id=call.id or None, function=function, index=call.index)
