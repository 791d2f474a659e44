"""`cascade demo`: what it asks, shows and compares, with a server of toys in the place of the one that it starts."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import CliRunner

from cascade.bench.prompts import QUESTIONS
from cascade.cli import demo
from cascade.cli.main import main
from tests.talkers import talking


def test_questions_are_answered_and_modes_compared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards the demo as a whole, without a terminal: five answers to chats, two tables, one text."""
    monkeypatch.setattr(demo, "COMPARED_TOKENS", 8)
    with talking(tmp_path, "hermes") as served:

        @contextmanager
        def started(config: Path | None, **options: Any) -> Iterator[SimpleNamespace]:
            yield SimpleNamespace(address=served.grpc)

        monkeypatch.setattr(demo, "started", started)
        result = CliRunner().invoke(main, ["demo", "--max-tokens", "16"])
    assert result.exit_code == 0, result.output
    assert [question.category for question in QUESTIONS] == ["facts", "code", "mathematics", "summary", "rewrite"]
    assert {*demo.COMPARED} < {question.category for question in QUESTIONS}
    for question in QUESTIONS:
        # parrots say what they were told, after the question itself
        assert result.output.count(question.text[:20]) == 2, question.category
    assert result.output.count("All modes gave the same text.") == 2
    assert "Temperature 0.7" in result.output
    for mode in ("full alone", "cascade"):
        assert result.output.count(f"│ {mode} ") == 2, mode
