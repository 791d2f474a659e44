"""OpenAI's Responses API on the chat path: its items become a conversation, and the assistant's turn becomes items.

Nothing is kept between requests, as with ``store: false``: the conversation comes whole each time.
"""

from collections.abc import Callable, Sequence
from time import time
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import Discriminator, Field, Tag, field_validator

from cascade.answer import Completion
from cascade.params import Structured
from deployments.gateway.admission.status import Refusal
from deployments.gateway.chat.assistant import ChatTask
from deployments.gateway.chat.conversation import MAX_MESSAGES, MAX_PARTS, MAX_TOOLS, Body, Conversation, Sparse, Text, text_of
from deployments.gateway.http.events import event, finite
from deployments.gateway.http.openai import SamplingBody
from deployments.gateway.http.parts import PartsReply, Said
from deployments.gateway.http.reply import drafted, report, usage

PARTS = {"reasoning": "reasoning_text", "message": "output_text"}  # what the items that hold a text hold it as
UNKEPT = ("previous_response_id", "conversation", "prompt", "background")


class TextPart(Sparse):
    """A piece of a message, whoever wrote it."""

    type: Literal["input_text", "output_text", "text", "reasoning_text", "summary_text"]
    text: Text
    annotations: Annotated[list[Any], Field(max_length=0)] | None = None
    logprobs: Annotated[list[Any], Field(max_length=0)] | None = None


Parts: TypeAlias = Annotated[list[TextPart], Field(max_length=MAX_PARTS, fail_fast=True)]


class KeptItem(Sparse):
    """An item of an answer, whose name and state say nothing when it is sent back."""

    id: str | None = None
    status: Literal["in_progress", "completed", "incomplete"] | None = None


class MessageItem(KeptItem):
    """What somebody says."""

    type: Literal["message"] = "message"
    role: Literal["system", "developer", "user", "assistant"]
    content: Text | Annotated[Parts, Field(min_length=1)]


class ReasoningItem(KeptItem):
    """What the assistant thought."""

    type: Literal["reasoning"]
    summary: Parts = Field(default_factory=list)
    content: Parts = Field(default_factory=list)


class CallItem(KeptItem):
    """What the assistant called."""

    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: Text


class ResultItem(KeptItem):
    """What the call gave."""

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


class FunctionTool(Sparse):
    """A function that the assistant may call."""

    type: Literal["function"]
    name: str
    description: Text | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class NamedTool(Body):
    """Call this function."""

    type: Literal["function"]
    name: str


class TextFormat(Sparse):
    """What the text has to be."""

    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    description: str | None = None
    json_schema: dict[str, Any] | None = Field(default=None, alias="schema")
    strict: bool | None = None


class TextConfig(Sparse):
    """How the text is written."""

    format: TextFormat | None = None
    verbosity: Literal["low", "medium", "high"] | None = None  # no effect


class Reasoning(Sparse):
    """How the assistant thinks. Its thoughts are told whole, never as a summary."""

    effort: Annotated[str, Field(max_length=64)] | None = None
    summary: Literal["auto", "concise", "detailed"] | None = None
    generate_summary: Literal["auto", "concise", "detailed"] | None = None


class StreamOptions(Sparse):
    """Of streamed answers."""

    include_obfuscation: bool | None = None  # no effect: there is none


class ResponsesBody(SamplingBody):
    """POST /v1/responses; the fields of sampling beyond OpenAI's are those of completions."""

    input: Text | Annotated[list[InputItem], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)]
    instructions: Text | None = None
    max_output_tokens: Annotated[int, Field(ge=1)] | None = None
    tools: Annotated[list[FunctionTool], Field(max_length=MAX_TOOLS, fail_fast=True)] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    text: TextConfig | None = None
    reasoning: Reasoning | None = None
    include_reasoning: bool | None = None  # as in vLLM
    max_tool_calls: Annotated[int, Field(ge=1)] | None = None  # no effect: of tools that a server calls itself
    chat_template_kwargs: dict[str, Any] | None = None
    stream_options: StreamOptions | None = None
    include: Annotated[list[Literal["reasoning.encrypted_content"]], Field(max_length=16, fail_fast=True)] | None = None
    truncation: Literal["auto", "disabled"] | None = None  # what is too long is refused either way
    previous_response_id: str | None = None
    conversation: Any = None
    prompt: Any = None
    background: bool | None = None

    @field_validator(*UNKEPT)
    @classmethod
    def _is_absent(cls, value: Any) -> Any:
        if value:
            raise ValueError("nothing is kept here between requests: leave it out, and send the whole conversation as input")
        return value

    @property
    def limit(self) -> int | None:
        """Output tokens at most, if the request says so."""
        return self.max_output_tokens

    @property
    def form(self) -> Structured | None:
        said = self.text.format if self.text is not None else None
        if said is None or said.type == "text":
            return None
        return Structured(json_schema=said.json_schema) if said.json_schema else Structured(json_object=True)

    def ignored(self, reads: Callable[[str], bool]) -> list[str]:
        reasoning = self.reasoning or Reasoning()
        nothing = {
            "reasoning.effort": reasoning.effort and not reads("reasoning_effort"),
            "reasoning.summary": reasoning.summary or reasoning.generate_summary,
            "text.verbosity": self.text and self.text.verbosity,
            "include": self.include,
            "max_tool_calls": self.max_tool_calls,
            "truncation": self.truncation == "auto",
            "stream_options.include_obfuscation": self.stream_options and self.stream_options.include_obfuscation,
        }
        return super().ignored(reads) + [name for name, value in nothing.items() if value]

    def conversed(self, reads: Callable[[str], bool]) -> Conversation:
        """The conversation as chat completions have it; raises `InvalidRequest`."""
        before = [] if self.instructions is None else [{"role": "system", "content": self.instructions}]
        items = [MessageItem(role="user", content=self.input)] if isinstance(self.input, str) else self.input
        said: dict[str, Any] = {"messages": [*before, *_messages(items)]}
        if self.tools:
            functions = [tool.model_dump(exclude={"type"}, exclude_none=True) for tool in self.tools]
            said["tools"] = [{"type": "function", "function": function} for function in functions]
            said["parallel_tool_calls"] = self.parallel_tool_calls
        choice = self.tool_choice
        if isinstance(choice, NamedTool):
            said["tool_choice"] = {"type": "function", "function": {"name": choice.name}}
        elif self.tools or choice != "auto":
            said["tool_choice"] = choice
        said["reasoning_effort"] = self.reasoning.effort if self.reasoning is not None else None
        said["include_reasoning"] = self.include_reasoning
        return Conversation.of(said | {"chat_template_kwargs": self.chat_template_kwargs})


def _messages(items: Sequence[Any]) -> list[dict[str, Any]]:
    """Messages of chat completions. What the assistant thinks, says and calls in a row is one message."""
    messages: list[dict[str, Any]] = []
    for item in items:
        if isinstance(item, MessageItem) and item.role != "assistant":
            messages.append({"role": item.role, "content": text_of(item.content)})
        elif isinstance(item, ResultItem):
            messages.append({"role": "tool", "tool_call_id": item.call_id, "content": text_of(item.output)})
        elif isinstance(item, ReasoningItem):
            thoughts = text_of(item.content) or text_of(item.summary)
            if thoughts:
                messages.append({"role": "assistant", "content": "", "reasoning_content": thoughts})
        elif isinstance(item, MessageItem):
            last = messages[-1] if messages else {}
            if last.get("role") == "assistant" and not last["content"] and "tool_calls" not in last:
                last["content"] = text_of(item.content)
            else:
                messages.append({"role": "assistant", "content": text_of(item.content)})
        else:
            if not messages or messages[-1]["role"] != "assistant":
                messages.append({"role": "assistant", "content": ""})
            function = {"name": item.name, "arguments": item.arguments}
            messages[-1].setdefault("tool_calls", []).append({"id": item.call_id, "type": "function", "function": function})
    return messages


class ResponseReply(PartsReply):
    """Its parts are items; ``id`` names the response, and ``model`` what wrote it."""

    THOUGHTS, WORDS = "reasoning", "message"

    def __init__(self, body: ResponsesBody, task: ChatTask, id: str, model: str) -> None:
        self._id = id
        self._items: list[dict[str, Any]] = []
        self._num_events = 0
        params = task.params
        response = {
            "id": f"resp_{id}",
            "object": "response",
            "created_at": int(time()),
            "status": "in_progress",
            "model": model,
            "output": [],
            "error": None,
            "incomplete_details": None,
            "usage": None,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "temperature": params.temperature,
            "top_p": params.top_p,
            "tools": [tool.model_dump() for tool in body.tools or ()],
            "tool_choice": body.model_dump(include={"tool_choice"})["tool_choice"] or "auto",
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "text": {"format": {"type": "text"}}
            if body.text is None
            else body.text.model_dump(by_alias=True, exclude_none=True),
            "reasoning": None if body.reasoning is None else body.reasoning.model_dump(),
            "truncation": "disabled",
            "store": False,
            "background": False,
            "previous_response_id": None,
            "metadata": body.metadata or {},
        }
        super().__init__(task, finite(response))

    def failed(self, refused: Refusal) -> bytes:
        error = {"code": "server_error", "message": refused.message}
        response = self._answer | {"status": "failed", "error": error, "output": self._items}
        return self._event({"type": "response.failed", "response": response})

    def _event(self, said: dict[str, Any]) -> bytes:
        self._num_events += 1
        return event(said | {"sequence_number": self._num_events - 1}, said["type"])

    def _start(self) -> Said:
        for kind in ("response.created", "response.in_progress"):
            yield {"type": kind, "response": self._answer}

    def _call(self, id: str, name: str) -> Said:
        yield from self._begin("function_call", call_id=id, name=name, arguments="")

    def _argue(self, arguments: str) -> Said:
        self._items[-1]["arguments"] += arguments
        if arguments:
            yield self._grown("response.function_call_arguments.delta", delta=arguments)

    def _write(self, kind: str, text: str) -> Said:
        more: dict[str, Any] = {"logprobs": []} if kind == "message" else {}
        shape: dict[str, Any] = {"role": "assistant"} if kind == "message" else {"summary": []}
        last = self._items[-1] if self._items else {}
        if last.get("type") != kind or last["status"] != "in_progress":
            yield from self._begin(kind, content=[], **shape)
            part = {"type": PARTS[kind], "text": "", **more} | ({"annotations": []} if more else {})
            self._items[-1]["content"] = [part]
            yield self._grown("response.content_part.added", content_index=0, part=part)
        if text:
            self._items[-1]["content"][0]["text"] += text
            yield self._grown(f"response.{PARTS[kind]}.delta", content_index=0, delta=text, **more)

    def _begin(self, kind: str, **fields: Any) -> Said:
        yield from self._close("completed")
        prefix = {"reasoning": "rs", "message": "msg", "function_call": "fc"}[kind]
        item = {"id": f"{prefix}_{self._id}_{len(self._items)}", "type": kind, "status": "in_progress", **fields}
        self._items.append(item)
        yield {"type": "response.output_item.added", "output_index": len(self._items) - 1, "item": item}

    def _close(self, status: str) -> Said:
        """The item that grows is whole."""
        if not self._items or self._items[-1]["status"] != "in_progress":
            return
        item = self._items[-1]
        if item["type"] == "function_call":
            yield self._grown("response.function_call_arguments.done", name=item["name"], arguments=item["arguments"])
        else:
            [part] = item["content"]
            more: dict[str, Any] = {"logprobs": []} if item["type"] == "message" else {}
            yield self._grown(f"response.{part['type']}.done", content_index=0, text=part["text"], **more)
            yield self._grown("response.content_part.done", content_index=0, part=part)
        item["status"] = status
        yield {"type": "response.output_item.done", "output_index": len(self._items) - 1, "item": item}

    def _grown(self, kind: str, **fields: Any) -> dict[str, Any]:
        """An event of the item that grows."""
        return {"type": kind, "item_id": self._items[-1]["id"], "output_index": len(self._items) - 1, **fields}

    def _finish(self, end: Completion) -> Said:
        """The last piece has come; an answer that says nothing is an empty message."""
        status = "completed" if end.finish_reason == "stop" else "incomplete"
        if not self._items:
            yield from self._write("message", "")
        yield from self._close(status)
        told = usage([end], [self._reader])
        counted = {
            "input_tokens": told["prompt_tokens"],
            "input_tokens_details": {**told["prompt_tokens_details"], "cache_write_tokens": 0},
            "output_tokens": told["completion_tokens"],
            "output_tokens_details": told.get("completion_tokens_details", {"reasoning_tokens": 0}),
            "total_tokens": told["total_tokens"],
        }
        cut = None if status == "completed" else {"reason": "max_output_tokens"}
        self._answer |= {"status": status, "incomplete_details": cut, "output": self._items, "usage": counted}
        self._answer |= {"cascade": report(end), **drafted([end])}
        yield {"type": f"response.{status}", "response": self._answer}
