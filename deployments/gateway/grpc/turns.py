"""Conversations over gRPC: requests as OpenAI's JSON has them, and answers as messages of the protocol."""

from collections.abc import Callable, Sequence
from functools import partial
from itertools import islice
from typing import Any, TypeVar

from google.protobuf.message import Message as ProtoMessage

from cascade.answer import Chunk, Completion
from cascade.client.wire import encode_lane
from cascade.errors import InvalidRequest
from cascade.v1 import serving_pb2 as pb
from deployments.gateway.chat.assistant import Assistant, ChatTask
from deployments.gateway.chat.conversation import MAX_MESSAGES, MAX_TOOLS, Conversation, parsed_object
from deployments.gateway.chat.delta import Delta
from deployments.gateway.chat.reader import TurnReader, ending, finish_reason, read
from deployments.gateway.grpc.requests import all_tokens, finish, parse_sampling, prompt, refuse_unknown, tokens

T = TypeVar("T")
PLAIN = (  # the same in both protocols
    "parallel_tool_calls",
    "add_generation_prompt",
    "continue_final_message",
    "include_reasoning",
    "separate_reasoning",
)
SAID = ("content", "name", "tool_call_id", "reasoning_content")  # of a message, likewise


class ChatTurn:
    """A request for the assistant's next turn: its `task` comes first, then the pieces of the answer."""

    def __init__(self, request: pb.ChatRequest) -> None:
        self.request = request
        self._reader: TurnReader | None = None

    async def task(self, assistant: Assistant) -> ChatTask:
        """What the full tier is asked; raises `InvalidRequest`."""
        task = await assistant.task(conversation(self.request), partial(parse_sampling, self.request))
        self._reader = task.new_reader()
        return task

    def resume(self, known: Chunk) -> None:
        """Read what the client has of the answer, of which nothing is told again."""
        if self._reader is not None:
            self._reader.take(known)

    def piece(self, chunk: Chunk) -> pb.ChatResponse:
        """The next piece of the answer."""
        reader, end = self._reader, chunk.completion
        said = Delta(chunk.text) if reader is None else reader.take(chunk)
        return pb.ChatResponse(
            content=said.content,
            tool_calls=map(_called, said.calls.values()),
            tokens=tokens(chunk),
            finish=None if end is None else _finish(end, finish_reason(end, reader), reader),
            prompt=prompt(chunk),
            lanes=map(encode_lane, chunk.lanes),
            text=None if reader is None else chunk.text,
            reasoning_content=said.thoughts,
            seed=chunk.seed,
        )

    def whole(self, chunks: Sequence[Chunk]) -> pb.CompleteChatResponse:
        """The answer of these pieces."""
        end = ending(chunks)
        said, why = read(chunks, end, self._reader)
        return pb.CompleteChatResponse(
            message=pb.ChatMessage(
                role="assistant",
                content=said.whole_content,
                tool_calls=map(_called, said.calls.values()),
                reasoning_content=said.thoughts or None,
            ),
            tokens=all_tokens(chunks),
            finish=_finish(end, why, self._reader),
            prompt=prompt(chunks[0]),
            text=None if self._reader is None else end.text,
        )


def conversation(request: pb.ChatRequest) -> Conversation:
    """What is said and may be called; raises `InvalidRequest`, with the sentences that HTTP clients get."""
    _refuse_unknown(request, "the request")
    said: dict[str, Any] = {name: getattr(request, name) for name in PLAIN if request.HasField(name)}
    said["messages"] = _listed(_message, request.messages, MAX_MESSAGES)
    if request.tools:
        said["tools"] = _listed(_tool, list(enumerate(request.tools)), MAX_TOOLS)
    if request.HasField("tool_choice"):
        said["tool_choice"] = _choice(request.tool_choice)
    if request.HasField("chat_template_kwargs"):
        said["chat_template_kwargs"] = _object(request.chat_template_kwargs, "chat_template_kwargs")
    return Conversation.of(said)


def _listed(form: Callable[[T], Any], given: Sequence[T], most: int) -> list[Any]:
    """Each element in OpenAI's form; of a list that is too long only the length is of interest."""
    return [form(one) for one in given[:most]] + [None] * (len(given) - most)


def _message(message: pb.ChatMessage) -> dict[str, Any]:
    said: dict[str, Any] = {"role": message.role}
    said |= {name: getattr(message, name) for name in SAID if message.HasField(name)}
    if message.tool_calls:
        said["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.function.name, "arguments": call.function.arguments}}
            for call in message.tool_calls
        ]
    return said


def _tool(numbered: tuple[int, pb.Tool]) -> dict[str, Any]:
    index, function = numbered[0], numbered[1].function
    said: dict[str, Any] = {"name": function.name}
    if function.HasField("description"):
        said["description"] = function.description
    if function.HasField("parameters"):
        said["parameters"] = _object(function.parameters, f"tools.{index}.function.parameters")
    if function.HasField("strict"):
        said["strict"] = function.strict
    return {"type": "function", "function": said}


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


def _finish(end: Completion, why: str, reader: TurnReader | None) -> pb.Finish:
    """How the answer ended, with the tokens of its thoughts if they are told apart."""
    ended = finish(end, why)
    if reader is not None and (num_tokens := reader.num_thought_tokens) is not None:
        ended.reasoning_tokens = num_tokens
    return ended


def _called(call: dict[str, Any]) -> pb.ToolCall:
    """A call, or a piece of one, as `Delta` has it."""
    return pb.ToolCall(id=call.get("id"), function=pb.CalledFunction(**call["function"]), index=call["index"])


def _refuse_unknown(message: ProtoMessage, where: str) -> None:
    """`refuse_unknown` for a message and all that are in it, as far as lists may go."""
    refuse_unknown(message, where)
    for field, value in message.ListFields():
        kind = field.message_type
        if kind is not None and not kind.GetOptions().map_entry:
            for one in islice(value, MAX_MESSAGES + 1) if field.is_repeated else [value]:
                _refuse_unknown(one, field.name)
