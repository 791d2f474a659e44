"""The bodies of OpenAI's API, with extensions. Unknown fields, and values that cannot be honoured, are errors."""

from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from typing import Annotated, Any, Literal, Self

from pydantic import AliasChoices, Field, field_validator, model_validator

from cascade.errors import InvalidRequest
from cascade.params import (
    MAX_BIASES,
    MAX_CHOICES,
    MAX_STOP_IDS,
    MAX_STOPS,
    Handling,
    Rule,
    SamplingParams,
    Speculation,
    Structured,
)
from cascade.settings.config import MAX_TIERS
from cascade.settings.router import MAX_ANSWERS, MAX_PROMPTS
from deployments.gateway.chat.conversation import Body, Conversation, Messages, StyleBody, Text, Tools
from deployments.gateway.chat.template import Style

DEFAULT_COMPLETION_TOKENS = 16  # OpenAI's own

CONVERTED = ("max_tokens", "stop", "logit_bias", "logprobs", "prompt_logprobs", "structured")  # of another form in some body
SAME_FIELDS = tuple(field.name for field in fields(SamplingParams) if field.name not in CONVERTED)

Stops = Annotated[list[str], Field(max_length=MAX_STOPS, fail_fast=True)]
TokenId = Annotated[int, Field(ge=0, lt=2**32)]
Schema = dict[str, Any] | str  # an object, or JSON text
Choices = Annotated[list[str], Field(max_length=MAX_CHOICES, fail_fast=True)]
TokenIds = Annotated[list[TokenId], Field(fail_fast=True)]


class SpeculationBody(Body):
    """How drafts may be used; with the coupled rule that never changes the text."""

    mode: Literal["auto", "off"] = "auto"
    tiers: Annotated[list[str], Field(max_length=MAX_TIERS, fail_fast=True)] | None = None
    window: int | None = None
    schedule: Literal["async", "lockstep"] | None = None
    branches: int | None = None
    rule: Rule = "coupled"
    draft_top_k: int | None = None

    def parsed(self) -> Speculation:
        return Speculation(**self.model_dump())


class StructuredBody(Body):
    """What the text has to be: exactly one of these."""

    json_schema: Schema | None = Field(default=None, validation_alias=AliasChoices("json_schema", "json"))
    json_object: bool = False
    regex: str | None = None
    choice: Choices | None = None
    grammar: str | None = None

    @property
    def chosen(self) -> dict[str, Any]:
        return {name: value for name, value in self.model_dump().items() if value is not None and value is not False}


class StreamOptions(Body):
    """Of streamed answers."""

    include_usage: bool = False  # after the last piece
    continuous_usage_stats: bool = False  # with every piece, as in vLLM
    include_obfuscation: bool | None = None  # no effect: there is none


class ResumeBody(Body):
    """What the client has of answers whose stream is broken."""

    token_ids: Annotated[list[TokenIds], Field(max_length=MAX_PROMPTS * MAX_ANSWERS, fail_fast=True)]  # of each choice


class JsonSchema(Body):
    """What an answer must look like."""

    name: str
    description: str | None = None
    json_schema: dict[str, Any] | None = Field(default=None, alias="schema")
    strict: bool | None = None


class ResponseFormat(Body):
    """Free text, any JSON object, or JSON of a schema."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    @property
    def structured(self) -> Structured | None:
        if self.json_schema is not None and self.type != "json_schema":
            raise InvalidRequest(
                f"response_format has a json_schema and the type {self.type!r}: say 'json_schema' or leave it out"
            )
        if self.type == "text":
            return None
        if self.type == "json_object":
            return Structured(json_object=True)
        if self.json_schema is None:
            raise InvalidRequest("response_format.json_schema is missing; add it, or use type 'json_object'")
        schema = self.json_schema.json_schema
        return Structured(json_schema=schema) if schema else Structured(json_object=True)


class IgnoredFields(Body):
    """Fields of OpenAI's and vLLM's clients that change no answer here, with the values for which that holds."""

    user: str | None = None
    metadata: dict[str, Any] | None = None
    store: bool | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    prompt_cache_options: dict[str, Any] | None = None
    prediction: dict[str, Any] | None = None
    modalities: Annotated[list[Literal["text"]], Field(fail_fast=True)] | None = None
    best_of: Literal[1] | None = None
    use_beam_search: Literal[False] | None = None
    skip_special_tokens: Literal[True] | None = None
    spaces_between_special_tokens: Literal[True] | None = None
    include_stop_str_in_output: Literal[False] | None = None
    return_tokens_as_token_ids: Literal[False] | None = None
    return_token_ids: Literal[False] | None = None
    guided_decoding_backend: str | None = None


class SamplingBody(IgnoredFields):
    """What all requests for answers take, of whatever API. ``None`` is the default everywhere."""

    model: str | None = None
    temperature: float | None = None
    top_p: float | None = None
    seed: int | None = None
    stop: str | Stops | None = None
    stream: bool | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
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
    guided_json: Schema | None = None  # these four are the kinds of `structured`, as vLLM named them before
    guided_regex: str | None = None
    guided_choice: Choices | None = None
    guided_grammar: str | None = None
    speculation: SpeculationBody | None = None

    @field_validator("logit_bias", mode="before")
    @classmethod
    def _is_short(cls, value: Any) -> Any:
        if isinstance(value, dict) and len(value) > MAX_BIASES:  # each item may be an error of its own
            raise ValueError(f"it has {len(value)} tokens: at most {MAX_BIASES} are taken")
        return value

    @property
    def answers(self) -> int:
        """Of each prompt."""
        return 1

    def known(self, num_choices: int) -> list[list[int]]:
        """Tokens that the client has of each choice; raises `InvalidRequest`."""
        return [[] for _ in range(num_choices)]

    def drafts(self) -> Speculation:
        return Speculation() if self.speculation is None else self.speculation.parsed()

    def handling(self) -> Handling:
        return Handling(self.priority or 0, self.cache_salt or "", train=self.train is not False)

    def ignored(self, reads: Callable[[str], bool]) -> list[str]:
        """Fields that are given and change nothing; ``reads``: whether the chat template has a variable of this name."""
        return [name for name in IgnoredFields.model_fields if getattr(self, name) is not None]

    @property
    def form(self) -> Structured | None:
        """What the text has to be, in the API's own words; raises `InvalidRequest`."""
        return None

    def shaping(self) -> dict[str, Any]:
        """What `SamplingParams` takes in another form; raises `InvalidRequest`."""
        chosen: dict[str, Any] = {}
        if self.logit_bias is not None:
            chosen["logit_bias"] = {_token(name): bias for name, bias in self.logit_bias.items()}
        guided: dict[str, Any] = {"json_schema": self.guided_json, "regex": self.guided_regex}
        guided |= {"choice": self.guided_choice, "grammar": self.guided_grammar}
        forms = [
            None if self.structured is None else Structured(**self.structured.chosen),
            *(Structured(**{kind: value}) for kind, value in guided.items() if value is not None),
            self.form,
        ]
        given = [form for form in forms if form is not None]
        if len(given) > 1:
            raise InvalidRequest("The text has to be of several forms (response_format, structured, guided_...): give one")
        return chosen | ({"structured": given[0]} if given else {})

    def params(self, max_tokens: int) -> SamplingParams:
        """Sampling parameters; raises `InvalidRequest`."""
        chosen = {name: value for name in SAME_FIELDS if (value := getattr(self, name)) is not None}
        stop = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())
        return SamplingParams(max_tokens=max_tokens, stop=stop, **chosen, **self.shaping())


class AnswersBody(SamplingBody):
    """What both kinds of completions take."""

    n: Annotated[int, Field(ge=1, le=MAX_ANSWERS)] | None = None
    stream_options: StreamOptions | None = None
    response_format: ResponseFormat | None = None
    watch: bool = False  # streamed pieces also tell of guesses that nobody has judged yet
    resume: ResumeBody | None = None
    history: bool = False  # each piece says its token ids, where they end and who wrote them

    @property
    def form(self) -> Structured | None:
        return None if self.response_format is None else self.response_format.structured

    def handling(self) -> Handling:
        return replace(super().handling(), watch=self.watch)

    def ignored(self, reads: Callable[[str], bool]) -> list[str]:
        obfuscated = self.stream_options is not None and self.stream_options.include_obfuscation
        return super().ignored(reads) + ["stream_options.include_obfuscation"] * bool(obfuscated)

    @property
    def answers(self) -> int:
        return self.n or 1

    def known(self, num_choices: int) -> list[list[int]]:
        if self.resume is None:
            return super().known(num_choices)
        if not self.stream:
            raise InvalidRequest("resume is given without stream: set stream to true")
        token_ids = self.resume.token_ids
        if len(token_ids) != num_choices:
            raise InvalidRequest(f"resume.token_ids has {len(token_ids)} lists: the request has {num_choices} choices")
        if any(token_ids) and self.seed is None:
            raise InvalidRequest("resume has tokens and seed is missing: give the seed that came with the answer's first piece")
        return token_ids


class CompletionBody(AnswersBody):
    """POST /v1/completions."""

    prompt: (
        Text
        | Annotated[list[Text], Field(max_length=MAX_PROMPTS, fail_fast=True)]
        | TokenIds
        | Annotated[list[TokenIds], Field(max_length=MAX_PROMPTS, fail_fast=True)]
    )
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    echo: bool | None = None
    logprobs: int | None = None

    def shaping(self) -> dict[str, Any]:
        if self.logprobs is None:
            return super().shaping()
        return super().shaping() | {"logprobs": self.logprobs} | ({"prompt_logprobs": self.logprobs} if self.echo else {})

    @property
    def prompts(self) -> Sequence[str | Sequence[int]]:
        """One or more texts or lists of token ids."""
        prompt = self.prompt
        if isinstance(prompt, str):
            return [prompt]
        if not prompt:
            raise InvalidRequest("prompt is an empty list: give a text, token ids, or a list of either")
        return [prompt] if isinstance(prompt[0], int) else prompt


class ChatBody(AnswersBody, Conversation):
    """POST /v1/chat/completions."""

    max_tokens: Annotated[int, Field(ge=1)] | None = None
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None

    def shaping(self) -> dict[str, Any]:
        chosen = super().shaping()
        if self.top_logprobs is not None and not self.logprobs:
            raise InvalidRequest("top_logprobs is given without logprobs: set logprobs to true")
        if self.logprobs:
            chosen["logprobs"] = self.top_logprobs or 0
        return chosen

    def ignored(self, reads: Callable[[str], bool]) -> list[str]:
        unread = self.reasoning_effort is not None and not reads("reasoning_effort")
        return super().ignored(reads) + ["reasoning_effort"] * unread

    @property
    def limit(self) -> int | None:
        """Output tokens at most, if the request says so."""
        if self.max_tokens is not None and self.max_completion_tokens not in (None, self.max_tokens):
            raise InvalidRequest("max_tokens and max_completion_tokens differ: give one of them")
        return self.max_completion_tokens or self.max_tokens


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
            raise ValueError("fields that say how messages become a prompt are given without messages: leave them out")
        return self


class DetokenizeBody(Body):
    """POST /detokenize."""

    model: str | None = None
    tokens: Annotated[TokenIds, Field(max_length=1_000_000)]


def _token(text: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) <= 10):
        raise InvalidRequest(f"logit_bias has the key {text[:40]!r}: keys are token ids")
    return int(text)
