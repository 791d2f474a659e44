"""The command line: what it prints, how it fails, that Ctrl-C leaves nothing running, and the demo."""

import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import click
import psutil
import pytest
import yaml
from click.testing import CliRunner
from openai import AuthenticationError, OpenAI

from cascade import Cascade, Completion, SamplingParams, Speculation, Structured, family
from cascade.cli import demo
from cascade.cli.demo import simulated
from cascade.cli.main import main
from cascade.cli.options import parameters, sampling_options
from cascade.cli.serve import configured
from cascade.client import Client
from cascade.settings.config import CascadeConfig
from deployments.app import shortage
from tests import small
from tests.cases import rare
from tests.cli import run
from tests.talkers import talking
from tests.waiting import LONG_S, wait_until

PROMPT = "def read(path):\n"


def test_help_teaches() -> None:
    """Guards every command's help against breaking."""
    for command in ([], *([name] for name in main.commands)):
        code, output = run(*command, "--help")
        assert (code, "Usage" in output) == (0, True)


def test_generate_prints_the_text() -> None:
    """Guards the text on standard output, after a prompt of standard input."""
    tiny = small.paths()[0]
    with Cascade.from_pretrained([tiny]) as cascade:
        expected = cascade.generate(PROMPT, SamplingParams(max_tokens=20, temperature=0)).text
    code, output = run("generate", "--model", tiny, "--plain", "-t", "0", "--max-tokens", "20", "-", input=PROMPT)
    assert (code, output.rstrip("\n")) == (0, expected.rstrip("\n"))


def test_options_say_everything(tmp_path: Path) -> None:
    """Guards options that are dropped or reach another parameter."""
    schema = tmp_path / "schema.json"
    schema.write_text('{"type": "integer"}')
    chosen: list[tuple[Callable[[SamplingParams], SamplingParams], Speculation]] = []

    @click.command()
    @sampling_options
    def show(**options: Any) -> None:
        chosen.append(parameters(options))

    penalties = "--presence-penalty 0.5 --frequency-penalty -0.5 --repetition-penalty 1.2 --stop a --stop b"
    assert CliRunner().invoke(show, [*penalties.split(), "--tiers", "tiny, full", "--json-schema", f"@{schema}"]).exit_code == 0
    [(sampled, speculation)] = chosen
    assert speculation == Speculation(tiers=("tiny", "full"))
    structured = Structured(json_schema='{"type": "integer"}')
    assert sampled(SamplingParams(top_k=40)) == SamplingParams(
        top_k=40,  # the model's own
        presence_penalty=0.5,
        frequency_penalty=-0.5,
        repetition_penalty=1.2,
        stop=("a", "b"),
        max_tokens=128,
        structured=structured,
    )


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["generate", "--temperature", "-1", "x"], "temperature"),
        (["generate", "--tiers", "huge", "x"], "huge"),
        (["generate", "--model", "./nowhere", "x"], "nowhere"),
        (["generate", "--address", "127.0.0.1:1", "x"], "127.0.0.1:1"),
        (["generate", "--regex", "a", "--json-schema", "{}", "x"], "one of json_schema"),
        (["generate", "--json-schema", "@nowhere.json", "x"], "nowhere.json"),
        (["serve", "nowhere.yaml"], "nowhere.yaml"),
        (["serve", "--draft", "small"], "--draft"),
        (["check", "--darft", "small"], "Did you mean"),
        (["serve", "--port", "9000"], "port 9000 is named for HTTP and for gRPC"),
        (["chat", "somewhere", "--address", "127.0.0.1:1"], "--address"),
        (["generate", "--model", "somewhere", "--address", "127.0.0.1:1", "x"], "--address names a server"),
        (["plan", "some/model", "--pass-ms", "80", "--agreement", "0.5"], "--pass-ms replaces MODEL"),
        (["forget", "alice", "--folder", "nowhere"], "'nowhere' does not exist"),
        (["forget", "alice", "--folder", "/proc"], "/proc/forgotten.jsonl cannot be read or written"),
        (["layers", "some/model", "--share", "nan"], "'nan' is not a number"),
        (["top", "--once", "--address", "127.0.0.1:1", "--url", "http://127.0.0.1:1"], "127.0.0.1:1"),
    ],
)
def test_mistakes_get_one_sentence(small_demo: None, arguments: list[str], words: str) -> None:
    """Guards users against tracebacks, and against minutes of work before a mistake is noticed: it names itself at once."""
    code, output = run(*arguments)
    assert code != 0
    assert words in output
    assert "Traceback" not in output


def test_models_are_named_instead_of_a_file() -> None:
    """Guards `cascade serve BIG --draft SMALL --draft SMALLER`: the tiers in their order, and options where they belong."""
    config = configured("big", ["small", "smaller"], dtype="float16", max_model_len=512, served_model_name=["gpt", "gpt-2"])
    assert [tier.model_loading_config.source for tier in config.tiers] == ["smaller", "small", "big"]
    assert config.names == ("tiny", "medium", "full")
    assert {tier.engine_kwargs.dtype for tier in config.tiers} == {"float16"}
    assert (config.max_model_len, config.model_names) == (512, ("gpt", "gpt-2"))
    assert configured("big").model_names == ("big",)
    assert configured(None) == CascadeConfig.demo()


@pytest.mark.parametrize(
    ("num_gpus", "ranks", "num_drafts", "expected"),
    [(4, 2, 2, [1, 1, 2]), (2, 1, 2, [0.5, 0.5, 1]), (4, 2, 0, [2]), (1, 1, 2, [0.11, 0.36, 0.51])],
    ids=["enough", "drafts share one", "alone", "all share one"],
)
def test_models_share_the_gpus(
    monkeypatch: pytest.MonkeyPatch, num_gpus: int, ranks: int, num_drafts: int, expected: list[float]
) -> None:
    """Guards machines with GPUs: every model named on the command line gets some, and together they fit."""
    monkeypatch.setattr("torch.cuda.device_count", lambda: num_gpus)
    *drafts, full = small.paths()
    config = configured(full, [*reversed(drafts)][:num_drafts], ranks)
    shares = [tier.deployment_config.ray_actor_options["num_gpus"] for tier in config.tiers]
    assert shares == pytest.approx(expected, abs=0.02)
    assert shortage(config, {"CPU": 4.0, "GPU": float(num_gpus)}) is None
    assert config.tiers[-1].engine_kwargs.tensor_parallel_size == ranks


def test_check_fits_a_terminal_and_finds_a_wrong_order() -> None:
    """Guards `cascade check`: its table was cut at 80 columns, and a draft larger than its verifier was not noticed."""
    tiny, medium, full = small.paths()
    code, output = run("check", full, "--draft", tiny, "--draft", medium)
    assert code == 0
    assert max(map(len, output.splitlines())) <= 80
    assert "…" not in output
    assert "Tier tiny is not smaller than tier medium" in " ".join(output.split())


def test_check_takes_files_for_serve_deploy(tmp_path: Path) -> None:
    """Guards operators, who check what they deploy."""
    path, cascade = tmp_path / "serve.yaml", small.config().model_dump(mode="json", exclude_unset=True)
    other = {"name": "other", "import_path": "other:app"}
    path.write_text(yaml.safe_dump({"applications": [other, {"import_path": "deployments.app:build", "args": cascade}]}))
    code, output = run("check", str(path))
    assert (code, "The tiers fit together." in output, "not smaller" in output) == (0, True, False), output
    path.write_text(yaml.safe_dump({"applications": [other]}))
    code, output = run("check", str(path))
    assert (code, "has 0 applications with tiers" in " ".join(output.split())) == (1, True)


@pytest.mark.parametrize("num_tiers", [1, rare(3)])
def test_ctrl_c_stops_everything(num_tiers: int) -> None:
    """Guards against Ray processes, tiers and ports left behind by `cascade serve`, and its options against being ignored."""
    key, (full, *drafts) = "0123456789abcdef", [*reversed(small.paths())][:num_tiers]
    options = {"--dtype": "float32", "--port": "0", "--api-key": key, "--served-model-name": "gpt"}
    named = [*options.items(), *(("--draft", draft) for draft in drafts)]
    command = [sys.executable, "-m", "cascade.cli.main", "serve", full, *(part for pair in named for part in pair)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        printed = []
        for line in process.stdout:
            printed.append(line)
            if match := re.search(r"on (127\.0\.0\.1:\d+)\.", line):
                url = re.search(r"http://127\.0\.0\.1:\d+", process.stdout.readline())
                break
        else:
            pytest.fail("".join(printed))
        with Client(match[1], api_key=key) as client:
            assert client.generate(PROMPT, SamplingParams(max_tokens=8)).token_ids
            assert len(client.describe().tiers) == num_tiers
        with OpenAI(base_url=f"{url[0]}/v1", api_key=key) as openai:
            assert [model.id for model in openai.models.list()] == ["gpt"]
        with OpenAI(base_url=f"{url[0]}/v1", api_key="another") as openai, pytest.raises(AuthenticationError):
            openai.models.list()
        children = psutil.Process(process.pid).children(recursive=True)
        process.send_signal(signal.SIGINT)
        process.stdout.read()
        assert process.wait(timeout=LONG_S) == 0
    assert len(children) > 3

    def left() -> list[psutil.Process]:
        return [child for child in children if child.is_running() and child.status() != psutil.STATUS_ZOMBIE]

    wait_until(lambda: not left(), left)


def test_questions_are_answered_and_modes_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards the demo as a whole, without a terminal: five answers to chats, one table, the same texts."""
    monkeypatch.setattr(demo, "COMPARED_TOKENS", 8)
    monkeypatch.setattr(demo, "AGAIN_TOKENS", 8)
    monkeypatch.setattr(demo, "PARAMS", replace(demo.PARAMS, max_tokens=16))
    given: dict[str, Completion] = {}

    def on_devices(config: CascadeConfig, answers: Mapping[str, Completion]) -> demo.Row:
        assert config.names == ("tiny", "medium", "full")  # toys are no models that could be recorded
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
    shown = simulated(dict(zip(family.NAMES, family.paths(), strict=True)), (), texts, params, ["code", "code"], small.VOCAB)
    assert [len(times) for times in shown.alone] == [len(times) for times in shown.cascade] == [len(ids) for _, ids in texts]
    alone, cascade = shown.speeds
    assert alone == pytest.approx(39, rel=0.05)
    assert cascade > alone
    assert all(0 < share <= 1 for share in shown.agreement.values())
