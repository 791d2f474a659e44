"""Bodies of conversations in OpenAI's form: messages, tools, and calls of tools."""

import json
from collections.abc import Sequence
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ModelWrapValidatorHandler, PrivateAttr, field_validator, model_validator
from pydantic import ValidationError as PydanticError

from cascade.chat.template import Style
from cascade.engine.grammar import compilable
from cascade.errors import InvalidRequest

Text = Annotated[str, Field(max_length=4_000_000)]
FunctionName = Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]{1,64}$")]
CallId = Annotated[str, Field(min_length=1, max_length=128)]
PLAIN_KINDS = ("str", "int", "float", "bool")  # pydantic's names
NO_PARAMETERS: dict[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}
MAX_TOOLS = 128
MAX_MESSAGES = 4096
MAX_PARTS = 4096  # parts of a message at most
MAX_FIELDS = 128  # fields of an object at most, since each unknown field is an error of its own


def _likeliest(errors: Sequence[Any]) -> Any:
    """The error to report: a value of a union has an error for each type, and the type that was meant counts."""
    same_field = [error for error in errors if error["loc"][:2] == errors[0]["loc"][:2]]
    return next((error for error in same_field if not error["type"].endswith("_type")), errors[0])


def mistake(errors: Sequence[Any], whole: str = "The body") -> tuple[str | None, str]:
    """The first of pydantic's ``errors`` in a body: the field, and one sentence, which never repeats a long value.

    ``whole`` names the body in the sentence if no field is at fault.
    """
    first = _likeliest(errors)
    if first["type"] == "json_invalid":
        place, reason = first["loc"][1], first["ctx"]["error"]
        return None, f"The body is not JSON: {reason}" + (f" at character {place}" if place else "")
    if first["type"] == "model_attributes_type" and len(first["loc"]) == 1:
        return None, "The body is no JSON object: send one, with the header Content-Type: application/json"
    message = first["msg"].removeprefix("Value error, ")
    kind, *path = first["loc"]
    if kind == "header":
        where = "-".join(part.capitalize() for part in str(path[0]).split("-"))
    else:  # pydantic's path also has the members of unions
        where = ".".join(
            str(part) for part in path if isinstance(part, int) or (part.isidentifier() and part not in PLAIN_KINDS)
        )
        where = where[:60] or whole
    if first["type"] == "extra_forbidden":
        return where, f"{where} is not a known field: leave it out or correct its spelling"
    if first["type"] == "missing":
        return where if path else None, f"{where} is missing: add it"
    blamed = first.get("ctx", {}).get("error")
    if isinstance(blamed, InvalidRequest) and blamed.param is not None:  # a rule about several fields
        return ".".join([where, blamed.param] if where != whole else [blamed.param]), f"{where}: {message}"
    shown = f" is {first['input']!r:.60}" if isinstance(first["input"], str | int | float | bool | None) else ""
    return where, f"{where}{shown}: {message[0].lower()}{message[1:]}"


class Body(BaseModel):
    """Refuses unknown fields and converts nothing: "5" is not a number. Null fields count as absent."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _drop_nulls(cls, value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        if len(value) > MAX_FIELDS:
            raise ValueError(f"it has {len(value)} fields: at most {MAX_FIELDS} are taken")
        return {name: field for name, field in value.items() if field is not None}


class Kept(Body):
    """A body that also keeps the client's own object, for chat templates, with its order of fields."""

    _given: dict[str, Any] = PrivateAttr(default_factory=dict)

    @model_validator(mode="wrap")
    @classmethod
    def _keep(cls, value: Any, handler: ModelWrapValidatorHandler[Self]) -> Self:
        parsed = handler(value)
        if isinstance(value, dict):
            parsed._given = value
        return parsed

    @property
    def given(self) -> dict[str, Any]:
        """The client's own object; must not be changed."""
        return self._given


def text_of(content: str | list[Any]) -> str:
    """The text of a content, or of all its parts."""
    return content if isinstance(content, str) else "".join(part.text for part in content)


class TextPart(Body):
    """A piece of a message."""

    type: Literal["text"]
    text: Text


class CalledFunction(Body):
    """What the assistant called."""

    name: FunctionName
    arguments: Text  # a JSON object, also as text, also cut off

    @field_validator("arguments", mode="before")
    @classmethod
    def _as_text(cls, value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        try:
            return json.dumps(value, ensure_ascii=False, allow_nan=False)
        except (TypeError, ValueError, RecursionError):
            raise ValueError("it must be a JSON object, as it is or as text") from None


class CallBody(Body):
    """A call that the assistant made earlier."""

    id: CallId
    type: Literal["function"] = "function"
    function: CalledFunction
    index: int | None = None  # present in streamed answers that are sent back


class ChatMessage(Kept):
    """One turn of a conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Text | Annotated[list[TextPart], Field(min_length=1, max_length=MAX_PARTS, fail_fast=True)] | None = None
    name: str | None = None
    tool_calls: Annotated[list[CallBody], Field(max_length=1024, fail_fast=True)] | None = None
    tool_call_id: CallId | None = None
    reasoning_content: Text | None = None  # what the assistant thought
    reasoning: Text | None = None  # the name that other servers use for it
    annotations: Annotated[list[Any], Field(max_length=0)] | None = None  # an empty list in messages that are sent back

    @model_validator(mode="after")
    def _is_whole(self) -> Self:
        if self.content is None and not self.tool_calls and self.thoughts is None:
            raise InvalidRequest("content is missing: add it", "content")
        if self.tool_calls and self.role != "assistant":
            raise InvalidRequest(
                f"tool_calls are given with the role {self.role!r}: only the assistant calls tools", "tool_calls"
            )
        if (self.tool_call_id is None) == (self.role == "tool"):
            raise InvalidRequest("tool_call_id is needed with the role 'tool', and with no other", "tool_call_id")
        return self

    @property
    def thoughts(self) -> str | None:
        """What the assistant thought before its content, if the client sent it."""
        return self.reasoning if self.reasoning_content is None else self.reasoning_content

    @property
    def text(self) -> str:
        return text_of(self.content or "")

    @property
    def num_chars(self) -> int:
        """Characters of content, thoughts and calls."""
        called = sum(len(call.function.name) + len(call.function.arguments) for call in self.tool_calls or ())
        return len(self.text) + len(self.thoughts or "") + called


class FunctionBody(Body):
    """A function that the assistant may call."""

    name: FunctionName
    description: Text | None = None
    parameters: dict[str, Any] | None = None  # JSON schema of an object
    strict: bool | None = None  # a grammar holds the arguments of every call to the schema

    @field_validator("parameters")
    @classmethod
    def _is_schema(cls, value: dict[str, Any] | None) -> dict[str, Any] | None:
        if value is not None and value.get("type", "object") != "object":
            raise ValueError("the schema must be that of an object")
        try:
            json.dumps(compilable(value))
        except (ValueError, RecursionError):
            raise ValueError("the schema is too deep") from None
        return value

    @property
    def schema_of_object(self) -> dict[str, Any]:
        return NO_PARAMETERS if self.parameters is None else {"type": "object", **self.parameters}


class ToolBody(Kept):
    """A tool; all tools are functions."""

    type: Literal["function"]
    function: FunctionBody


class FunctionChoice(Body):
    """The name of a function."""

    name: FunctionName


class NamedChoice(Body):
    """The choice to call one function."""

    type: Literal["function"]
    function: FunctionChoice


ToolChoice = Literal["none", "auto", "required"] | NamedChoice
Messages = Annotated[list[ChatMessage], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)]
Tools = Annotated[list[ToolBody], Field(max_length=MAX_TOOLS, fail_fast=True)]


class StyleBody(Body):
    """How a conversation becomes a prompt; fields are named as in vLLM."""

    chat_template_kwargs: dict[str, Any] | None = None  # variables that the model's template reads
    reasoning_effort: Annotated[str, Field(max_length=64)] | None = None  # another such variable
    add_generation_prompt: bool | None = None  # begin the assistant's turn; true unless the last message is continued
    continue_final_message: bool | None = None  # the last message is the beginning of the assistant's turn

    @property
    def style(self) -> Style:
        goes_on = bool(self.continue_final_message)
        prompts = self.add_generation_prompt is not False and not goes_on
        return Style(self.chat_template_kwargs or {}, prompts, goes_on, self.reasoning_effort)

    def check_style(self, messages: Messages) -> None:
        """Raise `InvalidRequest` if fields contradict each other, or no message can be continued."""
        effort = self.reasoning_effort
        if effort is not None and (self.chat_template_kwargs or {}).get("reasoning_effort", effort) != effort:
            raise InvalidRequest("reasoning_effort differs from chat_template_kwargs: leave one out", "reasoning_effort")
        if not self.continue_final_message:
            return
        if self.add_generation_prompt:
            raise InvalidRequest(
                "add_generation_prompt and continue_final_message are both true: leave one out", "continue_final_message"
            )
        last = messages[-1]
        if last.role != "assistant" or last.tool_calls or not last.text.strip():
            raise InvalidRequest(
                "continue_final_message is true: the last message must be the assistant's, words without calls",
                "continue_final_message",
            )


class Conversation(StyleBody):
    """A conversation and its tools, over any protocol."""

    messages: Messages
    tools: Tools | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    include_reasoning: bool | None = None  # as in vLLM; false: thoughts are left out of the answer
    separate_reasoning: bool | None = None  # as in SGLang; false: thoughts stay in the content, with their tags

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if self.include_reasoning is False and self.separate_reasoning is False:
            raise InvalidRequest("include_reasoning and separate_reasoning are both false: leave one out", "separate_reasoning")
        self.check_style(self.messages)
        return self

    @classmethod
    def of(cls, body: dict[str, Any]) -> Self:
        """Parse a conversation translated from another API; raises `InvalidRequest`."""
        try:
            return cls.model_validate(body)
        except PydanticError as error:
            placed = [{**detail, "loc": ("body", *detail["loc"])} for detail in error.errors()]
            param, sentence = mistake(placed, "The request")
            raise InvalidRequest(sentence, param) from None

    @property
    def chosen_tool(self) -> ToolChoice:
        """The tool choice or its default; raises `InvalidRequest`."""
        choice = self.tool_choice
        if not self.tools:
            if choice not in (None, "none"):
                raise InvalidRequest("tool_choice is given without tools: add tools, or leave it out", "tool_choice")
            return "none"
        names = [tool.function.name for tool in self.tools]
        if isinstance(choice, NamedChoice) and choice.function.name not in names:
            raise InvalidRequest(
                f"tool_choice names {choice.function.name!r}: tools have {', '.join(names)[:200]}", "tool_choice"
            )
        return choice or "auto"
