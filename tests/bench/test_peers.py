"""The benchmark against other engines: what it makes of what they say, and that who is not there is named."""

from collections.abc import Sequence
from pathlib import Path

import pytest

from benchmarks.document import keep
from benchmarks.peers import __main__ as peers
from benchmarks.peers import contest, report, served
from benchmarks.peers.contract import Models, Said, vllm_drafts
from cascade.settings.config import CascadeConfig
from tests import small


def models() -> Models:
    return Models(*[small.paths()[0]] * 3)


def said(speed: float, text: Sequence[int] = (1, 2, 3, 4)) -> Said:
    return Said(len(text) / speed, text)


def test_the_best_of_an_engine_may_be_its_model_alone() -> None:
    """Guards peers against a best that is slower than what they give without drafts, and float32 against bfloat16."""
    turns = {
        "cascade_alone": [said(100), said(100)],
        "cascade_auto": [said(150), said(150)],
        "cascade_alone_bf16": [said(300), said(300)],
        "vllm_alone": [said(80), said(80)],
        "vllm_ngram": [said(50), said(50)],
        "generate": [said(40), said(40)],
    }
    found = report.headline(report.cells(turns, compared=True))
    assert tuple(found) == peers.HEADLINE
    assert (found["alone"], found["auto"], found["best"]) == (100, 150, 150)
    assert (found["vllm_alone"], found["vllm_best"]) == (80, 80)
    assert (found["llama_alone"], found["llama_best"], found["generate"]) == (None, None, 40)
    assert report.best_drafter(report.cells(turns, compared=True), "vllm") == "vllm_ngram"
    assert {*turns} - report.paying(turns) == {"vllm_ngram"}  # not asked again; alone and what the planner chooses are


def test_a_speed_is_that_of_all_answers_together() -> None:
    """Guards against a mean of speeds, in which a short answer weighs as much as a long one."""
    turns = [Said(1.0, [1] * 10), Said(9.0, [1] * 20)]
    assert report.speed(turns) == pytest.approx(3.0)
    assert report.spread(turns[:1], turns[:1]) is None
    twice = [Said(one.seconds / 2, one.token_ids) for one in turns]
    assert report.spread(twice, turns) == 0  # slow prompts are slow for both
    assert report.spread(turns, turns) > 0


def test_another_text_of_the_cascade_is_noticed() -> None:
    """Guards the first law where speed is measured: drafts that change a text are no speed-up."""
    same = {"cascade_alone": [said(1)], "cascade_auto": [said(2)], "generate": [said(1, (9,))]}
    other = {**same, "cascade_auto": [said(2, (1, 2, 3, 5))]}
    of_another_dtype = {**same, "cascade_alone_bf16": [said(2, (1, 2, 3, 5))]}
    assert [report.lossless(turns) for turns in (same, other, of_another_dtype)] == [True, False, True]
    assert report.cells(same, compared=True)["cascade_auto"]["same_text_as_generate"] == 0
    assert report.cells(same, compared=False)["cascade_auto"]["same_text_as_generate"] is None


def test_a_part_keeps_what_an_earlier_run_said_of_this_family(tmp_path: Path) -> None:
    """Guards runs in pieces against losing the other pieces, and a document against figures of other weights."""
    path = tmp_path / "peers.json"
    document = peers.begun(path, models())
    assert document["one"]["t0.7"] == dict.fromkeys(peers.HEADLINE)
    assert document["served"]["32"] == {"alone": None, "auto": None, "vllm": None}
    document["one"]["t0"]["alone"] = 0.5
    keep(document, path)
    assert peers.begun(path, models())["one"]["t0"]["alone"] == 0.5
    document["family"]["tiny"] = "of other weights"
    keep(document, path)
    assert peers.begun(path, models())["one"]["t0"]["alone"] is None


def test_servers_are_told_the_family_and_how_to_draft() -> None:
    """Guards the served part against a configuration that is refused after minutes of loading."""
    names = CascadeConfig.model_validate(served.cascade_config(models())).chain_names
    assert set(names) == {"suffix", "tiny", "medium", "full"}
    modes = [mode for post in contest.POSTS if post.engine == "vllm_cpu" for mode in post.modes]
    methods = [(vllm_drafts(mode, small.paths()[0]) or {}).get("method") for mode in modes]
    assert methods == [None, "ngram", "suffix", "draft_model"]
    cells = {"alone": {"tokens_per_second": 3}, "vllm_alone": {"tokens_per_second": 1}, "vllm_ngram": {"tokens_per_second": 2}}
    assert served.headline(cells) == {"alone": 3, "auto": None, "vllm": 2}
