"""`cascade demo`: what it asks, shows and compares, with a server of toys in the place of the one that it starts."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from cascade.cli import demo
from tests.cli import run
from tests.talkers import talking


def test_questions_are_answered_and_modes_compared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards the demo as a whole, without a terminal: five answers to chats, two tables, one text."""
    monkeypatch.setattr(demo, "COMPARED_TOKENS", 8)
    monkeypatch.setattr(demo, "PARAMS", replace(demo.PARAMS, max_tokens=16))
    with talking(tmp_path, "hermes") as served:

        @contextmanager
        def started(config: Path | None, *, name: str, **options: Any) -> Iterator[SimpleNamespace]:
            assert name != "cascade"  # which may run on a cluster that is joined
            yield SimpleNamespace(address=served.grpc)

        monkeypatch.setattr(demo, "started", started)
        code, output = run("demo")
    assert code == 0, output
    assert [*demo.QUESTIONS] == ["facts", "code", "mathematics", "summary", "rewrite"]
    assert {*demo.COMPARED} < {*demo.QUESTIONS}
    for kind, question in demo.QUESTIONS.items():
        # parrots say what they were told, after the question itself
        assert output.count(question[:20]) == 2, kind
    assert output.count("Both modes gave the same text.") == 2
    assert "Temperature 0.7" in output
    for kind in demo.COMPARED:
        assert len(re.findall(rf"(?m)^ *{kind} +[\d.]+ +[\d.]+ +[\d.]+x *$", output)) == 2, kind
