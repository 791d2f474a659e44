"""Log-probabilities in OpenAI's two forms. Tokens are named by their text alone, which may be half a character."""

from collections.abc import Callable, Sequence
from typing import Any

from cascade.answer import Chunk, PromptToken
from cascade.messages import Logprobs

Name = Callable[[int], str]


def chat_logprobs(chunks: Sequence[Chunk], name: Name) -> dict[str, Any]:
    """As chat completions have them."""
    return {
        "content": [
            _named(name(token), entry.logprob) | {"top_logprobs": [_named(name(id), value) for id, value in entry.top]}
            for token, entry, _ in _entries(chunks)
        ]
    }


def text_logprobs(chunks: Sequence[Chunk], name: Name, offset: int) -> dict[str, Any]:
    """As completions have them; the first chunk's text begins at ``offset`` of the choice's text."""
    entries = _entries(chunks)
    return {
        "tokens": [name(token) for token, _, _ in entries],
        "token_logprobs": [entry.logprob for _, entry, _ in entries],
        "top_logprobs": [{name(id): value for id, value in entry.top} for _, entry, _ in entries],
        "text_offset": [offset + begin for _, _, begin in entries],
    }


def prompt_logprobs(prompt: Sequence[PromptToken], begins: Sequence[int], name: Name) -> dict[str, Any]:
    """The same of an echoed prompt, whose tokens begin at ``begins`` of its text. The first token has no log-probability."""
    return {
        "tokens": [name(token.id) for token in prompt],
        "token_logprobs": [token.logprob for token in prompt],
        "top_logprobs": [None if token.logprob is None else {name(id): value for id, value in token.top} for token in prompt],
        "text_offset": list(begins),
    }


def _entries(chunks: Sequence[Chunk]) -> list[tuple[int, Logprobs, int]]:
    """Token, log-probabilities, and where its characters begin."""
    found: list[tuple[int, Logprobs, int]] = []
    num_chars = 0
    for chunk in chunks:
        begins = (0, *chunk.ends)[: len(chunk.ends)]
        found += [
            (token, entry, num_chars + begin)
            for token, entry, begin in zip(chunk.token_ids, chunk.logprobs, begins, strict=True)
        ]
        num_chars += len(chunk.text)
    return found


def _named(text: str, logprob: float) -> dict[str, Any]:
    return {"token": text, "logprob": logprob, "bytes": list(text.encode())}
