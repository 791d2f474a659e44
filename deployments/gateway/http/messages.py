"""Anthropic's Messages API on the chat path: its blocks become a conversation, and the assistant's turn becomes blocks."""

import json
from collections.abc import Callable, Iterator
from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator
from pydantic_core import from_json

from cascade.answer import Completion
from cascade.errors import InvalidRequest
from cascade.params import Structured
from deployments.gateway.admission.status import Refusal
from deployments.gateway.chat.assistant import ChatTask
from deployments.gateway.chat.conversation import MAX_MESSAGES, MAX_PARTS, MAX_TOOLS, Body, Conversation, Sparse, Text, text_of
from deployments.gateway.chat.reader import finish_reason
from deployments.gateway.http.events import event, finite
from deployments.gateway.http.openai import SamplingBody, Stops
from deployments.gateway.http.parts import PartsReply, Said
from deployments.gateway.http.reply import report, usage

PATH = "/v1/messages"
KINDS = {"user": ("text", "tool_result"), "assistant": ("text", "thinking", "tool_use"), "system": ("text",)}  # of blocks
SWITCHES = ("enable_thinking", "thinking")  # variables by which chat templates let a model think, or not
STOP_REASONS = {"tool_calls": "tool_use", "length": "max_tokens", "stop": "end_turn"}
ERROR_TYPES = {  # of statuses, as Anthropic names them
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    500: "api_error",
    503: "overloaded_error",
    504: "timeout_error",
}


class Block(Sparse):
    """A piece of a message."""

    cache_control: dict[str, Any] | None = None  # no effect: what prompts have in common is always kept


class TextBlock(Block):
    """Words."""

    type: Literal["text"]
    text: Text
    citations: Annotated[list[Any], Field(max_length=0)] | None = None


class ThinkingBlock(Block):
    """What the assistant thought. Nothing is signed here."""

    type: Literal["thinking"]
    thinking: Text
    signature: str = ""


class CallBlock(Block):
    """What the assistant called."""

    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]
    caller: dict[str, Any] | None = None  # it says nothing: only the assistant calls here


Texts = Text | Annotated[list[TextBlock], Field(max_length=MAX_PARTS, fail_fast=True)]


class ResultBlock(Block):
    """What the call gave."""

    type: Literal["tool_result"]
    tool_use_id: str
    content: Texts = ""
    is_error: bool | None = None  # no effect: the content says so


AnyBlock = Annotated[TextBlock | ThinkingBlock | CallBlock | ResultBlock, Field(discriminator="type")]


class TurnBody(Body):
    """One turn of a conversation."""

    role: Literal["user", "assistant", "system"]
    content: Text | Annotated[list[AnyBlock], Field(min_length=1, max_length=MAX_PARTS, fail_fast=True)]

    @model_validator(mode="after")
    def _fits(self) -> Self:
        kinds = KINDS[self.role]
        for block in self.content if isinstance(self.content, list) else ():
            if block.type not in kinds:
                raise ValueError(f"content has a {block.type}: a turn of the {self.role} has {', '.join(kinds)}")
        return self


class MessageTool(Block):
    """A function that the assistant may call."""

    type: Literal["custom"] | None = None
    name: str
    description: Text | None = None
    input_schema: dict[str, Any]
    strict: bool | None = None
    eager_input_streaming: bool | None = None  # it always streams so


class Choice(Body):
    """Which tool is called, if any."""

    type: Literal["auto", "any", "none", "tool"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class Thinking(Body):
    """Whether the assistant thinks, where its chat template can be told so, and whether the client hears of it."""

    type: Literal["enabled", "adaptive", "disabled"]
    budget_tokens: Annotated[int, Field(ge=1)] | None = None
    display: Literal["summarized", "omitted"] | None = None


class OutputFormat(Body):
    """What the text has to be."""

    type: Literal["json_schema"]
    json_schema: dict[str, Any] = Field(alias="schema")


class OutputConfig(Body):
    """How the text is written."""

    effort: Annotated[str, Field(max_length=64)] | None = None
    format: OutputFormat | None = None


class PromptBody(Body):
    """POST /v1/messages/count_tokens: all of a request that becomes its prompt."""

    model: str | None = None
    messages: Annotated[list[TurnBody], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)]
    system: Texts | None = None
    tools: Annotated[list[MessageTool], Field(max_length=MAX_TOOLS, fail_fast=True)] | None = None
    tool_choice: Choice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    cache_control: dict[str, Any] | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    def conversed(self, reads: Callable[[str], bool]) -> Conversation:
        """The conversation as chat completions have it, see `SamplingBody.ignored`; raises `InvalidRequest`."""
        said: dict[str, Any] = {"messages": [message for turn in self.messages for message in _messages(turn)]}
        if self.system:
            said["messages"].insert(0, {"role": "system", "content": text_of(self.system)})
        said["continue_final_message"] = said["messages"][-1]["role"] == "assistant"
        choice, thinking = self.tool_choice or Choice(type="auto"), self.thinking
        if self.tools:
            said["tools"] = [{"type": "function", "function": _function(tool)} for tool in self.tools]
            said["parallel_tool_calls"] = False if choice.disable_parallel_tool_use else None
        if self.tools or choice.type != "auto":
            named = {"type": "function", "function": {"name": choice.name or ""}}
            said["tool_choice"] = named if choice.type == "tool" else "required" if choice.type == "any" else choice.type
        if self.output_config is not None:
            said["reasoning_effort"] = self.output_config.effort
        values = dict(self.chat_template_kwargs or {})
        if thinking is not None:
            values |= {name: thinking.type != "disabled" for name in SWITCHES if reads(name) and name not in values}
            said["include_reasoning"] = thinking.type != "disabled" and thinking.display != "omitted"
        return Conversation.of(said | {"chat_template_kwargs": values or None})


class MessagesBody(SamplingBody, PromptBody):
    """POST /v1/messages; the fields of sampling beyond Anthropic's are those of completions."""

    max_tokens: Annotated[int, Field(ge=1)]
    stop: Stops | None = Field(default=None, validation_alias="stop_sequences")

    @property
    def limit(self) -> int | None:
        """Output tokens at most."""
        return self.max_tokens

    @property
    def form(self) -> Structured | None:
        said = self.output_config.format if self.output_config is not None else None
        return None if said is None else Structured(json_schema=said.json_schema)

    def ignored(self, reads: Callable[[str], bool]) -> list[str]:
        thinking, effort = self.thinking, self.output_config is not None and self.output_config.effort
        switched = any(map(reads, SWITCHES))
        blocks = [*self._blocks()]
        nothing = {
            "cache_control": self.cache_control or any(one.cache_control for one in blocks),
            "is_error": any(isinstance(one, ResultBlock) and one.is_error for one in blocks),
            "eager_input_streaming": any(isinstance(one, MessageTool) and one.eager_input_streaming is False for one in blocks),
            "thinking": thinking is not None and thinking.type != "disabled" and not switched,
            "thinking.budget_tokens": thinking is not None and thinking.budget_tokens,
            "output_config.effort": effort and not reads("reasoning_effort"),
        }
        return super().ignored(reads) + [name for name, value in nothing.items() if value]

    def _blocks(self) -> Iterator[Block]:
        """All that may bear a mark for a cache."""
        yield from self.tools or ()
        for content in (self.system, *(turn.content for turn in self.messages)):
            for block in content if isinstance(content, list) else ():
                yield block
                if isinstance(block, ResultBlock) and isinstance(block.content, list):
                    yield from block.content


def _function(tool: MessageTool) -> dict[str, Any]:
    function = {"name": tool.name, "description": tool.description, "parameters": tool.input_schema, "strict": tool.strict}
    return {name: value for name, value in function.items() if value is not None}


def _messages(turn: TurnBody) -> Iterator[dict[str, Any]]:
    """Messages of chat completions: results of calls are messages of their own."""
    blocks = [TextBlock(type="text", text=turn.content)] if isinstance(turn.content, str) else turn.content
    if turn.role == "assistant":
        said: dict[str, Any] = {"role": "assistant", "content": text_of([one for one in blocks if isinstance(one, TextBlock)])}
        if thoughts := "".join(one.thinking for one in blocks if isinstance(one, ThinkingBlock)):
            said["reasoning_content"] = thoughts
        calls = [one for one in blocks if isinstance(one, CallBlock)]
        if calls:
            said["tool_calls"] = [{"id": one.id, "type": "function", "function": _called(one)} for one in calls]
        yield said
        return
    words: list[TextBlock] = []
    for block in blocks:
        if isinstance(block, TextBlock):
            words.append(block)
        elif isinstance(block, ResultBlock):
            yield from [{"role": turn.role, "content": text_of(words)}] if words else []
            words = []
            yield {"role": "tool", "tool_call_id": block.tool_use_id, "content": text_of(block.content)}
    yield from [{"role": turn.role, "content": text_of(words)}] if words else []


def _called(block: CallBlock) -> dict[str, str]:
    try:
        return {"name": block.name, "arguments": json.dumps(block.input, ensure_ascii=False)}
    except (ValueError, RecursionError):
        raise InvalidRequest(f"The input of the call {block.id[:60]!r} is no JSON object: mend it") from None


class MessageReply(PartsReply):
    """Its parts are blocks; ``id`` names the message, and ``model`` what wrote it."""

    THOUGHTS, WORDS = "thinking", "text"  # also the fields that hold them

    def __init__(self, task: ChatTask, id: str, model: str) -> None:
        self._blocks: list[dict[str, Any]] = []
        self._open = False  # the last block grows
        self._arguments = ""  # of the call that grows
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

    def failed(self, refused: Refusal) -> bytes:
        """What comes in place of the end."""
        return event(error_body(refused), "error")

    def _start(self) -> Said:
        yield {"type": "message_start", "message": self._answer}

    def _write(self, kind: str, text: str) -> Said:
        if not self._open or self._blocks[-1]["type"] != kind:
            yield from self._begin(kind, **{kind: ""}, **({"signature": ""} if kind == self.THOUGHTS else {}))
        self._blocks[-1][kind] += text
        yield self._grown({"type": f"{kind}_delta", kind: text})

    def _call(self, id: str, name: str) -> Said:
        yield from self._begin("tool_use", id=id, name=name, input={})

    def _argue(self, arguments: str) -> Said:
        self._arguments += arguments
        if arguments:
            yield self._grown({"type": "input_json_delta", "partial_json": arguments})

    def _begin(self, kind: str, **fields: Any) -> Said:
        yield from self._close()
        self._open, self._arguments = True, ""
        self._blocks.append({"type": kind, **fields})
        yield {"type": "content_block_start", "index": len(self._blocks) - 1, "content_block": self._blocks[-1]}

    def _grown(self, delta: dict[str, Any]) -> dict[str, Any]:
        return {"type": "content_block_delta", "index": len(self._blocks) - 1, "delta": delta}

    def _close(self) -> Said:
        """The block that grows is whole; of a call that was cut its input is what has come."""
        if not self._open:
            return
        self._open = False
        if self._arguments:
            try:
                self._blocks[-1]["input"] = finite(from_json(self._arguments, allow_partial="trailing-strings"))
            except ValueError:  # the model need not write JSON; so Anthropic hands on what is none
                self._blocks[-1]["input"] = {"INVALID_JSON": self._arguments}
        yield {"type": "content_block_stop", "index": len(self._blocks) - 1}

    def _finish(self, end: Completion) -> Said:
        yield from self._close()
        told = usage([end], [self._reader])
        cached = told["prompt_tokens_details"]["cached_tokens"]
        counted = {
            "input_tokens": told["prompt_tokens"] - cached,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": cached,
            "output_tokens": told["completion_tokens"],
        }
        if (details := told.get("completion_tokens_details")) is not None:
            counted["output_tokens_details"] = {"thinking_tokens": details["reasoning_tokens"]}
        why = "stop_sequence" if end.stop_string is not None else STOP_REASONS[finish_reason(end, self._reader)]
        delta = {"stop_reason": why, "stop_sequence": end.stop_string}
        self._answer |= {**delta, "usage": counted, "cascade": report(end), "content": self._blocks}
        yield {"type": "message_delta", "delta": delta, "usage": counted}
        yield {"type": "message_stop"}


def error_body(refused: Refusal) -> dict[str, Any]:
    """An error in Anthropic's form."""
    kind = ERROR_TYPES.get(refused.kind.http, "invalid_request_error")
    return {"type": "error", "error": {"type": kind, "message": refused.message}}


def body_of(refused: Refusal, path: str) -> dict[str, Any]:
    """An error in the form of the API that ``path`` belongs to."""
    return error_body(refused) if path.startswith(PATH) else refused.body
