"""The command line: what it prints, how it fails, and that Ctrl-C leaves nothing running."""

import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import psutil
import pytest
import yaml
from click.testing import CliRunner
from openai import AuthenticationError, OpenAI

from cascade import Cascade, SamplingParams, Speculation, Structured
from cascade.cli.config import configured
from cascade.cli.main import main
from cascade.cli.options import parameters, sampling_options
from cascade.client import Client
from cascade.settings.config import CascadeConfig
from deployments.app import shortage
from tests import small
from tests.cases import rare
from tests.cli import run
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
    said: list[tuple[Callable[[SamplingParams], SamplingParams], Speculation]] = []

    @click.command()
    @sampling_options
    def show(**options: Any) -> None:
        said.append(parameters(options))

    penalties = "--presence-penalty 0.5 --frequency-penalty -0.5 --repetition-penalty 1.2 --stop a --stop b"
    assert CliRunner().invoke(show, [*penalties.split(), "--tiers", "tiny, full", "--json-schema", f"@{schema}"]).exit_code == 0
    [(sampled, speculation)] = said
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
        assert process.stdout is not None
        printed = []
        for line in process.stdout:
            printed.append(line)
            if found := re.search(r"on (127\.0\.0\.1:\d+)\.", line):
                url = re.search(r"http://127\.0\.0\.1:\d+", process.stdout.readline())
                break
        else:
            pytest.fail("".join(printed))
        with Client(found[1], api_key=key) as client:
            assert client.generate(PROMPT, SamplingParams(max_tokens=8)).token_ids
            assert len(client.describe().tiers) == num_tiers
        assert url is not None
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
