"""Requests over HTTP: ``vllm bench serve`` asks this project's server and vLLM's, in turns."""

import json
import math
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

from benchmarks.document import console
from benchmarks.peers import contest, crew, environments
from benchmarks.peers.contract import BFLOAT16, POSITIONS, Models, vllm_drafts
from benchmarks.turns import rotated
from cascade.prompts import Prompt
from deployments.ops.launch import LOOPBACK, free_port

ROUNDS = 3  # in which modes take turns: the speed of a shared machine wanders


@dataclass(frozen=True, slots=True)
class Plan:
    """How much is asked."""

    prompts: Sequence[Prompt]
    tokens: int  # of an answer at most
    temperature: float
    requests: Mapping[int, int]  # at once, and in all
    drafter: str = ""  # vLLM's, by its mode of one request; "" to measure vLLM without drafts only
    rate: float = math.inf  # requests that come in a second, at random; infinite: each as soon as it may
    positions: int = POSITIONS  # of context at vLLM
    cache_gib: int = 1  # vLLM's memory for keys and values
    extra: Mapping[str, Any] = field(default_factory=dict)  # fields of every request's body


@dataclass(frozen=True, slots=True)
class Mode:
    """A server and what is said to it beside the prompt."""

    url: str
    model: str
    body: Mapping[str, Any]


def cascade_config(models: Models) -> dict[str, Any]:
    """Three tiers in bfloat16, with the drafters that the family is served with."""

    tiers = [
        {
            "name": name,
            "model_loading_config": {"model_id": name, "model_source": source},
            "engine_kwargs": {"dtype": BFLOAT16, "drafter": ["suffix"]},
        }
        for name, source in (("tiny", models.tiny), ("medium", models.medium), ("full", models.full))
    ]
    return {"tiers": tiers}


class Arena:
    """All servers and the client, and who is missing."""

    def __init__(
        self,
        models: Models,
        plan: Plan,
        stack: ExitStack,
        *,
        config: dict[str, Any] | None = None,
        dtype: str = BFLOAT16,
        python: str | None = None,
        share: float | None = None,
    ) -> None:
        """``config`` is this project's, three tiers in bfloat16 unless given; ``python`` runs vLLM, here its build for CPUs.

        ``share`` is the part of a GPU's memory that each server of vLLM takes.
        """
        self._config, self._dtype, self._share = config or cascade_config(models), dtype, share
        self.missing: dict[str, str] = {}
        self.modes: dict[str, Mode] = {}
        self._models = models
        self._plan = plan
        self._stack = stack
        self._prompts = contest.WORK / "prompts.jsonl"
        contest.WORK.mkdir(exist_ok=True)
        self._prompts.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in _texts(plan)))
        try:
            python = python or environments.VLLM.python
            command = [python, "-m", "benchmarks.peers.client"]
            log = contest.WORK / "client.log"
            self._client = stack.enter_context(crew.Talker(command, contest.settings(environments.VLLM), log))
            self._client.greeting()
        except (environments.Missing, crew.WorkerFailed) as error:
            self.missing = dict.fromkeys(("alone", "auto", "vllm_alone", plan.drafter), f"no client: {error}")
            return
        for mode in filter(None, ("vllm_alone", plan.drafter)):
            self._vllm(mode, python)
        self._cascade()

    def _cascade(self) -> None:
        """One server, asked with drafts and without."""
        config = contest.WORK / "serve.yaml"
        config.write_text(json.dumps(self._config))  # JSON is YAML
        ports = [str(free_port()), str(free_port())]
        command = [sys.executable, "-m", "cascade.cli.main", "serve", str(config), "--port", ports[0], "--grpc-port", ports[1]]
        bodies: dict[str, dict[str, Any]] = {"alone": {"speculation": {"mode": "off"}, "seed": 1}, "auto": {"seed": 1}}
        self._start(bodies, command, contest.settings(None), ports[0])

    def _vllm(self, mode: str, python: str) -> None:
        port = str(free_port())
        command = [python, "-m", "vllm.entrypoints.cli.main", "serve", self._models.full, "--host", LOOPBACK, "--port", port]
        command += ["--dtype", self._dtype, "--max-model-len", str(self._plan.positions)]
        command += ["--max-num-seqs", str(max(self._plan.requests))]
        command += ["--served-model-name", "full", "--generation-config", "vllm"]
        if self._share:
            command += ["--gpu-memory-utilization", str(self._share)]
        if drafts := vllm_drafts(mode, self._models.tiny):
            command += ["--speculative-config", json.dumps(drafts)]
        variables = contest.settings(environments.VLLM) | {"VLLM_CPU_KVCACHE_SPACE": str(self._plan.cache_gib)}
        self._start({mode: {}}, command, variables, port)

    def _start(self, bodies: Mapping[str, Mapping[str, Any]], command: list[str], variables: dict[str, str], port: str) -> None:
        url, log = f"http://{LOOPBACK}:{port}", contest.WORK / f"serve-{next(iter(bodies))}.log"
        try:
            server = self._stack.enter_context(crew.Server(command, variables, log, url))
        except crew.WorkerFailed as error:
            self.missing |= dict.fromkeys(bodies, str(error))
            return
        self.modes |= {mode: Mode(url, server.model, body) for mode, body in bodies.items()}
        console.print(f"{', '.join(bodies)}: served at {url}")

    def ask(self, mode: str, at_once: int, requests: int, salt: str) -> dict[str, Any] | None:
        """What ``vllm bench serve`` says of a mode; one that fails is asked no more."""
        place = self.modes[mode]
        body = {**place.body, **self._plan.extra, "cache_salt": salt}  # no prompt is known from another cell
        arguments = ["--backend", "openai-chat", "--base-url", place.url, "--endpoint", "/v1/chat/completions"]
        arguments += ["--model", place.model, "--tokenizer", self._models.full, "--dataset-name", "custom"]
        arguments += ["--dataset-path", str(self._prompts), "--skip-chat-template", "--disable-shuffle"]
        arguments += ["--custom-output-len", str(self._plan.tokens), "--num-prompts", str(requests)]
        arguments += ["--max-concurrency", str(at_once), "--temperature", str(self._plan.temperature)]
        arguments += ["--extra-body", json.dumps(body), "--request-rate", str(self._plan.rate), "--disable-tqdm"]
        arguments += ["--percentile-metrics", "ttft,tpot,itl", "--metric-percentiles", "99"]
        try:
            result = self._client.tell(arguments)
            if result["completed"] != requests:
                raise crew.WorkerFailed(f"{result['completed']} of {requests} requests were answered")
            return result
        except crew.WorkerFailed as error:
            self.missing[mode] = str(error)
            del self.modes[mode]
            console.print(f"{mode}: failed: {error}")
            return None


def _texts(plan: Plan) -> list[str]:
    """Prompts of a round, none of which begins as another: each one that comes again has a number before it."""
    places = range(max(len(plan.prompts), max(plan.requests.values()) // ROUNDS))
    texts = [plan.prompts[place % len(plan.prompts)].text for place in places]
    return [text if place < len(plan.prompts) else f"{place}. {text}" for place, text in zip(places, texts, strict=True)]


def measure(arena: Arena, plan: Plan, tell: Callable[[int, Mapping[str, Any]], None]) -> dict[str, dict[str, Any]]:
    """Cells by requests at once, then by mode; ``tell`` hears of each number of requests when it is done."""
    for mode in list(arena.modes):
        arena.ask(mode, 1, 1, f"warm-up {mode}")
    figures: dict[str, dict[str, Any]] = {}
    for at_once, requests in plan.requests.items():
        results: dict[str, list[Mapping[str, Any]]] = {mode: [] for mode in arena.modes}
        for number in range(ROUNDS):
            for mode in rotated(list(arena.modes), number):
                if result := arena.ask(mode, at_once, max(1, requests // ROUNDS), f"{mode} {at_once} {number}"):
                    results[mode].append(result)
        figures[str(at_once)] = {mode: _cell(results[mode]) for mode in arena.modes}
        tell(at_once, figures[str(at_once)])
    return figures


def _cell(results: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    tokens = sum(result["total_output_tokens"] for result in results)
    return {
        "tokens_per_second": round(tokens / sum(result["duration"] for result in results), 1),
        "tokens": tokens,
        "ttft_ms": round(statistics.fmean(result["mean_ttft_ms"] for result in results), 1),
        "tpot_ms": round(statistics.fmean(result["mean_tpot_ms"] for result in results), 2),
    }


def headline(cells: Mapping[str, Mapping[str, Any]]) -> dict[str, float | None]:
    """Tokens per second of this project alone and by the planner, and of vLLM's better mode."""
    speeds = {mode: cell["tokens_per_second"] for mode, cell in cells.items()}
    vllm = max((speed for mode, speed in speeds.items() if mode.startswith("vllm")), default=None)
    return {"alone": speeds.get("alone"), "auto": speeds.get("auto"), "vllm": vllm}
