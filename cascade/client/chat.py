"""Conversations: turns OpenAI's messages and tools into a request, and the responses into the assistant's turn."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeAlias, TypedDict

from cascade.answer import Chunk, Completion
from cascade.client.exchange import Exchange, encode_options, optional
from cascade.errors import InvalidRequest
from cascade.params import Handling, SamplingParams, Speculation
from cascade.v1 import serving_pb2 as pb

Messages: TypeAlias = Sequence[Mapping[str, Any]]  # as in OpenAI's API, oldest first
TurnReason = Literal["stop", "length", "tool_calls"]


class ChatOptions(TypedDict, total=False):
    """Options of a conversation, named as in OpenAI's API and vLLM; see docs/reference/http.md."""

    tools: Sequence[Mapping[str, Any]] | None
    tool_choice: str | Mapping[str, Any] | None
    parallel_tool_calls: bool | None
    chat_template_kwargs: Mapping[str, Any] | None
    add_generation_prompt: bool | None
    continue_final_message: bool | None
    include_reasoning: bool | None
    separate_reasoning: bool | None


CONVERTED = ("tools", "tool_choice", "chat_template_kwargs")  # options whose form differs in the protocol
UNCONVERTED = tuple(name for name in ChatOptions.__annotations__ if name not in CONVERTED)


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call of a tool, or a piece of one. The first piece has ``id`` and ``name``; ``arguments`` come piece by piece."""

    index: int  # number of the call in the turn
    id: str
    name: str
    arguments: str  # JSON text of an object


@dataclass(frozen=True, slots=True)
class Turn:
    """The assistant's turn: thoughts, content and calls, parsed from ``completion``, the text that the model wrote."""

    content: str | None  # None if there are only calls
    calls: tuple[ToolCall, ...]
    finish_reason: TurnReason
    completion: Completion
    reasoning_content: str | None = None  # thoughts; None if there are none, or if they are part of the content
    reasoning_tokens: int | None = None  # tokens of thoughts, tags included; None if thoughts are not separated

    @property
    def message(self) -> dict[str, Any]:
        """This turn as a message for the next request."""
        message: dict[str, Any] = {"role": "assistant", "content": self.content}
        if self.reasoning_content is not None:
            message["reasoning_content"] = self.reasoning_content
        if self.calls:
            message["tool_calls"] = [
                {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
                for call in self.calls
            ]
        return message


@dataclass(frozen=True, slots=True)
class TurnPiece:
    """A piece of a turn, parsed from ``chunk``, the text that the model wrote."""

    content: str
    calls: tuple[ToolCall, ...]
    chunk: Chunk
    turn: Turn | None = None  # set on the last piece
    reasoning_content: str = ""


class ChatExchange(Exchange[Turn, TurnPiece]):
    """A conversation and its answer; the request is that of `encode_chat`."""

    rpc = "Chat"

    def __init__(self, request: pb.ChatRequest) -> None:
        super().__init__(request)
        self._pieces: list[TurnPiece] = []

    def add(self, response: pb.ChatResponse) -> TurnPiece:
        chunk = self._chunk(response, response.text if response.HasField("text") else response.content)
        called = [(call.index, call.id, call.function.name, call.function.arguments) for call in response.tool_calls]
        piece = TurnPiece(response.content, tuple(ToolCall(*call) for call in called), chunk, None, response.reasoning_content)
        self._pieces.append(piece)
        if chunk.completion is None:
            return piece
        self.whole = self._turn(chunk.completion, response.finish)
        return replace(piece, turn=self.whole)

    def _turn(self, completion: Completion, finish: pb.Finish) -> Turn:
        content, thoughts = "".join(piece.content for piece in self._pieces), "".join(p.reasoning_content for p in self._pieces)
        calls: dict[int, ToolCall] = {}
        for call in (call for piece in self._pieces for call in piece.calls):
            begun = calls.get(call.index)
            calls[call.index] = call if begun is None else replace(begun, arguments=begun.arguments + call.arguments)
        return Turn(
            content or (None if calls else ""),
            tuple(calls.values()),
            "tool_calls" if finish.reason == "tool_calls" else completion.finish_reason,
            completion,
            thoughts or None,
            optional(finish, "reasoning_tokens"),
        )


def encode_chat(
    messages: Messages,
    params: SamplingParams | None,
    speculation: Speculation | None,
    handling: Handling | None,
    options: ChatOptions,
) -> pb.ChatRequest:
    """The request as a message; raises `InvalidRequest` for values that the protocol cannot carry."""
    given = _without_empty(options)
    choice, values = given.get("tool_choice"), given.get("chat_template_kwargs")
    try:
        if isinstance(messages, str | bytes):
            raise TypeError("messages are a list, such as [{'role': 'user', 'content': 'Hello'}]")
        return pb.ChatRequest(
            messages=map(_message, messages),
            tools=map(_tool, given.get("tools", ())),
            tool_choice=None if choice is None else _tool_choice(choice),
            chat_template_kwargs=None if values is None else json.dumps(values, ensure_ascii=False),
            **encode_options(params, speculation, handling),
            **{name: value for name, value in given.items() if name not in CONVERTED},
        )
    except KeyError as error:
        raise InvalidRequest(f"The request cannot be sent: {error} is missing in a message, a call or a tool") from None
    except (ValueError, TypeError, AttributeError) as error:
        raise InvalidRequest(f"The request cannot be sent: {error}") from None


def _message(message: Mapping[str, Any]) -> pb.ChatMessage:
    given = _without_empty(message)
    if isinstance(content := given.get("content"), list):
        given["content"] = "".join(map(_text, content))
    reasoning = given.pop("reasoning", None)  # the name that other servers use for reasoning_content
    if reasoning is not None and given.setdefault("reasoning_content", reasoning) != reasoning:
        raise ValueError("reasoning_content and reasoning differ: give one of them")
    given["tool_calls"] = [_call(call) for call in given.get("tool_calls", ())]
    return pb.ChatMessage(**given)


def _text(part: Mapping[str, Any]) -> str:
    if part.get("type", "text") != "text":
        raise ValueError(f"type of a part is {part['type']!r:.60}: messages are texts")
    return str(part["text"])


def _call(made: Mapping[str, Any]) -> dict[str, Any]:
    """An earlier call of the assistant, with its arguments as text."""
    call = _without_type(made)
    function = dict(call["function"])
    if isinstance(function.get("arguments"), Mapping):
        function["arguments"] = json.dumps(function["arguments"], ensure_ascii=False)
    return call | {"function": function}


def _tool(described: Mapping[str, Any]) -> pb.Tool:
    tool = _without_type(described)
    function = _without_empty(tool.pop("function"))
    if isinstance(parameters := function.get("parameters"), Mapping):
        function["parameters"] = json.dumps(parameters, ensure_ascii=False)
    return pb.Tool(function=pb.Function(**function), **tool)


def _tool_choice(choice: str | Mapping[str, Any]) -> pb.ToolChoice:
    if isinstance(choice, str):
        return pb.ToolChoice(mode=choice)
    return pb.ToolChoice(function=choice["function"]["name"])


def _without_empty(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Fields that are neither null nor an empty list: OpenAI's clients dump messages with all possible fields."""
    return {name: value for name, value in fields.items() if value is not None and value != []}


def _without_type(fields: Mapping[str, Any]) -> dict[str, Any]:
    """A tool or a call without its type, which the protocol lacks; raises ``ValueError`` if it is not a function."""
    given = _without_empty(fields)
    kind = given.pop("type", "function")
    if kind != "function":
        raise ValueError(f"type is {kind!r:.60}: there are only functions")
    return given
