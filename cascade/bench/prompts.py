"""The prompts of a benchmark: built-in ones by category, or those of a file."""

import json
from dataclasses import dataclass
from pathlib import Path

from cascade.bench.measure import PROMPTS
from cascade.errors import ConfigError

UNSORTED = "prompts"  # category of a prompt that names none


@dataclass(frozen=True, slots=True)
class Prompt:
    """A text to continue, and the kind of text it is."""

    text: str
    category: str = UNSORTED


_TESTS = (
    "class TestStack(unittest.TestCase):\n    def test_pop_empty(self):\n        stack = Stack()\n        with self.assert",
    "def test_parse_date():\n    assert parse_date('2024-02-29') == ",
    "    def test_round_trip(self):\n        for value in (0, 1, -1, 2**31):\n            self.assertEqual(",
    "class ErrorTests(unittest.TestCase):\n    def check(self, source):\n        with self.assertRaises(SyntaxError):\n",
)
_PROSE = (
    "The history of the lighthouse begins long before electric light. In the third century BC, ",
    "Write a short letter to a friend who has moved to another city.\n\nDear ",
    "Explain in simple words why the sky is blue.\n\nSunlight ",
    "Summary of the meeting: the team agreed on three things. First, ",
)
_DATA = (
    '[{"id": 1, "name": "Ada", "born": 1815}, {"id": 2, "name": "Grace", "born": 1906}, {"id": 3, "name": ',
    "day,city,high,low\nMonday,Oslo,12,4\nMonday,Rome,24,15\nTuesday,Oslo,11,",
    "COLOURS = {\n    'red': (255, 0, 0),\n    'green': (0, 255, 0),\n    'blue': (0, 0, 255),\n    'yellow': (",
    "host: localhost\nport: 8080\nlogging:\n  level: info\n  handlers:\n    - console\n    - ",
)
BUILT_IN = tuple(
    Prompt(text, category)
    for category, texts in {"code": PROMPTS[:4], "tests": _TESTS, "data": _DATA, "prose": _PROSE}.items()
    for text in texts
)
"""Beginnings of four kinds of text; the embedded family knows the first two best."""


def read_prompts(path: Path) -> tuple[Prompt, ...]:
    """The prompts of a file, one a line: JSON (``{"prompt": ..., "category": ...}`` or a string), or plain text.

    Empty lines are skipped. Raises `ConfigError` that names the line.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeError) as error:
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
    if unknown := set(fields) - {"prompt", "category"}:
        raise ConfigError(f"{where} has the field {min(unknown)!r}: it takes prompt and category")
    text, category = fields.get("prompt"), fields.get("category", UNSORTED)
    if not (isinstance(text, str) and text and isinstance(category, str) and category):
        raise ConfigError(f'{where} has no prompt or no category that is a text: write {{"prompt": "...", "category": "..."}}')
    return Prompt(text, category)
