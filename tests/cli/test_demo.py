"""`cascade demo`: what it asks, shows and compares, with a server of toys in the place of the one that it starts."""

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from cascade import Cascade, Completion, SamplingParams, family
from cascade.cli import demo
from cascade.cli.devices import simulated
from tests import small
from tests.cli import run
from tests.talkers import talking


def test_questions_are_answered_and_modes_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards the demo as a whole, without a terminal: five answers to chats, one table, the same texts."""
    monkeypatch.setattr(demo, "COMPARED_TOKENS", 8)
    monkeypatch.setattr(demo, "AGAIN_TOKENS", 8)
    monkeypatch.setattr(demo, "PARAMS", replace(demo.PARAMS, max_tokens=16))
    given: dict[str, Completion] = {}

    def on_devices(sources: Mapping[str, str], answers: Mapping[str, Completion]) -> demo.Row:
        assert [*sources] == ["tiny", "medium", "full"]  # toys are no models that could be recorded
        given.update(answers)
        return demo.Row("a GPU for each tier", 1.0, 2.0, "computed")

    monkeypatch.setattr(demo, "on_devices", on_devices)
    with talking("hermes") as served:

        @contextmanager
        def started(config: Path | None, *, name: str, **options: Any) -> Iterator[SimpleNamespace]:
            assert name != "cascade"  # which may run on a cluster that is joined
            yield SimpleNamespace(address=served.grpc)

        monkeypatch.setattr(demo, "started", started)
        code, output = run("demo")
    assert code == 0, output
    assert [*demo.QUESTIONS] == [*given] == ["facts", "code", "mathematics", "summary", "rewrite"]
    assert {*demo.COMPARED} < {*demo.QUESTIONS}
    for kind, question in demo.QUESTIONS.items():
        # parrots say what they were told, after the question itself
        assert output.count(question[:20]) == 2, kind
    assert "Every text was the same with and without drafts." in output
    assert len(re.findall(r"(?m) [\d.]+ +[\d.]+ +[\d.]+x *$", output)) == 4
    assert "2.00x" in output


def test_a_changed_text_fails(capsys: pytest.CaptureFixture[str]) -> None:
    """Guards against a demo that says the texts are the same whatever they are."""
    demo.show([demo.Row("one", 1.0, 1.0, "so"), demo.Row("other", 1.0, 1.5, "so", same=False)])
    assert "Drafts changed a text." in capsys.readouterr().out


@pytest.mark.usefixtures("small_demo")
def test_answers_are_simulated_with_the_models_that_ship() -> None:
    """Guards the figure with GPUs: answers keep their lengths, alone a token takes a pass of the full model, drafts gain."""
    params = SamplingParams(max_tokens=24, temperature=0, seed=1)
    prompts = ["def read(path):\n", "import os\n\n"]
    with Cascade.from_pretrained(family.paths()[-1:], dtype="float32") as full:
        texts = [(tuple(full.tokenizer.encode(text)), full.generate(text, params).token_ids) for text in prompts]
    found = simulated(dict(zip(family.NAMES, family.paths(), strict=True)), texts, params, ["code", "code"], small.VOCAB)
    assert [len(times) for times in found.alone] == [len(times) for times in found.cascade] == [len(ids) for _, ids in texts]
    alone, cascade = found.speeds
    assert alone == pytest.approx(39, rel=0.05)
    assert cascade > alone
    assert all(0 < share <= 1 for share in found.agreement.values())
