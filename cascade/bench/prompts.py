"""The prompts of a benchmark: those that ship, or those of a file, also in the formats of published sets."""

import gzip
import json
import zlib
from dataclasses import dataclass
from pathlib import Path

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
    name, text, category = "prompt", fields.get("prompt"), fields.get("category", UNSORTED)
    if "turns" in fields:  # of Spec-Bench
        name, turns, category = "turns", fields["turns"], fields.get("category")
        text = turns[0] if isinstance(turns, list) and turns and all(isinstance(turn, str) for turn in turns) else None
        category = "mt_bench" if category in MT_BENCH else category
    elif "task_id" in fields:
        category = "humaneval"
    elif "question" in fields:
        name, text, category = "question", fields["question"], "gsm8k"
    elif unknown := set(fields) - {"prompt", "category"}:
        raise ConfigError(f"{where} has the field {min(unknown)!r}: it takes prompt and category")
    if not (isinstance(text, str) and text and isinstance(category, str) and category):
        raise ConfigError(
            f'{where} has no {name} or no category that is a text: write {{"prompt": "...", "category": "..."}}, '
            "or as Spec-Bench, HumanEval and GSM8K do"
        )
    return Prompt(text, category)


BUILT_IN = read_prompts(Path(__file__).parent / "prompts.jsonl")
"""Six kinds of eight: chat, code, mathematics, summaries and documents with their texts, translation."""

QUESTIONS = read_prompts(Path(__file__).parent / "questions.jsonl")
"""What `cascade demo` asks, one of each kind: facts, code, mathematics, a summary, a rewrite."""
