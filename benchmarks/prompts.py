"""What benchmarks ask a chat model."""

from collections.abc import Sequence

from cascade import family
from cascade.bench.prompts import BUILT_IN, Prompt
from cascade.engine.tokenizer import Tokenizer
from cascade.llm import chat_text


def by_category(count: int | None, prompts: Sequence[Prompt] = BUILT_IN) -> tuple[Prompt, ...]:
    """The first ``count`` prompts of each category, all if ``None``."""
    kinds = dict.fromkeys(prompt.category for prompt in prompts)
    return tuple(one for kind in kinds for one in [prompt for prompt in prompts if prompt.category == kind][:count])


def chat_ids(tokenizer: Tokenizer, text: str) -> list[int]:
    """Token ids of a chat in which a user says ``text`` and the model is to answer; of a base model's, those of the text."""
    if tokenizer.chat_template is None:
        return tokenizer.encode(text)
    return tokenizer.encode_part(chat_text(tokenizer, [{"role": "user", "content": text}]))


def chats(count: int) -> list[list[int]]:
    """The first ``count`` built-in prompts of each category as chats with the family, in token ids."""
    tokenizer = Tokenizer.from_pretrained(family.paths()[-1])
    return [chat_ids(tokenizer, prompt.text) for prompt in by_category(count)]
