"""Prompts, and the client of benchmarks: what it sends and counts. No figure of speed is judged."""

import asyncio
import gzip
import itertools
import json
from collections import Counter
from pathlib import Path

import pytest

from benchmarks.turns import Answered, Cell, Mode, entries, measured, same_text
from cascade.answer import Completion, Stats
from cascade.errors import ConfigError, Overloaded
from cascade.messages import Edge
from cascade.params import Speculation
from cascade.prompts import UNSORTED, Prompt, read_prompts

MODES = (Mode("alone", Speculation("off")), Mode("auto", Speculation()), Mode("all", Speculation(tiers=("tiny", "medium"))))


def test_prompts_of_a_file(tmp_path: Path) -> None:
    """Guards the three ways to write a prompt, texts that look a little like JSON, and what editors put into files."""
    path = tmp_path / "prompts.jsonl"
    text = '\ufeff{"prompt": "a\\nb", "category": "code"}\r\n"quo\u2028ted"\n\n[1, 2, \n  {"prompt": "c"}\n'
    path.write_text(text, encoding="utf-8")
    assert read_prompts(path) == (Prompt("a\nb", "code"), Prompt("quo\u2028ted"), Prompt("[1, 2, "), Prompt("c", UNSORTED))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (gzip.compress(b"plain", mtime=0)[:-1], "cannot be read"),
        ("", "no prompts"),
        ('{"prompt": ', "Line 1"),
        ('ok\n{"prompt": "a", "colour": "red"}', "Line 2"),
        ('{"prompt": ""}', "Line 1 .* is no prompt"),
        ('ok\n{"question": 3}', "Line 2 .* is no prompt"),
    ],
)
def test_wrong_prompts_are_named(tmp_path: Path, text: str | bytes, words: str) -> None:
    """Guards against prompts that are silently dropped or sent as they were not meant, and against tracebacks."""
    path = tmp_path / ("prompts.gz" if isinstance(text, bytes) else "prompts")
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(ConfigError, match=words):
        read_prompts(path)


def test_prompts_of_published_sets(tmp_path: Path) -> None:
    """Guards the field's own files as they are published: Spec-Bench, HumanEval (compressed), GSM8K."""
    path = tmp_path / "question.jsonl"
    lines = [
        {"question_id": 81, "category": "writing", "turns": ["Write a post.", "Rewrite it."]},
        {"question_id": 101, "category": "math", "turns": ["1 + 1?"], "reference": ["2"]},
        {"question_id": 161, "category": "translation", "turns": ["Translate: Hallo"]},
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert read_prompts(path) == (
        Prompt("Write a post.", "mt_bench"),
        Prompt("1 + 1?", "mt_bench"),
        Prompt("Translate: Hallo", "translation"),
    )
    problem = {"task_id": "HumanEval/0", "prompt": "def f():\n", "entry_point": "f", "canonical_solution": "", "test": ""}
    (tmp_path / "HumanEval.jsonl.gz").write_bytes(gzip.compress((json.dumps(problem) + "\n").encode()))
    assert read_prompts(tmp_path / "HumanEval.jsonl.gz") == (Prompt("def f():\n", "humaneval"),)
    (tmp_path / "test.jsonl").write_text(json.dumps({"question": "How many?", "answer": "#### 3"}))
    assert read_prompts(tmp_path / "test.jsonl") == (Prompt("How many?", "gsm8k"),)


async def test_turns_count_what_came() -> None:
    """Guards tokens, failures and acceptance of a cell against being lost, and speeds that come of refused requests."""
    prompts = (Prompt("def a", "code"), Prompt("def b", "code"), Prompt("Once", "prose"))
    turns, running = itertools.count(1), Counter[str]()
    stats = Stats(1, 3, (Edge("tiny", "full", passes=2, proposed=4, accepted=1, emitted=3),))

    async def ask(prompt: str, mode: Mode) -> Answered:
        running[mode.name] += 1
        assert len(running) == 1, "modes answer at the same time"
        await asyncio.sleep(0)
        running.clear()
        if prompt == "Once" and next(turns) % 5 == 0:
            raise Overloaded("full")
        return Answered(prompt, Completion("ab", (1, 2, 3), "length", 1, stats))

    cells = [cell for at_once in (1, 2) async for some in measured(ask, MODES, prompts, at_once) for cell in some]
    assert [(cell.category, cell.concurrency, cell.requests) for cell in cells] == [
        (category, at_once, number)
        for at_once, numbers in ((1, (2, 1)), (2, (2, 2)))
        for category, number in zip(("code", "prose"), numbers, strict=True)
        for _ in MODES
    ]
    assert all({answer.prompt for answer in cell.answers} == {"def a", "def b"} for cell in cells if cell.category == "code")
    for cell in cells:
        assert (cell.tokens, cell.tokens_per_full_pass) == (3 * len(cell.answers), 1.5 * bool(cell.answers))
    assert {error for cell in cells for error in cell.errors} == {"Overloaded: full"}
    assert same_text(cells[:3])
    assert not same_text([cells[0], Cell(MODES[0], "code", 1, [Answered("def a", Completion("", (9,), "stop", 1, stats))])])
    whole = entries(cells)
    last = whole[-1]
    assert (last["category"], last["mode"], last["requests"]) == ("all", "all", 2 + 2)
    assert [(edge["passes"], edge["acceptance"]) for edge in last["edges"]] == [(2 * (last["requests"] - last["failed"]), 0.25)]
    assert sum(cell["failed"] for cell in whole if cell["category"] == "all") == sum(len(cell.errors) for cell in cells) > 0
