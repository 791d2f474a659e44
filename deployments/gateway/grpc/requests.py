"""Converts gRPC requests to the library's values (conversations to OpenAI's JSON), and pieces of answers to messages."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from itertools import islice
from typing import Any, TypeAlias, TypeVar

from google.protobuf.message import Message as ProtoMessage
from google.protobuf.unknown_fields import UnknownFieldSet

from cascade.answer import Chunk, joined
from cascade.chat.conversation import MAX_MESSAGES, MAX_TOOLS, Conversation
from cascade.chat.template import parsed_object
from cascade.client.chat import UNCONVERTED
from cascade.client.wire import decode_handling, decode_sampling, decode_speculation, encode_edge, values
from cascade.engine.grammar import unenforced
from cascade.errors import InvalidRequest
from cascade.messages import Task, origin_level, origin_replaced
from cascade.params import SamplingParams
from cascade.v1 import serving_pb2 as pb
from deployments.gateway.chat.assistant import Assistant
from deployments.gateway.chat.calls import CallDelta, call_body
from deployments.gateway.chat.reader import TurnReader
from deployments.gateway.model import ServedModel

T = TypeVar("T")
GenerationRequest: TypeAlias = pb.GenerateRequest | pb.ChatRequest


class TextCall:
    """A request for the text after a prompt."""

    def __init__(self, request: pb.GenerateRequest, model: ServedModel) -> None:
        self.request = request
        self._model = model
        self._reader = TurnReader()
        self.inert: Sequence[str] = ()  # given fields without effect

    async def task(self) -> Task:
        """The request for the full tier; raises `InvalidRequest`."""
        request = self.request
        refuse_unknown(request)
        kind = request.WhichOneof("input")
        if kind is None:
            raise InvalidRequest("The request has neither prompt nor token_ids: set one of them")
        ids = await self._model.encode(request.prompt if kind == "prompt" else list(request.token_ids.ids))
        params = parse_sampling(request, self._model.defaults_for(len(ids), SamplingParams().max_tokens))
        self.inert = unenforced(params.structured)
        return parse_task(request, ids, params)

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

    async def task(self) -> Task:
        """The request for the full tier; raises `InvalidRequest`."""
        task = await self._assistant.task(conversation(self.request), partial(parse_sampling, self.request))
        self._reader, self.inert = task.reader(), task.unread
        return parse_task(self.request, task.ids, task.params)

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


def parse_sampling(request: GenerationRequest, defaults: Mapping[str, Any]) -> SamplingParams:
    """Sampling parameters, with the model's ``defaults`` for unset fields; raises `InvalidRequest`."""
    sampling = pb.Sampling(**defaults)
    sampling.MergeFrom(request.sampling)
    return decode_sampling(sampling)


def parse_task(request: GenerationRequest, ids: Sequence[int], params: SamplingParams) -> Task:
    """The task for the full tier after the prompt ``ids``; raises `InvalidRequest`."""
    speculation, handling = decode_speculation(request.speculation), decode_handling(request)
    return Task(ids, params, speculation, handling, request.resume.token_ids)


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
