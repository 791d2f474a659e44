"""Offline inference in the shape of vLLM's `LLM`.

>>> with LLM("Qwen/Qwen3-32B", draft_models=["Qwen/Qwen3-4B", "Qwen/Qwen3-0.6B"]) as llm:
...     [output] = llm.chat([{"role": "user", "content": "Hello"}], SamplingParams(max_tokens=200))
...     print(output.outputs[0].text)
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from inspect import signature
from types import TracebackType
from typing import Any, Self, TypeAlias, cast

from cascade.answer import Completion
from cascade.engine.tokenizer import Tokenizer
from cascade.errors import ConfigError, InvalidRequest
from cascade.local import Batch, Cascade, Prompt
from cascade.params import SamplingParams

Conversation: TypeAlias = Sequence[Mapping[str, Any]]  # messages as in OpenAI's API, oldest first


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """A prompt and the answer to it."""

    prompt: str | None  # None if it was given as token ids
    prompt_token_ids: list[int]
    outputs: list[Completion]  # one


class LLM:
    """`Cascade`, asked as vLLM's `LLM` is: for lists of prompts or conversations. Output is exactly that of ``model``.

    ``draft_models`` draft for it, the largest first, as with `cascade serve --draft`. Each is a local path or a hub id;
    ``options`` are those of `Cascade.from_pretrained`, which tells what is raised.
    """

    def __init__(self, model: str, draft_models: Sequence[str] = (), **options: Any) -> None:
        if isinstance(draft_models, str):
            raise ConfigError(f"draft_models is {draft_models!r}: give a list, the largest first")
        known = set(signature(Cascade.from_pretrained).parameters) - {"models"}
        if unknown := sorted(options.keys() - known):
            raise ConfigError(f"LLM has no option {unknown[0]!r}: it takes {', '.join(sorted(known))}")
        self.cascade = Cascade.from_pretrained([*reversed(draft_models), model], **options)

    def generate(self, prompts: Prompt | Batch, sampling_params: SamplingParams | None = None) -> list[RequestOutput]:
        """The texts after ``prompts``, in their order: a string or a list of token ids, or a list of either.

        Without ``sampling_params`` they are `get_default_sampling_params`.

        Raises `InvalidRequest`, or `Unavailable` if the full model fails.
        """
        if not prompts and not isinstance(prompts, str):
            return []
        one = isinstance(prompts, str) or isinstance(prompts[0], int)
        each = cast("Sequence[Prompt]", [prompts] if one else prompts)
        texts = [prompt if isinstance(prompt, str) else None for prompt in each]
        encode = self.cascade.tokenizer.encode
        ids = [encode(prompt) if isinstance(prompt, str) else list(prompt) for prompt in each]
        return self._outputs(texts, ids, sampling_params)

    def chat(
        self, messages: Conversation | Sequence[Conversation], sampling_params: SamplingParams | None = None
    ) -> list[RequestOutput]:
        """The assistant's next turns after ``messages``: one conversation, or a list of them. The model's chat template
        writes the prompts.

        Raises `InvalidRequest`, also if there is no template or it does not take these messages, or `Unavailable`.
        """
        tokenizer, one = self.cascade.tokenizer, not messages or isinstance(messages[0], Mapping)
        texts = [chat_text(tokenizer, chat) for chat in cast("Sequence[Conversation]", [messages] if one else messages)]
        return self._outputs(texts, [tokenizer.encode_part(text) for text in texts], sampling_params)

    def get_default_sampling_params(self) -> SamplingParams:
        """What requests without parameters get: those of the model's ``generation_config``."""
        return self.cascade.default_params

    def close(self) -> None:
        """End all requests and free everything."""
        self.cascade.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def _outputs(
        self, texts: Sequence[str | None], prompts: list[list[int]], params: SamplingParams | None
    ) -> list[RequestOutput]:
        completions = self.cascade.generate(prompts, params)
        return [
            RequestOutput(text, ids, [replace(completion, index=0)])
            for text, ids, completion in zip(texts, prompts, completions, strict=True)
        ]


def chat_text(tokenizer: Tokenizer, messages: Conversation) -> str:
    """A conversation as the model's chat template writes it, up to the beginning of the assistant's turn.

    Raises `InvalidRequest` if there is no template, or it does not take these messages.
    """
    if tokenizer.chat_template is None:
        raise InvalidRequest("The model has no chat template: use generate, or save its tokenizer with a chat_template.jinja")
    try:
        return tokenizer.apply_chat_template(messages, add_generation_prompt=True)
    except Exception as error:  # templates are programs
        raise InvalidRequest(f"The model's chat template does not take these messages: {error}") from None
