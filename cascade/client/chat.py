"""Conversations as clients have them: OpenAI's messages and tools there, the assistant's turn back."""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeAlias, TypedDict

from cascade.answer import Chunk, Completion
from cascade.client.received import Pieces, completion_of
from cascade.client.wire import encode_sampling, encode_speculation
from cascade.errors import InvalidRequest
from cascade.params import Handling, SamplingParams, Speculation
from cascade.v1 import serving_pb2 as pb

Said: TypeAlias = Sequence[Mapping[str, Any]]  # messages, oldest first
TurnReason = Literal["stop", "length", "tool_calls"]
SPECIAL = ("tools", "tool_choice", "chat_template_kwargs")  # options that the protocol says in another form


class ChatOptions(TypedDict, total=False):
    """How a conversation is gone on with, as in OpenAI's API and vLLM; see docs/http.md."""

    tools: Sequence[Mapping[str, Any]] | None
    tool_choice: str | Mapping[str, Any] | None
    parallel_tool_calls: bool | None
    chat_template_kwargs: Mapping[str, Any] | None
    add_generation_prompt: bool | None
    continue_final_message: bool | None
    include_reasoning: bool | None
    separate_reasoning: bool | None


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call of a tool, or a piece of one: then ``id`` and ``name`` come first, and ``arguments`` bit by bit."""

    index: int  # among the calls of the turn
    id: str
    name: str
    arguments: str  # JSON text of an object


@dataclass(frozen=True, slots=True)
class Turn:
    """What the assistant thinks, says and calls; ``completion`` is the model's own text, of which this was read."""

    content: str | None  # None if it only calls
    calls: tuple[ToolCall, ...]
    finish_reason: TurnReason
    completion: Completion
    reasoning_content: str | None = None  # None if there are no thoughts, or they are not told apart
    reasoning_tokens: int | None = None  # of the completion's, tags included; None if thoughts are not told apart

    @property
    def message(self) -> dict[str, Any]:
        """For the messages of the next request."""
        said: dict[str, Any] = {"role": "assistant", "content": self.content}
        if self.reasoning_content is not None:
            said["reasoning_content"] = self.reasoning_content
        if self.calls:
            said["tool_calls"] = [
                {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
                for call in self.calls
            ]
        return said


@dataclass(frozen=True, slots=True)
class TurnPiece:
    """A piece of a turn; ``chunk`` is the model's own text, of which it was read."""

    content: str
    calls: tuple[ToolCall, ...]
    chunk: Chunk
    turn: Turn | None = None  # with the last piece
    reasoning_content: str = ""


class TurnPieces:
    """Turns responses of a stream into pieces, the last of which brings the turn."""

    def __init__(self) -> None:
        self._pieces = Pieces()
        self._content: list[str] = []
        self._thoughts: list[str] = []
        self._calls: dict[int, ToolCall] = {}

    def check(self) -> None:
        """Raise `Unavailable` if the stream has ended before its text."""
        self._pieces.check()

    def take(self, response: pb.ChatResponse) -> TurnPiece:
        """One more response."""
        chunk = self._pieces.take(response, response.text if response.HasField("text") else response.content)
        calls = _calls(response.tool_calls)
        self._content.append(response.content)
        self._thoughts.append(response.reasoning_content)
        for call in calls:
            begun = self._calls.get(call.index)
            joined = call if begun is None else replace(begun, arguments=begun.arguments + call.arguments)
            self._calls[call.index] = joined
        turn = None
        if chunk.completion is not None:
            content, whole = "".join(self._content), tuple(self._calls.values())
            said = content or (None if whole else "")
            thoughts, num_tokens = "".join(self._thoughts) or None, _reasoning_tokens(response.finish)
            turn = Turn(said, whole, _reason(response.finish), chunk.completion, thoughts, num_tokens)
        return TurnPiece(response.content, calls, chunk, turn, response.reasoning_content)


def turn_of(response: pb.CompleteChatResponse) -> Turn:
    """The whole turn that a response brings."""
    message = response.message
    content = message.content if message.HasField("content") else None
    text = response.text if response.HasField("text") else message.content
    completion = completion_of(text, response.tokens, response.finish, response.prompt)
    thoughts = message.reasoning_content if message.HasField("reasoning_content") else None
    num_tokens = _reasoning_tokens(response.finish)
    return Turn(content, _calls(message.tool_calls), _reason(response.finish), completion, thoughts, num_tokens)


def encode_chat(
    messages: Said,
    params: SamplingParams | None,
    speculation: Speculation | None,
    handling: Handling | None,
    options: ChatOptions,
) -> pb.ChatRequest:
    """The request on the wire; raises `InvalidRequest` for what the protocol cannot say."""
    handling, given = handling or Handling(), _given(options)
    choice, values = given.get("tool_choice"), given.get("chat_template_kwargs")
    try:
        if isinstance(messages, str | bytes):
            raise TypeError("messages are a list, such as [{'role': 'user', 'content': 'Hello'}]")
        return pb.ChatRequest(
            messages=map(_message, messages),
            sampling=None if params is None else encode_sampling(params),
            speculation=encode_speculation(speculation or Speculation()),
            tools=map(_tool, given.get("tools", ())),
            tool_choice=None if choice is None else _choice(choice),
            chat_template_kwargs=None if values is None else json.dumps(values, ensure_ascii=False),
            priority=handling.priority,
            cache_salt=handling.cache_salt,
            watch=handling.watch,
            **{name: value for name, value in given.items() if name not in SPECIAL},
        )
    except (ValueError, TypeError, UnicodeError, KeyError, AttributeError) as error:
        raise InvalidRequest(f"The request cannot be sent: {error}") from None


def _message(said: Mapping[str, Any]) -> pb.ChatMessage:
    given = _given(said)
    if isinstance(content := given.get("content"), list):
        given["content"] = "".join(part["text"] for part in content)
    reasoning = given.pop("reasoning", None)  # as other servers name the same
    if reasoning is not None and given.setdefault("reasoning_content", reasoning) != reasoning:
        raise ValueError("reasoning_content and reasoning differ: give one of them")
    given["tool_calls"] = [_untyped(call) for call in given.get("tool_calls", ())]
    return pb.ChatMessage(**given)


def _tool(said: Mapping[str, Any]) -> pb.Tool:
    tool = _untyped(said)
    function = _given(tool.pop("function"))
    if isinstance(parameters := function.get("parameters"), Mapping):
        function["parameters"] = json.dumps(parameters, ensure_ascii=False)
    return pb.Tool(function=pb.Function(**function), **tool)


def _choice(choice: str | Mapping[str, Any]) -> pb.ToolChoice:
    if isinstance(choice, str):
        return pb.ToolChoice(mode=choice)
    return pb.ToolChoice(function=choice["function"]["name"])


def _given(said: Mapping[str, Any]) -> dict[str, Any]:
    """What says something: clients dump what they got with fields that are null, and lists of nothing."""
    return {name: value for name, value in said.items() if value is not None and value != []}


def _untyped(said: Mapping[str, Any]) -> dict[str, Any]:
    """Without its type: there are only functions."""
    given = _given(said)
    kind = given.pop("type", "function")
    if kind != "function":
        raise ValueError(f"type is {kind!r:.60}: there are only functions")
    return given


def _calls(calls: Iterable[pb.ToolCall]) -> tuple[ToolCall, ...]:
    return tuple(ToolCall(call.index, call.id, call.function.name, call.function.arguments) for call in calls)


def _reason(finish: pb.Finish) -> TurnReason:
    return "tool_calls" if finish.reason == "tool_calls" else "length" if finish.reason == "length" else "stop"


def _reasoning_tokens(finish: pb.Finish) -> int | None:
    return finish.reasoning_tokens if finish.HasField("reasoning_tokens") else None
