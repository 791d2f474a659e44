"""What benchmarks ask a chat model."""

from collections.abc import Sequence

from cascade import family
from cascade.agreement import chat_ids
from cascade.engine.tokenizer import Tokenizer
from cascade.prompts import BUILT_IN, Prompt


def by_category(count: int | None, prompts: Sequence[Prompt] = BUILT_IN) -> tuple[Prompt, ...]:
    """The first ``count`` prompts of each category, all if ``None``."""
    by_kind: dict[str, list[Prompt]] = {}
    for prompt in prompts:
        by_kind.setdefault(prompt.category, []).append(prompt)
    return tuple(prompt for prompts in by_kind.values() for prompt in prompts[:count])


def chats(count: int) -> list[list[int]]:
    """The first ``count`` built-in prompts of each category as chats with the family, in token ids."""
    tokenizer = Tokenizer.from_pretrained(family.paths()[-1])
    return [chat_ids(tokenizer, prompt.text) for prompt in by_category(count)]
