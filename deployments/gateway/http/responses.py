"""OpenAI's Responses API on top of chats: items become a conversation, and the assistant's turn becomes items.

Nothing is kept between requests, as with ``store: false``: every request has the whole conversation.
"""

from collections.abc import Sequence
from time import time
from typing import Annotated, Any, ClassVar, Literal, Self, TypeAlias

from pydantic import Discriminator, Field, Tag, field_validator, model_validator

from cascade.answer import Completion
from cascade.chat.conversation import MAX_MESSAGES, MAX_PARTS, MAX_TOOLS, Body, Conversation, Text, text_of
from cascade.chat.template import ChatTemplate
from cascade.errors import CascadeError
from cascade.params import Structured
from deployments.gateway.chat.assistant import ChatTask
from deployments.gateway.chat.calls import CallDelta, call_body
from deployments.gateway.http.events import event, finite
from deployments.gateway.http.openai import Limit, SamplingBody, StreamOptions, form_of
from deployments.gateway.http.parts import Events, ForeignTool, PartsReply, kind_of_tool, left_out, named_tool, tool_fields
from deployments.gateway.http.reply import report, usage

PARTS = {"reasoning": "reasoning_text", "message": "output_text"}  # types of the parts in items with text
LOGPROBS: dict[str, dict[str, Any]] = {"reasoning": {}, "message": {"logprobs": []}}  # further fields that clients require
PREFIXES = {"reasoning": "rs", "message": "msg", "function_call": "fc"}  # prefixes of ids


class TextPart(Body):
    """A piece of a message, whoever wrote it."""

    type: Literal["input_text", "output_text", "text", "reasoning_text", "summary_text"]
    text: Text
    annotations: Annotated[list[Any], Field(max_length=0)] | None = None
    logprobs: Annotated[list[Any], Field(max_length=0)] | None = None


Parts: TypeAlias = Annotated[list[TextPart], Field(max_length=MAX_PARTS, fail_fast=True)]


class KeptItem(Body):
    """An item of an answer that is sent back; its id and status are ignored."""

    id: str | None = None
    status: Literal["in_progress", "completed", "incomplete"] | None = None


class MessageItem(KeptItem):
    """A message of any role."""

    type: Literal["message"] = "message"
    role: Literal["system", "developer", "user", "assistant"]
    content: Text | Annotated[Parts, Field(min_length=1)]


class ReasoningItem(KeptItem):
    """Thoughts of the assistant."""

    type: Literal["reasoning"]
    summary: Parts = Field(default_factory=list)
    content: Parts = Field(default_factory=list)


class CallItem(KeptItem):
    """A call by the assistant."""

    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: Text


class ResultItem(KeptItem):
    """The result of a call."""

    type: Literal["function_call_output"]
    call_id: str
    output: Text | Parts


def _kind(value: Any) -> Any:
    return (value.get("type") or "message") if isinstance(value, dict) else getattr(value, "type", None)


InputItem = Annotated[
    Annotated[MessageItem, Tag("message")]
    | Annotated[ReasoningItem, Tag("reasoning")]
    | Annotated[CallItem, Tag("function_call")]
    | Annotated[ResultItem, Tag("function_call_output")],
    Discriminator(_kind),
]


class NamedTool(Body):
    """The choice to call one function."""

    type: Literal["function"]
    name: str


class FunctionTool(NamedTool):
    """A function that the assistant may call."""

    description: Text | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


AnyTool = Annotated[
    Annotated[FunctionTool, Tag("our tool")] | Annotated[ForeignTool, Tag("another tool")],
    Discriminator(kind_of_tool("function")),
]


class TextFormat(Body):
    """The required form of the text."""

    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    description: str | None = None
    json_schema: dict[str, Any] | None = Field(default=None, alias="schema")
    strict: bool | None = None

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise ValueError("schema is needed with the type 'json_schema', and with no other")
        return self


class TextConfig(Body):
    """How the text is written."""

    format: TextFormat | None = None
    verbosity: Literal["low", "medium", "high"] | None = None


class Reasoning(Body):
    """How the assistant thinks. Thoughts are returned in full, never as a summary."""

    effort: Annotated[str, Field(max_length=64)] | None = None
    summary: Literal["auto", "concise", "detailed"] | None = None
    generate_summary: Literal["auto", "concise", "detailed"] | None = None


class ResponsesBody(SamplingBody):
    """POST /v1/responses; sampling fields beyond OpenAI's are those of completions."""

    input: Text | Annotated[list[InputItem], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)]
    instructions: Text | None = None
    max_output_tokens: Limit | None = None
    tools: Annotated[list[AnyTool], Field(max_length=MAX_TOOLS, fail_fast=True)] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    text: TextConfig | None = None
    reasoning: Reasoning | None = None
    include_reasoning: bool | None = None  # as in vLLM
    chat_template_kwargs: dict[str, Any] | None = None
    stream_options: StreamOptions | None = None
    max_tool_calls: Annotated[int, Field(ge=1)] | None = None  # no effect: it limits tools that a server calls itself
    include: Annotated[list[Literal["reasoning.encrypted_content"]], Field(max_length=16, fail_fast=True)] | None = None
    truncation: Literal["auto", "disabled"] | None = None  # no effect: a prompt that is too long is always refused
    previous_response_id: Any = None
    conversation: Any = None
    prompt: Any = None
    background: bool | None = None
    client_metadata: dict[str, Any] | None = None  # Codex sends it

    INERT: ClassVar[tuple[str, ...]] = (
        *("max_tool_calls", "include", "truncation", "client_metadata", "text.verbosity", "text.format.description"),
        *("reasoning.summary", "reasoning.generate_summary"),
    )
    PROMPT: ClassVar[str] = "input"
    LIMITS: ClassVar[tuple[str, ...]] = ("max_output_tokens",)

    @field_validator("previous_response_id", "conversation", "prompt", "background")
    @classmethod
    def _is_absent(cls, value: Any) -> Any:
        if value:
            raise ValueError("nothing is kept here between requests: leave it out, and send the whole conversation as input")
        return value

    def ignored(self, template: ChatTemplate) -> list[str]:
        """Fields without effect, and the kinds of tools that are left out."""
        return [*super().ignored(template), *left_out(self.tools)]

    @property
    def form(self) -> Structured | None:
        output = self.text.format if self.text is not None else None
        return None if output is None else form_of(output.type, output.json_schema)

    def as_chat(self, template: ChatTemplate) -> Conversation:
        """The conversation in the form of chat completions; raises `InvalidRequest`."""
        before = [] if self.instructions is None else [{"role": "system", "content": self.instructions}]
        items = [MessageItem(role="user", content=self.input)] if isinstance(self.input, str) else self.input
        chat: dict[str, Any] = {"messages": [*before, *_messages(items)]}
        choice = named_tool(self.tool_choice.name) if isinstance(self.tool_choice, NamedTool) else self.tool_choice
        chat |= tool_fields(self.tools, choice, self.parallel_tool_calls)
        chat["reasoning_effort"] = self.reasoning.effort if self.reasoning is not None else None
        chat["include_reasoning"] = self.include_reasoning
        return Conversation.of(chat | {"chat_template_kwargs": self.chat_template_kwargs})


def _messages(items: Sequence[Any]) -> list[dict[str, Any]]:
    """Messages of chat completions. Consecutive items of the assistant become one message."""
    messages: list[dict[str, Any]] = []

    def turn(goes_on: bool) -> dict[str, Any]:
        """The assistant's turn for an item: the last message, if that is the assistant's and ``goes_on``, or a new one."""
        if not goes_on or not messages or messages[-1]["role"] != "assistant":
            messages.append({"role": "assistant", "content": ""})
        return messages[-1]

    for item in items:
        if isinstance(item, ResultItem):
            messages.append({"role": "tool", "tool_call_id": item.call_id, "content": text_of(item.output)})
        elif isinstance(item, ReasoningItem):
            if thoughts := text_of(item.content) or text_of(item.summary):
                turn(False)["reasoning_content"] = thoughts
        elif isinstance(item, CallItem):
            turn(True).setdefault("tool_calls", []).append(call_body(item.call_id, item.name, item.arguments))
        elif item.role == "assistant":
            last = messages[-1] if messages else {}
            turn(not last.get("content") and "tool_calls" not in last)["content"] = text_of(item.content)
        else:
            messages.append({"role": item.role, "content": text_of(item.content)})
    return messages


class ResponseReply(PartsReply):
    """An answer whose parts are items; ``id`` names the response, ``model`` the model or adapter."""

    THOUGHTS, WORDS, CALLS = "reasoning", "message", "function_call"

    def __init__(self, body: ResponsesBody, task: ChatTask, id: str, model: str) -> None:
        self._id = id
        self._num_events = 0
        self._status = "completed"  # status of items when they end
        kept = {"instructions", "max_output_tokens", "tools", "tool_choice", "text", "reasoning"}
        given = body.model_dump(by_alias=True, include=kept)
        response = {
            "id": f"resp_{id}",
            "object": "response",
            "created_at": int(time()),
            "status": "in_progress",
            "model": model,
            "output": [],
            **dict.fromkeys(("error", "incomplete_details", "usage")),
            **given,
            "temperature": task.params.temperature,
            "top_p": task.params.top_p,
            "tools": given["tools"] or [],
            "tool_choice": given["tool_choice"] or "auto",
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "text": given["text"] or {"format": {"type": "text"}},
            "store": False,
            "metadata": body.metadata or {},
        }
        super().__init__(task, finite(response))

    def failed(self, error: CascadeError) -> bytes:
        failure = {"code": "server_error", "message": str(error)}
        response = self._answer | {"status": "failed", "error": failure, "output": self._parts}
        return self._event({"type": "response.failed", "response": response})

    def _event(self, content: dict[str, Any]) -> bytes:
        self._num_events += 1
        return event(content | {"sequence_number": self._num_events - 1}, content["type"])

    def _start(self) -> Events:
        for kind in ("response.created", "response.in_progress"):
            yield {"type": kind, "response": self._answer}

    def _add(self, kind: str, call: CallDelta | None) -> Events:
        if call is not None:
            fields: dict[str, Any] = {"call_id": call.id, "name": call.name, "arguments": ""}
        else:
            fields = {"content": [], **({"role": "assistant"} if kind == self.WORDS else {"summary": []})}
        id = f"{PREFIXES[kind]}_{self._id}_{len(self._parts)}"
        item = {"id": id, "type": kind, "status": "in_progress", **fields}
        self._parts.append(item)
        yield {"type": "response.output_item.added", "output_index": len(self._parts) - 1, "item": item}
        if call is None:
            part = {"type": PARTS[kind], "text": "", **LOGPROBS[kind], **({"annotations": []} if kind == self.WORDS else {})}
            item["content"] = [part]
            yield self._part_event("response.content_part.added", content_index=0, part=part)

    def _grow(self, kind: str, part: dict[str, Any], text: str) -> dict[str, Any]:
        if kind == self.CALLS:
            part["arguments"] += text
            return self._part_event("response.function_call_arguments.delta", delta=text)
        part["content"][0]["text"] += text
        return self._part_event(f"response.{PARTS[kind]}.delta", content_index=0, delta=text, **LOGPROBS[kind])

    def _end(self, part: dict[str, Any]) -> Events:
        kind = part["type"]
        if kind == self.CALLS:
            yield self._part_event("response.function_call_arguments.done", name=part["name"], arguments=part["arguments"])
        else:
            [content] = part["content"]
            yield self._part_event(f"response.{PARTS[kind]}.done", content_index=0, text=content["text"], **LOGPROBS[kind])
            yield self._part_event("response.content_part.done", content_index=0, part=content)
        part["status"] = self._status
        yield {"type": "response.output_item.done", "output_index": len(self._parts) - 1, "item": part}

    def _part_event(self, kind: str, **fields: Any) -> dict[str, Any]:
        return {"type": kind, "item_id": self._parts[-1]["id"], "output_index": len(self._parts) - 1, **fields}

    def _finish(self, end: Completion) -> Events:
        """Events after the last piece; an answer without parts gets an empty message."""
        self._status = status = "completed" if end.finish_reason == "stop" else "incomplete"
        if not self._parts:
            yield from self._begin(self.WORDS)
        yield from self._close()
        counts = usage([end], [self._reader])
        counted = {
            "input_tokens": counts["prompt_tokens"],
            "input_tokens_details": {**counts["prompt_tokens_details"], "cache_write_tokens": 0},
            "output_tokens": counts["completion_tokens"],
            "output_tokens_details": counts.get("completion_tokens_details", {"reasoning_tokens": 0}),
            "total_tokens": counts["total_tokens"],
        }
        cut = None if status == "completed" else {"reason": "max_output_tokens"}
        self._answer |= {"status": status, "incomplete_details": cut, "output": self._parts, "usage": counted}
        self._answer["cascade"] = report(end)
        yield {"type": f"response.{status}", "response": self._answer}
