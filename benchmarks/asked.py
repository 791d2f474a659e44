"""What benchmarks ask a chat model, and what all their documents have."""

import datetime
import os
from collections.abc import Sequence
from typing import Any

from cascade import family
from cascade.bench.prompts import BUILT_IN, Prompt
from cascade.engine.checkpoint import read_config
from cascade.engine.devices import processor
from cascade.engine.tokenizer import Tokenizer


def by_category(count: int | None, prompts: Sequence[Prompt] = BUILT_IN) -> tuple[Prompt, ...]:
    """The first ``count`` prompts of each category, all if ``None``."""
    kinds = dict.fromkeys(prompt.category for prompt in prompts)
    return tuple(one for kind in kinds for one in [prompt for prompt in prompts if prompt.category == kind][:count])


def chat_ids(tokenizer: Tokenizer, text: str) -> list[int]:
    """Token ids of a chat in which a user says ``text`` and the model is to answer; of a base model's, those of the text."""
    if tokenizer.backend.chat_template is None:
        return tokenizer.encode(text)
    chat = [{"role": "user", "content": text}]
    whole = tokenizer.backend.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
    assert isinstance(whole, str)
    return tokenizer.encode_part(whole)


def stamp() -> dict[str, Any]:
    """Date, processor and family, without which figures mean nothing."""
    return {
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "processor": f"{processor()}, {os.cpu_count()} cores",
        "family": dict(zip(family.NAMES, map(shape, family.paths()), strict=True)),
    }


def shape(source: str) -> str:
    """Of a model, such as ``llama, 30 layers of 576, 49152 tokens``."""
    config = read_config(source)
    return f"{config.model_type}, {config.num_hidden_layers} layers of {config.hidden_size}, {config.vocab_size} tokens"


def lossless(found: Any) -> bool:
    """Whether no figure of a document, however deep, is of texts that differ."""
    if not isinstance(found, dict):
        return True
    return found.get("same_text", True) and all(map(lossless, found.values()))
