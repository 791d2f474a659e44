"""What benchmarks of modes beside each other make of answers: fair turns, ratios, alarms, documents."""

import asyncio
import io
import json
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from benchmarks import asked, never_slower, rules, turns
from benchmarks.drafters import __main__ as drafters
from benchmarks.drafters import cost, report
from benchmarks.drafters.modes import MODES
from benchmarks.trees import __main__ as trees
from benchmarks.trees import acceptance, served
from benchmarks.turns import ALONE, AUTO, Answers, Question
from cascade.answer import Completion, Stats
from cascade.bench.prompts import BUILT_IN
from cascade.messages import Edge
from cascade.params import LOCKSTEP_WINDOW, Handling, SamplingParams, Speculation

RESULTS = Path(asked.__file__).parent / "results"
QUESTIONS = (Question([1, 2], "code"), Question([3], "chat"))
PARAMS = SamplingParams(max_tokens=8, temperature=0)


async def answer(ids: list[int], params: SamplingParams, speculation: Speculation, handling: Handling) -> Completion:
    """The same text in every mode, but at temperature 0.7 another one with lines."""
    text = tuple(range(params.max_tokens - (speculation.branches == 0 and params.temperature == 0.7)))
    return Completion("", text, "length", 0, Stats(len(ids), len(text), (Edge("tiny", "full", passes=4),)))


@pytest.mark.parametrize("path", sorted(RESULTS.glob("*.json")), ids=lambda path: path.name)
def test_results_say_of_what_they_are(path: Path) -> None:
    """Guards figures that nobody can place: each document has its date, its processor and its family."""
    document = json.loads(path.read_text(encoding="utf-8"))
    assert all(document[key] for key in ("date", "processor", "family"))
    assert len(document["date"]) == len("2026-11-25")


def test_documents_are_stamped() -> None:
    """Guards the same of the next run."""
    stamp = asked.stamp()
    assert {*stamp} == {"date", "processor", "family"}
    assert all("layers of" in shape for shape in stamp["family"].values())


def test_modes_take_turns_on_every_prompt() -> None:
    """Guards comparisons: each mode answers each prompt with the same seed, alone with it, and none always comes first."""
    calls: list[tuple[str, int, str, int | None]] = []

    async def ask(ids: list[int], params: SamplingParams, speculation: Speculation, handling: Handling) -> Completion:
        calls.append((speculation.mode, ids[0], handling.cache_salt, params.seed))
        return await answer(ids, params, speculation, handling)

    told: list[str] = []
    found = asyncio.run(turns.in_turns(ask, (ALONE, AUTO), QUESTIONS, PARAMS, told.append))
    counted = calls[2:]  # after the prompt that warms up
    assert [call[:2] for call in counted] == [("off", 1), ("auto", 1), ("auto", 3), ("off", 3)]
    assert [call[3] for call in counted] == [0, 0, 1, 1]
    assert len({call[2] for call in calls}) == len(calls)
    assert len(told) == len(QUESTIONS)
    assert [len(text) for text in found["auto"].texts] == [8, 8]
    assert found["auto"].tokens_per_pass("code") == 2
    assert found["auto"].speed() > 0


def test_prompts_are_of_every_kind() -> None:
    """Guards what all figures rest on: as many of each category, and chats where the model has a template for them."""
    kinds = {prompt.category for prompt in BUILT_IN}
    assert {prompt.category for prompt in asked.by_category(1)} == kinds
    assert len(asked.by_category(2)) == 2 * len(kinds)
    assert asked.by_category(None) == BUILT_IN


def test_loads_are_level() -> None:
    """Guards speeds of crowds: a client that is through asks on, and one request is all that each has."""
    running: list[int] = []

    async def ask(number: int) -> Completion:
        running.append(number)
        assert len(running) <= 3
        await asyncio.sleep(0.001 * (number % 3))
        running.remove(number)
        return Completion("", tuple(range(number + 1)), "length", 0, Stats(1, number + 1, ()))

    speed, answers = asyncio.run(turns.level_load(ask, 3, 0.05))
    assert sorted(answers) == [*range(len(answers))]
    assert 0 < speed * 0.05 <= sum(len(answer.token_ids) for answer in answers.values())


def test_served_trees_are_compared_with_lines() -> None:
    """Guards the figures of served trees, and their alarm: one mode that writes another text fails the run."""
    found = served.figures(asyncio.run(served.measure(answer, QUESTIONS, 8, lambda line: None)))
    assert {name.partition("_")[0] for name in served.headline(found)} == {"t0", "t0.7"}
    assert [found[name]["same_text"] for name in ("t0", "t0.7")] == [True, False]
    assert not asked.lossless({"served": found})
    assert served.prepared(found) == {"t0": None, "t1.0": None}
    assert not served.branched(found)
    assert [asked.lossless({"a": one}) for one in ({"same_text": False}, {"b": {"c": 1}})] == [False, True]


def test_crowds_are_compared() -> None:
    """Guards `make bench-never-slower`: a ratio with its error for each load, and an alarm where texts differ."""
    size = never_slower.Size(tokens=8, rounds=2, round_s=0.01, loads=(1, 3))
    found = asyncio.run(never_slower.measure(answer, QUESTIONS, size, lambda line: None))
    assert asked.lossless(found)
    assert found["t0"]["3"]["rounds"] == 2
    assert {*never_slower.headline(found)} == {"t0", "t0.7"}
    given = {"alone": never_slower.Given([10.0, 10.0], {0: (1,)}), "auto": never_slower.Given([10.0, 12.0], {0: (2,)})}
    cell = never_slower.figures(given)
    assert (cell["ratio"], cell["error"], cell["same_text"]) == (1.1, 0.1, False)


@pytest.mark.slow
def test_runner_ups_add_to_shares(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards the part of bench-trees that serves nothing: a runner-up can only add to a share, on real texts of the family."""
    monkeypatch.setattr(trees, "Plan", lambda: trees.QUICK)
    trees.main(["--parts", "acceptance", "--results", str(tmp_path / "trees.json")])
    head = json.loads(capsys.readouterr().out.splitlines()[-1])
    document = json.loads((tmp_path / "trees.json").read_text())
    assert head == document["head"]
    for edges in document["acceptance"].values():
        assert all(0 <= one <= two <= three <= 1 for one, two, three in edges.values())
    assert head["acceptance"]["t1.0"] == document["acceptance"]["t1.0"][acceptance.TOP][2]


@pytest.mark.slow
def test_drafters_are_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Guards `make bench-drafters` against kinds and modes that have changed: its last line names them all, and texts agree."""
    drafters.main(["--quick", "--results", str(tmp_path / "drafters.json"), "--picture", str(tmp_path / "drafters.svg")])
    line = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert {*line["drafters"]} == {mode.name for mode in MODES if mode is not ALONE}
    assert all(one["t0"]["speedup"] > 0 and one["t0"]["accepted_len"] >= 1 for one in line["drafters"].values())
    assert line["best"] in line["drafters"]
    assert json.loads((tmp_path / "drafters.json").read_text())["head"] == line
    picture = (tmp_path / "drafters.svg").read_text()
    assert all(f"{name}</text>" in picture for name in line["drafters"])


def test_drafters_fit_into_a_window(tmp_path: Path) -> None:
    """Guards what is kept and what is shown: a full run's document is small, its tables are no wider than a window."""
    kinds = ["chat", "code", "maths", "summary", "translation", "documents"]
    made = {mode.name: Answers(mode, kinds, [1.5] * 6, [40] * 6, [tuple(range(96))] * 6) for mode in MODES}
    found = {turns.at(temperature): made for temperature in drafters.Plan().temperatures}
    path = tmp_path / "drafters.json"
    drafters.write({"head": report.head(found), "cells": report.entries(found)}, path)
    document = json.loads(path.read_text())
    assert len(document["cells"]) == 3 * (len(kinds) + 1) * len(MODES)
    assert document["cells"][-1]["tokens_per_full_pass"] == 2.4
    assert path.stat().st_size < 100_000
    console = Console(width=drafters.WIDTH, file=io.StringIO())
    assert console.measure(report.table("t0", made)).minimum <= drafters.WIDTH


@pytest.mark.parametrize("kind", cost.KINDS)
def test_guesses_without_a_model_take_little_memory(kind: str) -> None:
    """Guards long contexts: at most 64 bytes a position."""
    assert (cost.measure(kind)["bytes_a_position"] or 0) <= 64


def test_rules_are_compared_fairly() -> None:
    """Guards the table of rules: all modes of one choice of tiers, and distributions that weigh what they hold."""
    for name, chain in rules.CHAINS.items():
        ways = [mode.speculation for mode in rules.modes(name, chain)]
        assert {one.tiers for one in ways} == {chain}
        assert [one.rule for one in ways].count("coupled") == 3
        assert replace(ways[-1], branches=0) == ways[-2]  # trees beside lines
    assert rules.expected("ratio", [0.5, 0.5]) == 0.75
    assert rules.expected("block", [0.5, 0.5]) == 1.25


@pytest.mark.slow
def test_rules_by_formula() -> None:
    """Guards what rules are said to give and to weigh, on the family. That blocks give no less is so in the mean alone.

    `tests/engine/test_acceptance.py` holds that mean.
    """
    [question, *_] = turns.questions(1)
    given = rules.tokens_per_round(1.0, [question], 12)
    assert all(1 <= tokens <= 1 + LOCKSTEP_WINDOW for tokens in given.values())
    assert {"ratio", "block"} <= {*given}
    weights = list(rules.bytes_per_token(1.0, [question], top_p=0.9).values())
    assert 1 < weights[0] < weights[1] <= weights[2]
