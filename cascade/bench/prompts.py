"""The prompts of a benchmark: those that ship, or those of a file, also in the formats of published sets."""

import gzip
import json
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeGuard

from cascade.errors import ConfigError

UNSORTED = "prompts"  # category of a prompt that names none
# categories of MT-Bench, which Spec-Bench counts as one; its other five stand for themselves
MT_BENCH = ("writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities")


@dataclass(frozen=True, slots=True)
class Prompt:
    """A text to answer or to continue, and the kind of text it is."""

    text: str
    category: str = UNSORTED


def read_prompts(path: Path) -> tuple[Prompt, ...]:
    """The prompts of a file, one a line; a name that ends with ``.gz`` is that of a compressed file.

    A line is plain text, a JSON string, or a JSON object: ``{"prompt": ..., "category": ...}``, or one of Spec-Bench
    (``turns``, of which the first is the prompt, and ``category``), of HumanEval (``task_id`` and ``prompt``) or of GSM8K
    (``question``). Empty lines are skipped. Raises `ConfigError` that names the line.
    """
    try:
        content = path.read_bytes()
        lines = (gzip.decompress(content) if path.suffix == ".gz" else content).decode("utf-8").splitlines()
    except (OSError, EOFError, zlib.error, UnicodeError) as error:
        raise ConfigError(f"The prompts in {path} cannot be read: {error}") from None
    prompts = tuple(_prompt(line, f"Line {number} of {path}") for number, line in enumerate(lines, 1) if line.strip())
    if not prompts:
        raise ConfigError(f"There are no prompts in {path}: write one a line")
    return prompts


def _prompt(line: str, where: str) -> Prompt:
    """The prompt of a line; ``where`` names the line in errors."""
    if not line.lstrip().startswith(("{", '"')):
        return Prompt(line)
    try:
        value = json.loads(line)
    except ValueError as error:
        raise ConfigError(f"{where} begins like JSON and is none ({error}): mend it, or write the text as a string") from None
    fields = {"prompt": value} if isinstance(value, str) else value
    read = next((read for field, read in PUBLISHED.items() if field in fields), _own)
    return read(fields, where)


def _own(fields: Mapping[str, Any], where: str) -> Prompt:
    if unknown := set(fields) - {"prompt", "category"}:
        raise ConfigError(f"{where} has the field {min(unknown)!r}: it takes prompt and category")
    text, category = fields.get("prompt"), fields.get("category", UNSORTED)
    if not (_is_text(text) and _is_text(category)):
        raise ConfigError(f'{where} has no prompt or no category that is a text: write {{"prompt": "...", "category": "..."}}')
    return Prompt(text, category)


def _spec_bench(fields: Mapping[str, Any], where: str) -> Prompt:
    turns, category = fields["turns"], fields.get("category")
    if not (isinstance(turns, list) and turns and all(map(_is_text, turns))):
        raise ConfigError(f"{where} has turns {turns!s:.60}: they must be a list of texts, as in Spec-Bench")
    if not _is_text(category):
        raise ConfigError(f"{where} has turns and the category {category!s:.60}: it must be a text, as in Spec-Bench")
    return Prompt(turns[0], "mt_bench" if category in MT_BENCH else category)


def _human_eval(fields: Mapping[str, Any], where: str) -> Prompt:
    return Prompt(_text_of(fields, "prompt", where, "HumanEval"), "humaneval")


def _gsm8k(fields: Mapping[str, Any], where: str) -> Prompt:
    return Prompt(_text_of(fields, "question", where, "GSM8K"), "gsm8k")


# how lines of published sets are read, by the field that tells them
PUBLISHED: dict[str, Callable[[Mapping[str, Any], str], Prompt]] = {
    "turns": _spec_bench,
    "task_id": _human_eval,
    "question": _gsm8k,
}


def _text_of(fields: Mapping[str, Any], name: str, where: str, published: str) -> str:
    text = fields.get(name)
    if not _is_text(text):
        raise ConfigError(f"{where} has the {name} {text!s:.60}: it must be a text, as in {published}")
    return text


def _is_text(value: object) -> TypeGuard[str]:
    return isinstance(value, str) and bool(value)


BUILT_IN = read_prompts(Path(__file__).parent / "prompts.jsonl")
"""Six kinds of eight: chat, code, mathematics, summaries and documents with their texts, translation."""

QUESTIONS = read_prompts(Path(__file__).parent / "questions.jsonl")
"""What `cascade demo` asks, one of each kind: facts, code, mathematics, a summary, a rewrite."""
