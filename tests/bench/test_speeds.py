"""What benchmarks of modes beside each other make of answers: ratios, alarms, documents."""

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from benchmarks import document, drafters, never_slower
from benchmarks.crowd import Crowd
from benchmarks.turns import ALONE
from cascade.answer import Chunk, Completion, Stats
from cascade.errors import Unavailable
from cascade.messages import Edge
from cascade.params import Handling, SamplingParams, Speculation


async def answer(ids: list[int], params: SamplingParams, speculation: Speculation, handling: Handling) -> Completion:
    """The same text in every mode, but at temperature 0.7 another one with lines."""
    await asyncio.sleep(0)
    text = tuple(range(params.max_tokens - (speculation.branches == 0 and params.temperature == 0.7)))
    return Completion("", text, "length", 0, Stats(len(ids), len(text), (Edge("tiny", "full", passes=4),)))


async def stream(ids: list[int], *how: SamplingParams | Speculation | Handling) -> AsyncIterator[Chunk]:
    completion = await answer(ids, *how)  # type: ignore[arg-type]
    yield Chunk("", completion.token_ids, (), b"", completion)


@pytest.mark.parametrize("path", sorted(document.RESULTS.glob("*.json")), ids=lambda path: path.name)
def test_results_say_of_what_they_are(path: Path) -> None:
    """Guards figures that nobody can place: each document has its date, its processor and its family."""
    kept = json.loads(path.read_text(encoding="utf-8"))
    assert all(kept[key] for key in ("date", "processor", "family"))
    assert len(kept["date"]) == len("2026-11-25")


def test_documents_are_stamped_and_whole(tmp_path: Path) -> None:
    """Guards the same of the next run, and documents that are laid out against other texts than were measured."""
    stamp = document.stamp()
    assert {*stamp} == {"date", "processor", "family"}
    assert all("layers of" in shape for shape in stamp["family"].values())
    kept = {"deep": {"list": [1, [2, 3], {}], "text": "[a,\n  {b}] \\"}} | stamp
    document.keep(kept, tmp_path / "results" / "some.json")
    assert json.loads((tmp_path / "results" / "some.json").read_text()) == kept


def test_only_whole_runs_are_kept(capsys: pytest.CaptureFixture[str]) -> None:
    """Guards `benchmarks/results` against a quick run or a part of one; and the alarm that ends a run."""
    made = document.parser("cluster", "About clusters.", ("one", "two"))
    assert document.parsed(made, []).results == document.RESULTS / "cluster.json"
    assert [document.parsed(made, one).results for one in (["--quick"], ["--only", "one"])] == [None, None]
    assert [document.lossless({"a": one}) for one in ({"same_text": False}, {"b": {"c": 1}})] == [False, True]
    with pytest.raises(SystemExit, match="different texts"):
        document.finish({"a": {"same_text": False}}, {"line": 1}, None)
    assert json.loads(capsys.readouterr().out) == {"line": 1}


def test_loads_are_level() -> None:
    """Guards speeds of crowds: a client that is through asks on, one request is all that each has; an error ends a round."""
    running: list[int | None] = []
    tokens_wanted: list[int] = []

    async def ask(ids: list[int], params: SamplingParams, *how: Speculation | Handling) -> AsyncIterator[Chunk]:
        running.append(params.seed)
        assert len(running) <= 3
        for place in range(2):
            await asyncio.sleep(0)
            if tokens_wanted[-1] > 30:
                raise Unavailable("nobody is there")
            yield Chunk("", (place,), (), b"", None)
        running.remove(params.seed)

    async def serve(tokens: int) -> tuple[float, Crowd]:
        tokens_wanted.append(tokens)
        clients = Crowd(ask, ALONE, SamplingParams(), [[1]])
        clients.grow(3)
        speed = await clients.rate_of(tokens)
        await clients.stop()
        return speed, clients

    speed, clients = asyncio.run(serve(30))
    assert speed > 0
    assert clients.tokens >= 30
    assert {seed % 1000 for seed in clients.texts} == {0, 1, 2}
    running.clear()
    with pytest.raises(Unavailable):
        asyncio.run(serve(31))


def test_crowds_are_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards `make bench-never-slower`: a ratio with its error for each load, to which a round of tries counts.

    Guards the alarm where texts differ, too.
    """
    monkeypatch.setattr(never_slower, "QUIET_S", 0.0)
    size = never_slower.Size(tokens=8, rounds=2, loads=((1, 2), (3, 1)))
    found = asyncio.run(never_slower.measure(stream, [[1, 2], [3]], size, lambda line: None))
    assert document.lossless(found)
    assert found["t0"]["3"]["rounds"] == 2
    assert {*never_slower.headline(found)} == {"t0", "t0.7"}
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
