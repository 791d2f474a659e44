"""Load generators of others, against the published model behind `cascade serve`."""

import json
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from cascade import family
from cascade.errors import ModelError
from cascade.prompts import BUILT_IN
from deployments.ops.launch import free_port
from tests.waiting import LONG_S, wait_until

ROOT = Path(__file__).parents[2]
CASCADE = [sys.executable, "-m", "cascade.cli.main"]
CLIENTS, REQUESTS, TOKENS = 2, 8, 64
RUN_S = 600.0

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("ray"), pytest.mark.timeout(1500)]


@dataclass(frozen=True)
class Served:
    """A server, and where generators find its tokenizer and prompts."""

    url: str
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
    models: list[str] = []

    def answers() -> bool:
        assert server.poll() is None
        with suppress(OSError), urllib.request.urlopen(f"{url}/v1/models", timeout=LONG_S) as answer:
            models.append(json.load(answer)["data"][0]["id"])
        return bool(models)

    try:
        wait_until(answers, every_s=0.5)
        yield Served(url, models[0], tokenizer, folder)
    finally:
        server.terminate()
        server.wait(60)


def run(command: list[str]) -> None:
    done = subprocess.run(command, cwd=ROOT, timeout=RUN_S, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]


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
    report = json.loads(to.read_text())
    assert report["completed"] == REQUESTS
    assert report["spec_decode_num_drafts"] > 0  # read of our metrics
    return float(report["output_throughput"])


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
def test_outside_generators_run(request: pytest.FixtureRequest, generator: Any, program: str) -> None:
    """Guards users of other tools: they run against the server, and find its answers and a speed."""
    if not (ROOT / program).exists():
        pytest.skip(f"{program} is not there: `make generators` installs it")
    assert generator(request.getfixturevalue("served"), str(ROOT / program)) > 0
