"""From a conversation to a prompt."""

from collections.abc import Sequence

from jinja2.exceptions import TemplateError

from cascade.errors import InvalidRequest
from cascade.tokenizer import Tokenizer


def encode_chat(tokenizer: Tokenizer, messages: Sequence[dict[str, str]]) -> list[int]:
    """Token ids of a conversation, ready for the assistant's turn; raises `InvalidRequest`.

    By the tokenizer's own template. Base models have none: there the contents follow each other, a blank line in between,
    without roles, and the model goes on behind the last one.
    """
    backend = tokenizer.backend
    if backend.chat_template is None:
        return tokenizer.encode("\n\n".join(message["content"] for message in messages))
    try:
        text = backend.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=True)
    except TemplateError as error:
        raise InvalidRequest(f"The model's chat template does not take these messages: {error}") from None
    ids: list[int] = backend.encode(text, add_special_tokens=False)
    return ids
