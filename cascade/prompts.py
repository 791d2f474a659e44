"""Prompts for measurements: those that ship, or those of a file, also in the formats of published sets."""

import gzip
import json
import zlib
from dataclasses import dataclass
from pathlib import Path

from cascade.errors import ConfigError

UNSORTED = "prompts"  # category of prompts without one
# categories of MT-Bench, which Spec-Bench counts as one; its other five stay as they are
MT_BENCH = ("writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities")


@dataclass(frozen=True, slots=True)
class Prompt:
    """A text to answer or to continue, and the kind of text it is."""

    text: str
    category: str = UNSORTED


def read_prompts(path: Path) -> tuple[Prompt, ...]:
    """The prompts of a file, one a line; a file whose name ends with ``.gz`` is decompressed.

    A line is plain text, a JSON string, or a JSON object: ``{"prompt": ..., "category": ...}``, of which the category may be
    absent, or one of Spec-Bench (its first turn), HumanEval or GSM8K. Empty lines are skipped. Raises `ConfigError`.
    """
    try:
        with gzip.open(path, "rt", encoding="utf-8-sig") if path.suffix == ".gz" else path.open(encoding="utf-8-sig") as file:
            lines = file.read().split("\n")
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
        raise ConfigError(f"{where} begins like JSON and is none ({error}): correct it, or write it as a string") from None
    match value:
        case {"turns": [str(text), *_], "category": str(category)}:  # Spec-Bench
            category = "mt_bench" if category in MT_BENCH else category
        case {"task_id": _, "prompt": str(text)}:
            category = "humaneval"
        case {"question": str(text)}:
            category = "gsm8k"
        case {"prompt": str(text)} if value.keys() <= {"prompt", "category"}:
            category = value.get("category", UNSORTED)
        case str(text):
            category = UNSORTED
        case _:
            text = category = ""
    if not (text and category and isinstance(category, str)):
        raise ConfigError(
            f'{where} is no prompt: write {{"prompt": "...", "category": "..."}}, or as Spec-Bench, HumanEval and GSM8K do'
        )
    return Prompt(text, category)


BUILT_IN = read_prompts(Path(__file__).parent / "prompts.jsonl")
"""Six kinds of eight: chat, code, mathematics, summaries and documents with their texts, translation."""
