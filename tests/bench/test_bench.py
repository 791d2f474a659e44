"""`cascade bench`: what it sends, what it counts, what it writes. No figure of speed is judged."""

import asyncio
import gzip
import itertools
import json
import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from cascade.answer import Chunk, Completion, Stats
from cascade.bench.load import Cell, Workload, load, quantile, same_text
from cascade.bench.prompts import BUILT_IN, UNSORTED, Prompt, read_prompts
from cascade.bench.report import document
from cascade.cli.bench import modes
from cascade.cli.main import main
from cascade.client import AsyncClient
from cascade.errors import ConfigError, Overloaded
from cascade.params import SamplingParams
from tests.doors import House, house
from tests.small import paths
from tests.talkers import talking

TIERS = ("tiny", "medium", "full")
GREEDY = SamplingParams(max_tokens=12, temperature=0, seed=1, ignore_eos=True)


def run(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(main, ["bench", *arguments])
    assert not result.exception or isinstance(result.exception, SystemExit), result.exception
    return result.exit_code, result.output


def loaded(served: House, workload: Workload) -> list[Cell]:
    async def measure() -> list[Cell]:
        async with AsyncClient(served.grpc) as client:
            return await load(client.stream, workload)

    return asyncio.run(measure())


def test_prompts_of_a_file(tmp_path: Path) -> None:
    """Guards the three ways to write a prompt, and texts that look a little like JSON."""
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "a\\nb", "category": "code"}\n"quoted"\n\n[1, 2, \n  {"prompt": "c"}\n', encoding="utf-8")
    assert read_prompts(path) == (Prompt("a\nb", "code"), Prompt("quoted"), Prompt("[1, 2, "), Prompt("c", UNSORTED))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (gzip.compress(b"plain")[:-1], "cannot be read"),
        ("", "no prompts"),
        ('{"prompt": ', "Line 1"),
        ('ok\n{"prompt": "a", "colour": "red"}', "Line 2"),
        ('{"category": "code"}', "no prompt"),
        ('{"prompt": ""}', "no prompt"),
        ('{"prompt": 3}', "no prompt"),
        ('{"turns": [], "category": "math"}', "Line 1.*turns"),
        ('ok\n{"turns": "text", "category": "math"}', "Line 2.*turns"),
        ('{"turns": ["a"]}', "Line 1.*category"),
        ('{"task_id": "HumanEval/0"}', "Line 1.*prompt"),
        ('{"question": 3}', "Line 1.*question"),
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


def test_prompts_that_ship() -> None:
    """Guards the six kinds of eight, each different, with the texts that some are about."""
    kinds = {prompt.category for prompt in BUILT_IN}
    assert kinds == {"chat", "code", "mathematics", "summaries", "translation", "documents"}
    assert all(sum(prompt.category == kind for prompt in BUILT_IN) == 8 for kind in kinds)
    assert len({prompt.text for prompt in BUILT_IN}) == 48
    assert all(len(prompt.text.split()) > 120 for prompt in BUILT_IN if prompt.category == "summaries")
    assert all("Document 2: " in prompt.text for prompt in BUILT_IN if prompt.category == "documents")


def test_batches_keep_every_client_busy() -> None:
    """Guards the comparison at high concurrency: no mode ends a batch with idle clients, no prompt is left out."""
    workload = Workload(modes(TIERS, False), BUILT_IN, (1, 3, 16), GREEDY)
    for category in workload.categories:
        for n in workload.concurrency:
            batch = workload.batch(category, n)
            assert len(batch) % n == 0
            assert set(batch) == {prompt for prompt in BUILT_IN if prompt.category == category}
    assert workload.num_requests == 3 * sum(
        len(workload.batch(c, n)) for c in workload.categories for n in workload.concurrency
    )


def test_quantiles_are_values_that_were_seen() -> None:
    """Guards the ends: the p99 of few values is the largest one."""
    assert quantile([], 0.5) == 0
    assert quantile([3.0, 1.0, 2.0], 0.5) == 2
    assert quantile([3.0, 1.0, 2.0], 0.99) == 3
    assert quantile(list(range(1, 101)), 0.99) == 99


def test_load_counts_what_the_server_said() -> None:
    """Guards tokens, requests, acceptance and texts of every cell against being lost or counted twice."""
    prompts = (Prompt("def a", "code"), Prompt("def b", "code"), Prompt("Once", "prose"))
    workload = Workload(modes(TIERS, False), prompts, (1, 4), GREEDY, rounds=2)
    with house() as served:
        cells = loaded(served, workload)
        served.settle()
    assert len(cells) == 3 * 2 * 2
    assert sum(cell.requests for cell in cells) == workload.num_requests
    for cell in cells:
        assert not cell.errors
        assert cell.tokens == cell.requests * GREEDY.max_tokens
        assert len(cell.first_token_s) == cell.requests
        assert sum(cell.first_token_s) + sum(cell.gaps_s) <= cell.seconds * cell.concurrency + 1e-9
    assert same_text(cells)
    whole = document(cells, version="x")
    last = whole["cells"][-1]
    assert (last["category"], last["mode"], last["requests"]) == ("all", "tiny → medium → full", 2 * (4 + 4))
    assert whole["failed"] == 0
    assert {(edge["drafter"], edge["verifier"]) for edge in last["edges"]} >= {("medium", "full"), ("tiny", "medium")}


async def test_failed_requests_are_counted() -> None:
    """Guards against a comparison that is fast because requests were refused."""
    workload, turns = Workload(modes(TIERS, False), (Prompt("a"),), (2,), GREEDY), itertools.count(1)

    async def stream(*asked: Any) -> AsyncIterator[Chunk]:
        turn = next(turns)
        if turn > 6 and turn % 2:  # after the warm-up
            raise Overloaded("full")
        yield Chunk("", (), (), b"", Completion("", (), "stop", 1, Stats(1, 0)))

    cells = await load(stream, workload)
    assert [cell.errors for cell in cells] == [["Overloaded: full"]] * 3
    assert document(cells)["failed"] == 3


def test_different_texts_are_noticed() -> None:
    """Guards the sentence that says whether speculation was lossless."""
    mode = modes(TIERS, False)[0]
    one, other = Cell(mode, "a", 1, texts={"x": (1, 2)}), Cell(mode, "a", 1, texts={"x": (1, 3)})
    assert same_text([one, one])
    assert not same_text([one, other])


@pytest.fixture
def prompts(tmp_path: Path) -> str:
    """A file of two prompts of three categories each."""
    lines = [{"prompt": f"{word} {kind}", "category": kind} for kind in ("chat", "code", "prose") for word in ("a", "the")]
    (tmp_path / "prompts").write_text("\n".join(map(json.dumps, lines)))
    return str(tmp_path / "prompts")


def test_bench_writes_a_document(tmp_path: Path, prompts: str) -> None:
    """Guards the command as a whole, against a server: tables and JSON."""
    written = tmp_path / "bench.json"
    options = ["--concurrency", "1,2", "--max-tokens", "8", "--prompts", prompts, "--category", "code", "--category", "chat"]
    with house() as served:
        code, output = run("--address", served.grpc, *options, "--json", str(written))
    assert code == 0, output
    assert "All modes gave the same text" in output
    said: dict[str, Any] = json.loads(written.read_text())
    assert said["categories"] == ["chat", "code"]
    assert said["chat"] is True
    assert said["model"] == "toy"
    assert said["date"]
    assert said["processor"]
    assert len(said["cells"]) == 3 * 2 * (2 + 1)
    alone = [cell for cell in said["cells"] if cell["mode"] == "full alone"]
    assert {cell["category"] for cell in alone} == {"chat", "code", "all"}
    assert all((cell["speed_up"], cell["tokens_per_full_pass"]) == (1, 1) for cell in alone)


def test_bench_without_a_server(tmp_path: Path, prompts: str) -> None:
    """Guards models in this process: the same text with every chain, each cell printed, in the model's own template."""
    written = tmp_path / "bench.json"
    models = [part for path in paths() for part in ("--model", path)]
    code, output = run(
        "--pairs", "--max-tokens", "8", "--prompts", prompts, "--category", "code", "--json", str(written), *models
    )
    assert code == 0, output
    said = json.loads(written.read_text())
    assert said["same_text"] is True
    assert said["chat"] is True
    assert said["model"] == Path(paths()[-1]).name
    for cell in said["cells"]:
        line = rf"1 +{'code' if cell['category'] == 'all' else cell['category']} .* {cell['speed_up']:.2f}x .*{cell['mode']}"
        assert re.search(line, output), line
    names = {cell["mode"] for cell in said["cells"]}
    chains = {"suffix → full", "tiny → full", "medium → full", "suffix → tiny → medium → full"}
    assert names == {"full alone", "cascade", *chains}


def test_prompts_are_turns_unless_they_are_raw(tmp_path: Path) -> None:
    """Guards the chat template that prompts go through, and `--raw`: parrots say what they were told, and end, only in a
    conversation."""
    prompts, written = tmp_path / "prompts", tmp_path / "bench.json"
    prompts.write_text("one two three")
    with talking(tmp_path / "talker", "hermes") as served:
        for more in ([], ["--raw"]):
            options = ["--prompts", str(prompts), "--max-tokens", "30", "--json", str(written), *more]
            code, output = run("--address", served.grpc, *options)
            assert code == 0, output
            said = json.loads(written.read_text())
            assert said["chat"] is not bool(more)
            assert (said["cells"][0]["tokens"] > 3) is not bool(more)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--address", "127.0.0.1:1", "--model", "somewhere"], "--model"),
        (["--concurrency", "0"], "1 to 10000"),
        (["--concurrency", "1,x"], "1 to 10000"),
        (["--json", "no/such/folder/bench.json"], "no folder"),
        (["--category", "poems"], "poems"),
        (["--address", "127.0.0.1:1"], "127.0.0.1:1"),
    ],
)
def test_mistakes_get_one_sentence(arguments: list[str], words: str) -> None:
    """Guards users against tracebacks, and against minutes of measuring before a mistake is noticed."""
    code, output = run(*arguments)
    assert code != 0
    assert words in output
    assert "Traceback" not in output
