"""Load generators of others, against the published model behind `cascade serve`."""

import json
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from time import monotonic, sleep
from typing import Any

import pytest

from cascade import family
from cascade.client import Client
from cascade.errors import ModelError
from cascade.params import SamplingParams
from cascade.prompts import BUILT_IN
from deployments.ops.launch import free_port

ROOT = Path(__file__).parents[2]
CASCADE = [sys.executable, "-m", "cascade.cli.main"]
CLIENTS, REQUESTS, TOKENS = 2, 8, 64
START_S, RUN_S = 240.0, 600.0
APART = 2.0  # at most, of two measures of one server minutes apart on a machine that others share

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("ray"), pytest.mark.timeout(1500)]


@dataclass(frozen=True)
class Served:
    """A server, and where generators find its tokenizer and prompts."""

    url: str
    grpc: str
    model: str
    tokenizer: str
    folder: Path


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    try:
        tokenizer = family.full()
    except ModelError as error:
        pytest.skip(str(error))
    folder = tmp_path_factory.mktemp("generators")
    for file, field in (("prompts", "prompt"), ("texts", "text")):
        lines = [json.dumps({field: prompt.text}) for prompt in BUILT_IN[:REQUESTS]]
        (folder / f"{file}.jsonl").write_text("\n".join(lines) + "\n")
    http, grpc = free_port(), free_port()
    url = f"http://127.0.0.1:{http}"
    server = subprocess.Popen([*CASCADE, "serve", "--port", str(http), "--grpc-port", str(grpc)], cwd=ROOT)
    try:
        model = wait(f"{url}/v1/models", server)["data"][0]["id"]
        yield Served(url, f"127.0.0.1:{grpc}", model, tokenizer, folder)
    finally:
        server.terminate()
        server.wait(60)


def wait(url: str, server: subprocess.Popen[bytes]) -> Any:
    """What is there as soon as the server answers."""
    end = monotonic() + START_S
    while monotonic() < end:
        assert server.poll() is None
        with suppress(OSError), urllib.request.urlopen(url, timeout=5) as answer:
            return json.load(answer)
        sleep(0.5)
    raise AssertionError(f"nobody answers at {url}")


def run(command: list[str]) -> None:
    done = subprocess.run(command, cwd=ROOT, timeout=RUN_S, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]


@pytest.fixture(scope="module")
def tokens_per_second(served: Served) -> float:
    """Of as many clients of our own, at their second turn."""
    params, speed = SamplingParams(max_tokens=TOKENS, temperature=0, seed=1), 0.0
    turns = [({"role": "user", "content": prompt.text},) for prompt in BUILT_IN[:REQUESTS]]
    with Client(served.grpc) as client, ThreadPoolExecutor(CLIENTS) as pool:
        for _ in range(2):
            begin = monotonic()
            answers = list(pool.map(lambda turn: client.chat(turn, params), turns))
            speed = sum(answer.completion.stats.completion_tokens for answer in answers) / (monotonic() - begin)
    return speed


def guidellm(served: Served, program: str) -> float:
    to = served.folder / "guidellm.json"
    backend = f"kind=openai_http,target={served.url},model={served.model},request_format=/v1/chat/completions"
    given = ["--backend", f"{backend},max_tokens={TOKENS}", "--tokenizer", f"kind=hf_auto,model={served.tokenizer}"]
    given += ["--data", f"kind=json_file,path={served.folder / 'prompts.jsonl'}", "--output", f"kind=json,path={to}"]
    given += ["--profile", f"kind=concurrent,streams={CLIENTS}", "--constraint", f"kind=max_requests,count={REQUESTS}"]
    run([program, "run", *given, "--disable-console"])
    [benchmark] = json.loads(to.read_text())["benchmarks"]
    return float(benchmark["metrics"]["output_tokens_per_second"]["successful"]["mean"])


def vllm(served: Served, program: str) -> float:
    to = served.folder / "vllm.json"
    given = ["--backend", "openai-chat", "--base-url", served.url, "--endpoint", "/v1/chat/completions"]
    given += ["--model", served.model, "--tokenizer", served.tokenizer, "--dataset-name", "custom"]
    given += ["--dataset-path", str(served.folder / "prompts.jsonl"), "--custom-output-len", str(TOKENS)]
    given += ["--num-prompts", str(REQUESTS), "--max-concurrency", str(CLIENTS), "--temperature", "0"]
    run([program, "bench", "serve", *given, "--skip-chat-template", "--save-result", "--result-filename", str(to)])
    said = json.loads(to.read_text())
    assert said["completed"] == REQUESTS
    assert said["spec_decode_num_drafts"] > 0  # read of our metrics
    return float(said["output_throughput"])


def aiperf(served: Served, program: str) -> float:
    to = served.folder / "aiperf"
    given = ["--model", served.model, "--url", served.url, "--endpoint-type", "chat", "--streaming", "--ui", "none"]
    given += ["--tokenizer", served.tokenizer, "--input-file", str(served.folder / "texts.jsonl")]
    given += ["--custom-dataset-type", "single_turn", "--concurrency", str(CLIENTS), "--request-count", str(REQUESTS)]
    given += ["--extra-inputs", "temperature:0", "--extra-inputs", f"max_completion_tokens:{TOKENS}"]
    run([program, "profile", *given, "--use-server-token-count", "--artifact-dir", str(to)])
    return float(json.loads((to / "profile_export_aiperf.json").read_text())["output_token_throughput"]["avg"])


@pytest.mark.parametrize(
    ("generator", "program"),
    [(guidellm, ".venv-guidellm/bin/guidellm"), (vllm, ".venv-vllm/bin/vllm"), (aiperf, ".venv-aiperf/bin/aiperf")],
)
def test_outside_generators_agree(request: pytest.FixtureRequest, generator: Any, program: str) -> None:
    """Guards users of other tools: they run against the server, and measure the speed that our own clients see."""
    if not (ROOT / program).exists():
        pytest.skip(f"{program} is not there: `make generators` installs it")
    expected: float = request.getfixturevalue("tokens_per_second")
    measured = generator(request.getfixturevalue("served"), str(ROOT / program))
    assert expected / APART < measured < expected * APART
