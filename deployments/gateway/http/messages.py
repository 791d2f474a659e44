"""Anthropic's Messages API on top of chats: blocks become a conversation, and the assistant's turn becomes blocks."""

import json
from collections.abc import Iterator
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Discriminator, Field, Tag, model_validator
from pydantic_core import from_json

from cascade.answer import Completion
from cascade.chat.conversation import MAX_MESSAGES, MAX_PARTS, MAX_TOOLS, Body, Conversation, Text, text_of
from cascade.chat.template import CUT, ChatTemplate
from cascade.errors import CascadeError, InvalidRequest
from cascade.params import Structured
from deployments.gateway.chat.assistant import ChatTask
from deployments.gateway.chat.calls import CallDelta, call_body
from deployments.gateway.http.events import event, finite
from deployments.gateway.http.openai import Limit, SamplingBody, Stops
from deployments.gateway.http.parts import Events, ForeignTool, PartsReply, kind_of_tool, left_out, named_tool, tool_fields
from deployments.gateway.http.reply import report, usage

PATH = "/v1/messages"
BILLING = "x-anthropic-billing-header"  # prefix of a block of the system message that is not for the model
STOP_REASONS = {"tool_calls": "tool_use", "length": "max_tokens", "stop": "end_turn"}
ERROR_TYPES = {  # Anthropic's error types by status
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    500: "api_error",
    503: "overloaded_error",
    504: "timeout_error",
}


class Block(Body):
    """A piece of a message."""

    cache_control: dict[str, Any] | None = None  # no effect: common prefixes are always kept


class TextBlock(Block):
    """Words."""

    type: Literal["text"]
    text: Text
    citations: Annotated[list[Any], Field(max_length=0)] | None = None


class ThinkingBlock(Block):
    """Thoughts of the assistant. Signatures are ignored."""

    type: Literal["thinking"]
    thinking: Text
    signature: str = ""


class CallBlock(Block):
    """A call by the assistant."""

    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]
    caller: dict[str, Any] | None = None  # no effect: only the assistant calls tools here

    @property
    def called(self) -> dict[str, Any]:
        """The call in the form of chat completions; raises `InvalidRequest`."""
        try:
            arguments = json.dumps(self.input, ensure_ascii=False)
        except (ValueError, RecursionError):
            raise InvalidRequest(f"The input of the call {self.id[:60]!r} is not a JSON object: fix it") from None
        return call_body(self.id, self.name, arguments)


Texts = Text | Annotated[list[TextBlock], Field(max_length=MAX_PARTS, fail_fast=True)]


class ResultBlock(Block):
    """The result of a call."""

    type: Literal["tool_result"]
    tool_use_id: str
    content: Texts = ""
    is_error: bool | None = None  # no effect: chat templates have nothing like it


UserBlock = Annotated[TextBlock | ResultBlock, Field(discriminator="type")]
AssistantBlock = Annotated[TextBlock | ThinkingBlock | CallBlock, Field(discriminator="type")]


class UserTurn(Body):
    """Text, and results of calls, which are separate messages in chat completions."""

    role: Literal["user"]
    content: Text | Annotated[list[UserBlock], Field(min_length=1, max_length=MAX_PARTS, fail_fast=True)]

    def messages(self) -> Iterator[dict[str, Any]]:
        words: list[TextBlock] = []
        for block in [TextBlock(type="text", text=self.content)] if isinstance(self.content, str) else self.content:
            if isinstance(block, TextBlock):
                words.append(block)
                continue
            if words:
                yield {"role": "user", "content": text_of(words)}
            words = []
            yield {"role": "tool", "tool_call_id": block.tool_use_id, "content": text_of(block.content)}
        if words:
            yield {"role": "user", "content": text_of(words)}


class AssistantTurn(Body):
    """Thoughts, text and calls of the assistant."""

    role: Literal["assistant"]
    content: Text | Annotated[list[AssistantBlock], Field(max_length=MAX_PARTS, fail_fast=True)]  # empty: no text

    def messages(self) -> Iterator[dict[str, Any]]:
        blocks = [TextBlock(type="text", text=self.content)] if isinstance(self.content, str) else self.content
        yield {
            "role": "assistant",
            "content": text_of([block for block in blocks if isinstance(block, TextBlock)]),
            "reasoning_content": "".join(block.thinking for block in blocks if isinstance(block, ThinkingBlock)) or None,
            "tool_calls": [block.called for block in blocks if isinstance(block, CallBlock)] or None,
        }


class SystemTurn(Body):
    """Instructions that hold from here on."""

    role: Literal["system"]
    content: Texts

    def messages(self) -> Iterator[dict[str, Any]]:
        yield {"role": "system", "content": text_of(self.content)}


class MessageTool(Block):
    """A function that the assistant may call."""

    type: Literal["custom"] | None = None
    name: str
    description: Text | None = None
    parameters: dict[str, Any] = Field(alias="input_schema")
    strict: bool | None = None
    eager_input_streaming: bool | None = None  # no effect: calls always stream as they come


AnyTool = Annotated[
    Annotated[MessageTool, Tag("our tool")] | Annotated[ForeignTool, Tag("another tool")], Discriminator(kind_of_tool("custom"))
]


class Choice(Body):
    """The field ``tool_choice``."""

    type: Literal["auto", "any", "none", "tool"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if (self.type == "tool") != (self.name is not None):
            raise InvalidRequest("name is needed with the type 'tool', and with no other", "name")
        return self


class Thinking(Body):
    """Whether the assistant thinks, if its chat template has a variable for that, and whether the client gets the thoughts."""

    type: Literal["enabled", "adaptive", "disabled"]
    budget_tokens: Annotated[int, Field(ge=1)] | None = None
    display: Literal["summarized", "omitted"] | None = None


class OutputFormat(Body):
    """The required form of the text."""

    type: Literal["json_schema"]
    json_schema: dict[str, Any] = Field(alias="schema")


class OutputConfig(Body):
    """How the text is written."""

    effort: Annotated[str, Field(max_length=64)] | None = None
    format: OutputFormat | None = None


Turn = Annotated[UserTurn | AssistantTurn | SystemTurn, Field(discriminator="role")]


class PromptBody(Body):
    """POST /v1/messages/count_tokens: the fields of a request that become the prompt."""

    model: str | None = None
    messages: Annotated[list[Turn], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)]
    system: Texts | None = None
    tools: Annotated[list[AnyTool], Field(max_length=MAX_TOOLS, fail_fast=True)] | None = None
    tool_choice: Choice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    cache_control: dict[str, Any] | None = None
    context_management: dict[str, Any] | None = None  # no effect: nothing is kept between requests
    chat_template_kwargs: dict[str, Any] | None = None

    @property
    def system_text(self) -> str:
        """The system message without Claude Code's billing line, which is new each time and would spoil prefix reuse."""
        system = self.system or ""
        return text_of(system if isinstance(system, str) else [part for part in system if not part.text.startswith(BILLING)])

    def as_chat(self, template: ChatTemplate) -> Conversation:
        """The conversation in the form of chat completions, for this chat template; raises `InvalidRequest`."""
        messages = [message for turn in self.messages for message in turn.messages()]
        system = [{"role": "system", "content": self.system_text}] if self.system_text else []
        chat: dict[str, Any] = {"messages": system + messages}
        chat["continue_final_message"] = messages[-1]["role"] == "assistant"
        thinking, values = self.thinking, dict(self.chat_template_kwargs or {})
        chosen = self.tool_choice or Choice(type="auto")
        choice = {"tool": named_tool(chosen.name or ""), "any": "required"}.get(chosen.type, chosen.type)
        chat |= tool_fields(self.tools, choice, False if chosen.disable_parallel_tool_use else None)
        if self.output_config is not None:
            chat["reasoning_effort"] = self.output_config.effort
        if thinking is not None:
            switched = dict.fromkeys(template.switches, thinking.type != "disabled")
            if any(values.get(name, value) != value for name, value in switched.items()):
                raise InvalidRequest("thinking differs from chat_template_kwargs: leave one out", "thinking")
            values |= switched
            chat["include_reasoning"] = thinking.type != "disabled" and thinking.display != "omitted"
        return Conversation.of(chat | {"chat_template_kwargs": values or None})


class MessagesBody(SamplingBody, PromptBody):
    """POST /v1/messages; sampling fields beyond Anthropic's are those of completions."""

    max_tokens: Limit
    stop: Stops | None = Field(default=None, validation_alias="stop_sequences")

    INERT: ClassVar[tuple[str, ...]] = ("cache_control", "context_management", "thinking.budget_tokens")

    def ignored(self, template: ChatTemplate) -> list[str]:
        """Fields without effect, and the kinds of tools and blocks that are left out."""
        blocks = [block for turn in self.messages if not isinstance(turn.content, str) for block in turn.content]
        thinks = self.thinking is not None and self.thinking.type != "disabled"
        others = {
            BILLING: self.system_text != text_of(self.system or ""),
            "is_error": any(isinstance(block, ResultBlock) and block.is_error for block in blocks),
            "thinking": self.thinking is not None and not template.switches and thinks != template.thinks,
        }
        given = [name for name, is_given in others.items() if is_given]
        return [*super().ignored(template), *left_out(self.tools), *given]

    @property
    def form(self) -> Structured | None:
        output = self.output_config.format if self.output_config is not None else None
        return None if output is None else Structured(json_schema=output.json_schema)


class MessageReply(PartsReply):
    """An answer whose parts are blocks; ``id`` names the message, ``model`` the model or adapter."""

    THOUGHTS, WORDS, CALLS = "thinking", "text", "tool_use"  # the first two are also names of fields

    def __init__(self, task: ChatTask, id: str, model: str) -> None:
        self._arguments = ""  # the growing call's arguments
        message: dict[str, Any] = {
            "id": f"msg_{id}",
            "type": "message",
            "role": "assistant",
            "model": model,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": {"input_tokens": len(task.ids), "output_tokens": 0},
        }
        super().__init__(task, message)

    def failed(self, error: CascadeError) -> bytes:
        return event(message_error(error), "error")

    def _start(self) -> Events:
        yield {"type": "message_start", "message": self._answer}

    def _add(self, kind: str, call: CallDelta | None) -> Events:
        fields: dict[str, Any] = {kind: "", "signature": ""} if kind == self.THOUGHTS else {kind: ""}
        if call is not None:
            fields, self._arguments = {"id": call.id, "name": call.name, "input": {}}, ""
        self._parts.append({"type": kind, **fields})
        yield {"type": "content_block_start", "index": len(self._parts) - 1, "content_block": self._parts[-1]}

    def _grow(self, kind: str, part: dict[str, Any], text: str) -> dict[str, Any]:
        if kind == self.CALLS:
            self._arguments += text
            delta = {"type": "input_json_delta", "partial_json": text}
        else:
            part[kind] += text
            delta = {"type": f"{kind}_delta", kind: text}
        return {"type": "content_block_delta", "index": len(self._parts) - 1, "delta": delta}

    def _end(self, part: dict[str, Any]) -> Events:
        """End a block; the input of a call that was cut off is as far as it came."""
        if part["type"] == self.CALLS and self._arguments:
            try:
                part["input"] = finite(from_json(self._arguments, allow_partial="trailing-strings"))
            except ValueError:  # the model may have written invalid JSON; Anthropic's API passes it on like this
                part["input"] = {CUT: self._arguments}
        yield {"type": "content_block_stop", "index": len(self._parts) - 1}

    def _finish(self, end: Completion) -> Events:
        yield from self._close()
        counts = usage([end], [self._reader])
        cached = counts["prompt_tokens_details"]["cached_tokens"]
        counted = {
            "input_tokens": counts["prompt_tokens"] - cached,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": cached,
            "output_tokens": counts["completion_tokens"],
        }
        if (details := counts.get("completion_tokens_details")) is not None:
            counted["output_tokens_details"] = {"thinking_tokens": details["reasoning_tokens"]}
        why = "stop_sequence" if end.stop_string is not None else STOP_REASONS[self._reader.finish_reason(end)]
        delta = {"stop_reason": why, "stop_sequence": end.stop_string}
        self._answer |= {**delta, "usage": counted, "cascade": report(end), "content": self._parts}
        yield {"type": "message_delta", "delta": delta, "usage": counted}
        yield {"type": "message_stop"}


def message_error(error: CascadeError) -> dict[str, Any]:
    """An error in Anthropic's form."""
    kind = ERROR_TYPES.get(error.http, "invalid_request_error")
    return {"type": "error", "error": {"type": kind, "message": str(error)}}
