"""Request bodies of OpenAI's API, with extensions. Unknown fields and values that cannot be honoured are errors."""

from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import AliasChoices, Field, field_validator, model_validator

from cascade.chat.conversation import Body, Conversation, Messages, StyleBody, Text, Tools
from cascade.chat.template import ChatTemplate, Style
from cascade.errors import InvalidRequest
from cascade.messages import SEED_MISSING
from cascade.params import (
    MAX_BIASES,
    MAX_CHOICES,
    MAX_STOP_IDS,
    MAX_STOPS,
    RANDOM_SEED,
    Handling,
    SamplingParams,
    Speculation,
    Structured,
)
from cascade.settings.config import MAX_TIERS
from cascade.settings.router import MAX_ANSWERS, MAX_PROMPTS

# fields whose form differs between bodies
CONVERTED = ("max_tokens", "logit_bias", "logprobs", "prompt_logprobs", "structured")
SAME_FIELDS = tuple(field.name for field in fields(SamplingParams) if field.name not in CONVERTED)

Stops = Annotated[list[str], Field(max_length=MAX_STOPS, fail_fast=True)]
TokenId = Annotated[int, Field(ge=0, lt=2**32)]
TokenIds = Annotated[list[TokenId], Field(fail_fast=True)]
Limit = Annotated[int, Field(ge=1)]  # output tokens at most


class SpeculationBody(Body):
    """How drafts may be used. This never changes the text."""

    mode: Literal["auto", "off"] = "auto"
    tiers: Annotated[list[str], Field(max_length=MAX_TIERS, fail_fast=True)] | None = None
    window: int | None = None
    branches: int | None = None


class StructuredBody(Body):
    """The required form of the text: exactly one of these."""

    json_schema: dict[str, Any] | str | None = Field(default=None, validation_alias=AliasChoices("json_schema", "json"))
    json_object: bool = False
    regex: str | None = None
    choice: Annotated[list[str], Field(max_length=MAX_CHOICES, fail_fast=True)] | None = None
    grammar: str | None = None


class StreamOptions(Body):
    """Options of a stream."""

    include_obfuscation: Literal[False] | None = None  # not supported


class UsageOptions(StreamOptions):
    """When a stream of completions reports the usage."""

    include_usage: bool = False  # after the last piece
    continuous_usage_stats: bool = False  # on every piece, as in vLLM


class ResumeBody(Body):
    """The part of an answer that the client received before the stream broke off."""

    # one list for each choice
    token_ids: Annotated[list[TokenIds], Field(max_length=MAX_PROMPTS * MAX_ANSWERS, fail_fast=True)]


class JsonSchema(Body):
    """The JSON schema of an answer."""

    name: str
    description: str | None = None
    json_schema: dict[str, Any] | None = Field(default=None, alias="schema")
    strict: bool | None = None


class ResponseFormat(Body):
    """Free text, any JSON object, or JSON of a schema."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise ValueError("json_schema is needed with the type 'json_schema', and with no other")
        return self

    @property
    def structured(self) -> Structured | None:
        return form_of(self.type, self.json_schema.json_schema if self.json_schema is not None else None)


def form_of(type: str, schema: dict[str, Any] | None) -> Structured | None:
    """The structured output for a format of this type; raises `InvalidRequest`."""
    if type == "text":
        return None
    return Structured(json_schema=schema) if schema else Structured(json_object=True)


class IgnoredFields(Body):
    """Fields of OpenAI's and vLLM's clients that are accepted with these values, and have no effect."""

    user: str | None = None
    metadata: dict[str, Any] | None = None
    store: bool | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    prediction: dict[str, Any] | None = None
    modalities: Annotated[list[Literal["text"]], Field(fail_fast=True)] | None = None
    best_of: Literal[1] | None = None
    skip_special_tokens: Literal[True] | None = None
    spaces_between_special_tokens: Literal[True] | None = None
    include_stop_str_in_output: Literal[False] | None = None


class SamplingBody(IgnoredFields):
    """Fields of all requests for answers, over any API. ``None`` means the default."""

    model: str | None = None
    temperature: float | None = None
    top_p: float | None = None
    seed: int | None = None
    stop: str | Stops | None = None
    stream: bool | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[Annotated[str, Field(pattern=r"^(0|[1-9][0-9]{0,9})$")], float] | None = None
    # extensions, named as in vLLM
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    min_tokens: Annotated[int, Field(ge=0)] | None = None
    stop_token_ids: Annotated[TokenIds, Field(max_length=MAX_STOP_IDS)] | None = None
    ignore_eos: bool | None = None
    adapter: str | None = None  # LoRA adapter of the full model
    priority: int | None = None
    cache_salt: str | None = None
    train: bool | None = None
    structured: StructuredBody | None = Field(default=None, validation_alias=AliasChoices("structured", "structured_outputs"))
    speculation: SpeculationBody | None = None

    INERT: ClassVar[tuple[str, ...]] = ()  # more fields without effect, only in this API
    PROMPT: ClassVar[str] = "messages"  # the field that becomes the prompt
    LIMITS: ClassVar[tuple[str, ...]] = ("max_tokens",)  # fields that limit the length of answers

    @field_validator("logit_bias", mode="before")
    @classmethod
    def _is_short(cls, value: Any) -> Any:
        if isinstance(value, dict) and len(value) > MAX_BIASES:  # each item may be an error of its own
            raise ValueError(f"it has {len(value)} tokens: at most {MAX_BIASES} are taken")
        return value

    def ignored(self, template: ChatTemplate) -> list[str]:
        """Given fields that have no effect with the chat template ``template``; a dot leads into a field."""
        return [name for name in (*IgnoredFields.model_fields, *self.INERT) if _at(self, name) is not None]

    @property
    def limits(self) -> dict[str, int]:
        """The given fields that limit the length of answers."""
        return {name: limit for name in self.LIMITS if (limit := getattr(self, name)) is not None}

    @property
    def answers(self) -> int:
        """Number of answers to each prompt."""
        return 1

    @property
    def writes(self) -> bool:
        """Whether answers may have any tokens."""
        return True

    @property
    def form(self) -> Structured | None:
        """The structured output that the API's own fields request; raises `InvalidRequest`."""
        return None

    @property
    def logprob_params(self) -> dict[str, int]:
        """The arguments of `SamplingParams` about log-probabilities; raises `InvalidRequest`."""
        return {}

    @property
    def drafts(self) -> Speculation:
        return Speculation(**self.speculation.model_dump()) if self.speculation is not None else Speculation()

    @property
    def handling(self) -> Handling:
        return Handling(self.priority or 0, self.cache_salt or "", train=self.train is not False)

    def delivered(self, num_choices: int) -> list[list[int]]:
        """Tokens of each choice that the client already has; raises `InvalidRequest`."""
        return [[] for _ in range(num_choices)]

    def params(self, defaults: Mapping[str, Any]) -> SamplingParams:
        """Sampling parameters, with ``defaults`` for fields that are not given; raises `InvalidRequest`."""
        chosen = {name: value for name in SAME_FIELDS if (value := getattr(self, name)) is not None}
        biases = {int(token): bias for token, bias in (self.logit_bias or {}).items()}
        structured = self.form
        if self.structured is not None:
            if structured is not None:
                raise InvalidRequest("The text has to be of two forms, response_format and structured: give one", "structured")
            structured = Structured(**self.structured.model_dump(exclude_none=True))
        limits = self.limits
        if len({*limits.values()}) > 1:
            raise InvalidRequest(f"{' and '.join(limits)} differ: give one of them", next(iter(limits)))
        given: dict[str, Any] = {**defaults, **chosen, **self.logprob_params}
        if limits:
            given["max_tokens"] = next(iter(limits.values()))
        return SamplingParams(logit_bias=biases, structured=structured, **given)


def _at(body: Any, path: str) -> Any:
    """The value at a path of fields; ``None`` if any field on the way is ``None``."""
    for name in path.split("."):
        body = getattr(body, name, None)
    return body


class AnswersBody(SamplingBody):
    """Fields of completions and of chat completions."""

    n: Annotated[int, Field(ge=1, le=MAX_ANSWERS)] | None = None
    stream_options: UsageOptions | None = None
    response_format: ResponseFormat | None = None
    resume: ResumeBody | None = None
    history: bool = False  # each piece has its token ids, where they end, and which tier guessed them

    INERT: ClassVar[tuple[str, ...]] = ("response_format.json_schema.description",)

    @model_validator(mode="after")
    def _streams(self) -> Self:
        given = next((name for name in ("stream_options", "resume") if getattr(self, name)), None)
        if given and not self.stream:
            raise InvalidRequest(f"{given} is given without stream: set stream to true", given)
        return self

    @property
    def form(self) -> Structured | None:
        return None if self.response_format is None else self.response_format.structured

    @property
    def answers(self) -> int:
        return self.n or 1

    def delivered(self, num_choices: int) -> list[list[int]]:
        if self.resume is None:
            return super().delivered(num_choices)
        token_ids = self.resume.token_ids
        if len(token_ids) != num_choices:
            raise InvalidRequest(
                f"resume.token_ids has {len(token_ids)} lists: the request has {num_choices} choices", "resume.token_ids"
            )
        if any(token_ids) and self.seed in (None, RANDOM_SEED):
            raise InvalidRequest(SEED_MISSING, "seed")
        return token_ids


class CompletionBody(AnswersBody):
    """POST /v1/completions."""

    prompt: (
        Text
        | Annotated[list[Text], Field(max_length=MAX_PROMPTS, fail_fast=True)]
        | TokenIds
        | Annotated[list[TokenIds], Field(max_length=MAX_PROMPTS, fail_fast=True)]
    )
    max_tokens: Annotated[int, Field(ge=0)] | None = None
    echo: bool | None = None
    logprobs: int | None = None

    PROMPT: ClassVar[str] = "prompt"

    @model_validator(mode="after")
    def _asks_for_something(self) -> Self:
        if not self.writes and not self.echo:
            raise InvalidRequest("max_tokens is 0: without echo, which repeats the prompt, nothing is requested", "max_tokens")
        return self

    @property
    def writes(self) -> bool:
        return self.max_tokens != 0

    @property
    def drafts(self) -> Speculation:
        return super().drafts if self.writes else Speculation("off")

    @property
    def limits(self) -> dict[str, int]:
        return {} if self.max_tokens is None else {"max_tokens": max(1, self.max_tokens)}

    @property
    def logprob_params(self) -> dict[str, int]:
        if self.logprobs is None:
            return {}
        return {"logprobs": self.logprobs} | ({"prompt_logprobs": self.logprobs} if self.echo else {})

    @property
    def prompts(self) -> Sequence[str | Sequence[int]]:
        """One or more texts or lists of token ids."""
        prompt = self.prompt
        if isinstance(prompt, str):
            return [prompt]
        if not prompt:
            raise InvalidRequest("prompt is an empty list: give a text, token ids, or a list of either", "prompt")
        return [prompt] if isinstance(prompt[0], int) else prompt


class ChatBody(AnswersBody, Conversation):
    """POST /v1/chat/completions."""

    max_tokens: Limit | None = None
    max_completion_tokens: Limit | None = None
    LIMITS: ClassVar[tuple[str, ...]] = ("max_tokens", "max_completion_tokens")
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None

    def as_chat(self, template: ChatTemplate) -> Conversation:
        return self

    @property
    def logprob_params(self) -> dict[str, int]:
        if self.top_logprobs is not None and not self.logprobs:
            raise InvalidRequest("top_logprobs is given without logprobs: set logprobs to true", "top_logprobs")
        return {"logprobs": self.top_logprobs or 0} if self.logprobs else {}


class TokenizeBody(StyleBody):
    """POST /tokenize: a prompt or a conversation."""

    model: str | None = None
    prompt: Text | None = None
    messages: Messages | None = None
    tools: Tools | None = None

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if self.messages is not None:
            self.check_style(self.messages)
        elif self.style != Style():
            given = next(name for name in StyleBody.model_fields if getattr(self, name) is not None)
            raise InvalidRequest(f"{given} is given without messages, to which it applies: leave it out", given)
        return self


class DetokenizeBody(Body):
    """POST /detokenize."""

    model: str | None = None
    tokens: Annotated[TokenIds, Field(max_length=1_000_000)]
