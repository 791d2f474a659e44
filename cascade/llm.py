"""Offline inference with the interface of vLLM's `LLM`.

>>> with LLM("Qwen/Qwen3-32B", draft_models=["Qwen/Qwen3-4B", "Qwen/Qwen3-0.6B"]) as llm:
...     [output] = llm.chat([{"role": "user", "content": "Hello"}], SamplingParams(max_tokens=200))
...     print(output.outputs[0].text)
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from inspect import signature
from typing import Any, Self, TypeAlias, cast

from cascade.answer import Completion
from cascade.chat.conversation import Conversation
from cascade.chat.template import ChatTemplate
from cascade.engine.tokenizer import pretrained
from cascade.errors import ConfigError, InvalidRequest
from cascade.local import Cascade, token_ids
from cascade.params import SamplingParams
from cascade.settings.section import did_you_mean

Messages: TypeAlias = Sequence[Mapping[str, Any]]  # as in OpenAI's API, oldest first
# a text, or token ids (also of NumPy or PyTorch), plain or as vLLM's {"prompt": ...} or {"prompt_token_ids": ...}
Prompt: TypeAlias = str | Sequence[int] | Mapping[str, Any]
Params: TypeAlias = SamplingParams | Sequence[SamplingParams] | None  # one for all prompts, or one for each


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """A prompt and the answer to it."""

    prompt: str | None  # None if it was given as token ids
    prompt_token_ids: list[int]
    outputs: list[Completion]  # one


class LLM:
    """`Cascade` with the interface of vLLM's `LLM`: lists of prompts or conversations. Output is exactly that of ``model``.

    ``draft_models`` draft for it, the largest first, as with `cascade serve --draft`. Each is a local path or a hub id;
    ``options`` are those of `Cascade.from_pretrained`. Raises the same errors.
    """

    def __init__(self, model: str, draft_models: Sequence[str] = (), **options: Any) -> None:
        if isinstance(draft_models, str):
            raise ConfigError(f"draft_models is {draft_models!r}: give a list, the largest first")
        options_of = set(signature(Cascade.from_pretrained).parameters) - {"models"}
        if unknown := sorted(options.keys() - options_of):
            near = did_you_mean(unknown[0], options_of) or f": it takes {', '.join(sorted(options_of))}"
            raise ConfigError(f"LLM has no option {unknown[0]!r}{near}")
        self._model = model
        self._trust_remote_code = bool(options.get("trust_remote_code"))
        self.cascade = Cascade.from_pretrained([*reversed(draft_models), model], **options)
        self._template = ChatTemplate(self.cascade.tokenizer)

    def generate(
        self, prompts: Prompt | Sequence[Prompt], sampling_params: Params = None, use_tqdm: bool = True
    ) -> list[RequestOutput]:
        """The texts after ``prompts``, one prompt or several, in order.

        ``sampling_params`` are `get_default_sampling_params` by default. ``use_tqdm`` has no effect: no progress is shown.

        Raises `InvalidRequest`, or `Unavailable` if the full model fails.
        """
        each = _listed(prompts)
        encode = self.cascade.tokenizer.encode
        ids = [encode(prompt) if isinstance(prompt, str) else prompt for prompt in each]
        return self._outputs([prompt if isinstance(prompt, str) else None for prompt in each], ids, sampling_params)

    def chat(
        self,
        messages: Messages | Sequence[Messages],
        sampling_params: Params = None,
        use_tqdm: bool = True,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool | None = None,
        continue_final_message: bool | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """The assistant's next turns after ``messages``: one conversation, or a list of them. The model's chat template
        writes the prompts, as for the conversations of a server.

        Raises `InvalidRequest`, also if there is no template or it does not take these messages, or `Unavailable`.
        """
        if not isinstance(messages, Sequence) or isinstance(messages, str) or not messages:
            raise InvalidRequest(f"messages is {messages!r:.60}: it must be a list of messages, or of such lists")
        style = {
            "tools": None if tools is None else list(tools),
            "add_generation_prompt": add_generation_prompt,
            "continue_final_message": continue_final_message,
            "chat_template_kwargs": chat_template_kwargs,
        }
        style = {name: value for name, value in style.items() if value is not None}
        chats = cast("Sequence[Messages]", [messages] if isinstance(messages[0], Mapping) else messages)
        texts = [prompt_of(self._template, chat, **style) for chat in chats]
        return self._outputs(texts, [self.cascade.tokenizer.encode_part(text) for text in texts], sampling_params)

    def get_tokenizer(self) -> Any:
        """The model's tokenizer, as Transformers loads it."""
        return pretrained(self._model, trust_remote_code=self._trust_remote_code)

    def get_default_sampling_params(self) -> SamplingParams:
        """Sampling parameters of requests that give none: those of the model's ``generation_config``."""
        return self.cascade.default_params

    def close(self) -> None:
        """End all requests and free everything."""
        self.cascade.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _outputs(self, texts: Sequence[str | None], prompts: list[list[int]], params: Params) -> list[RequestOutput]:
        completions = self.cascade.generate(prompts, params) if prompts else []
        return [
            RequestOutput(text, ids, [replace(completion, index=0)])
            for text, ids, completion in zip(texts, prompts, completions, strict=True)
        ]


def prompt_of(template: ChatTemplate, messages: Messages, **style: Any) -> str:
    """A conversation as the model's chat template writes it, up to the beginning of the assistant's turn.

    ``style`` has further fields of `Conversation`. Raises `InvalidRequest` if there is no template, or it does not take these
    messages.
    """
    if not isinstance(messages, Sequence) or isinstance(messages, str):
        raise InvalidRequest(f"messages is {messages!r:.60}: it must be a list of messages, or of such lists")
    plain = [dict(message) if isinstance(message, Mapping) else message for message in messages]
    body = Conversation.of({"messages": plain, **style})
    tools = [tool.given for tool in body.tools or ()]
    return template.text([message.given for message in body.messages], tools or None, body.style)


def _listed(prompts: Any) -> list[str | list[int]]:
    """One prompt or several, each a text or token ids; raises `InvalidRequest`."""
    if isinstance(prompts, str | Mapping) or token_ids(prompts):
        return [_prompt(prompts)]
    if not isinstance(prompts, Iterable) or isinstance(prompts, bytes):
        raise InvalidRequest(f"prompts is {prompts!r:.60}: it must be a prompt or a list of prompts, texts or token ids")
    return [_prompt(prompt) for prompt in prompts]


def _prompt(given: Any) -> str | list[int]:
    """A prompt in any of vLLM's forms; raises `InvalidRequest`."""
    if isinstance(given, Mapping):
        given = {name: value for name, value in given.items() if value is not None}
        if len(given) != 1 or not given.keys() <= {"prompt", "prompt_token_ids"}:
            names = ", ".join(map(str, given)) or "nothing"
            raise InvalidRequest(f"A prompt is a dictionary of {names:.60}: it must have either prompt or prompt_token_ids")
        [given] = given.values()
    if isinstance(given, str):
        return given
    if (ids := token_ids(given)) is None:
        raise InvalidRequest(f"A prompt is {given!r:.60}: it must be a text or a list of token ids")
    return ids
