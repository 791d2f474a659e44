"""Steps of three tiers on one GPU behind the server, as `cascade serve` starts it."""

import asyncio
import json
import os
import signal
import sys
import time
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from typing import Any

from ray import serve

from benchmarks.document import console, titled
from benchmarks.gpu import inflate
from benchmarks.gpu.step import Notes
from benchmarks.peers.contract import vllm_drafts
from benchmarks.peers.crew import Process
from benchmarks.prompts import by_category
from benchmarks.turns import ALONE, AUTO, Cell, Mode, Size, at, entries, in_turns
from cascade import SamplingParams, Speculation
from cascade.answer import Chunk, Completion, Stats
from cascade.client import AsyncClient, Client
from cascade.params import Handling
from cascade.settings.engine import EMBEDDED
from deployments.ops.launch import APPLICATION, LOOPBACK, Server, free_port

SHARES = {"tiny": (0.2, 2), "medium": (0.3, 3), "full": (0.5, 8)}  # shares of the GPU, and GiB of keys and values
SUFFIX = Mode("suffix", Speculation(tiers=("suffix",)))
TIERS = Mode("tiers", Speculation(tiers=("tiny", "medium")))
LOOK_S = 0.2
PATIENCE_S = 20.0  # for vLLM's own server, after this project's is there
WAIT_S = 600.0  # for a replica or a server; the step's limit ends before
VLLM = ("vllm", "vllm_ngram")  # modes of vLLM's own server: without drafts, and with its drafter


def config(notes: Notes, full: str, **how: Any) -> dict[str, Any]:
    """Three tiers of the family on vLLM, on one GPU or on CPUs; the full one is ``full``, with engine arguments ``how``.

    Each tier is told the bytes of its keys and values: vLLM would take what others fill meanwhile for its own.
    """
    tiers = []
    for name, (share, gib) in SHARES.items():
        engine: dict[str, Any] = {"engine": "vllm", "dtype": notes.dtype, "drafter": ["suffix"], "max_model_len": 2048}
        engine |= {"enforce_eager": True, "block_size": 32} if notes.small else {}
        engine |= {"kv_cache_memory_bytes": (gib << 30) // (16 if notes.small else 1)}
        engine |= how if name == "full" else {}
        source = full if name == "full" else EMBEDDED + name
        actor = {"num_cpus": 1} | ({} if notes.small else {"num_gpus": share})
        tiers.append(
            {
                "name": name,
                "model_loading_config": {"model_id": name, "model_source": source},
                "engine_kwargs": engine,
                "deployment_config": {"ray_actor_options": actor},
            }
        )
    return {"tiers": tiers}


@contextmanager
def served(notes: Notes, values: dict[str, Any]) -> Iterator[Server]:
    """A server of a configuration; what its start took is noted."""
    begin = time.perf_counter()
    with Server.start(values, port=0, num_gpus=None if notes.small else 1, tell=console.print) as running:
        with Client(running.address) as client:
            engines = [tier.engine for tier in client.describe().tiers]
        notes.keep(start_s=round(time.perf_counter() - begin, 1), engines=engines)
        yield running


def measured(address: str, modes: Sequence[Mode], size: Size, temperature: float) -> list[Cell]:
    """What the server at ``address`` answers in turns."""

    async def ask() -> list[Cell]:
        async with AsyncClient(address) as client:
            return await in_turns(client.stream, modes, size, temperature)

    return asyncio.run(ask())


def alike(cells: Sequence[Cell]) -> dict[str, dict[str, int]]:
    """By mode, how many answers have the tokens that the first mode gave to the same prompt, and how many there are."""
    first = {
        answer.prompt: answer.completion.token_ids for cell in cells if cell.mode == cells[0].mode for answer in cell.answers
    }
    results: dict[str, dict[str, int]] = {}
    for cell in cells:
        counts = results.setdefault(cell.mode.name, {"same": 0, "texts": 0})
        counts["texts"] += cell.requests
        counts["same"] += sum(answer.completion.token_ids == first.get(answer.prompt) for answer in cell.answers)
    return results


def server(notes: Notes) -> None:
    """Three tiers of the family that ships: greedy and sampled text with drafts, and without."""
    tokens = 8 if notes.small else 64
    with served(notes, config(notes, EMBEDDED + "full")) as running:
        for temperature in (0.0, 0.8):
            for at_once in (1, 2) if notes.small else (1, 8):
                size = Size(prompts=1, tokens=tokens, at_once=(at_once,))
                cells = measured(running.address, (ALONE, TIERS, AUTO), size, temperature)
                results = {"alike": alike(cells), "cells": entries(cells)}
                notes.keep(**{f"{at(temperature)}, {at_once} at once": results})


def kill(notes: Notes) -> None:
    """Replicas killed in mid-answer: whether texts stay as they are, and seconds until each is back."""
    params = SamplingParams(max_tokens=24 if notes.small else 256, temperature=0, seed=1, ignore_eos=True)
    prompts = [prompt.text for prompt in by_category(1)][:4]
    with (
        served(notes, config(notes, EMBEDDED + "full", enforce_eager=True)) as running,
        Client(running.address, timeout=WAIT_S) as client,
        ThreadPoolExecutor(len(prompts)) as threads,
    ):
        expected = [client.generate(prompt, params, Speculation("off")).text for prompt in prompts]
        for tier in ("medium", "full"):
            [victim] = titled(f"ray::ServeReplica:{APPLICATION}:{tier}")
            streams = [client.stream(prompt, params, TIERS.speculation) for prompt in prompts]
            begun = [next(stream) for stream in streams]
            os.kill(victim, signal.SIGKILL)
            begin = time.perf_counter()
            rest = threads.map(lambda stream: "".join(chunk.text for chunk in stream), streams)
            answers = [first.text + text for first, text in zip(begun, rest, strict=True)]
            same, answered_s = sum(map(str.__eq__, answers, expected)), time.perf_counter() - begin
            while not _back(tier, victim) and time.perf_counter() - begin < WAIT_S:
                time.sleep(LOOK_S)
            back_s = time.perf_counter() - begin
            results = {"same": same, "texts": len(answers), "answered_s": round(answered_s, 1), "back_s": round(back_s, 1)}
            notes.keep(**{tier: results})


def _back(tier: str, victim: int) -> bool:
    """Whether another replica of a tier serves in the place of ``victim``."""
    there = titled(f"ray::ServeReplica:{APPLICATION}:{tier}")
    deployments = serve.status().applications[APPLICATION].deployments
    return bool(there) and victim not in there and deployments[tier].replica_states.get("RUNNING", 0) > 0


def versus(notes: Notes) -> None:
    """A full model of the cost of 8 billion parameters: alone, with guesses from its text, with tiers, as the planner chooses;
    and vLLM's own server on it, which starts meanwhile."""
    tokens, loads = (6, (1, 2)) if notes.small else (64, (1, 8, 32))
    full, how = notes.inflated(), dict[str, Any](load_format=inflate.FORMAT)
    if not notes.small:
        how |= {"kv_cache_memory_bytes": 4 << 30, "gpu_memory_utilization": 0.3}  # three such models are there at once
    with ExitStack() as stack:
        urls = {mode: _vllm(notes, full, mode, stack) for mode in VLLM}
        with served(notes, {**config(notes, full, **how), "verify": False}) as running:
            urls = {mode: url for mode, url in urls.items() if _ready(notes, mode, url)}  # nobody starts while others are timed
            for at_once in loads:
                cells = measured(running.address, (ALONE, SUFFIX, TIERS, AUTO), _size(tokens, at_once), 0.0)
                notes.keep(**{f"{at_once} at once": {"alike": alike(cells), "cells": entries(cells)}})
        for at_once in loads:
            for mode, url in urls.items():
                cells = asyncio.run(_ask_vllm(url, mode, _size(tokens, at_once)))
                notes.keep(**{f"{at_once} at once, {mode}": entries(cells)})


def _size(tokens: int, at_once: int) -> Size:
    return Size(prompts=1, tokens=tokens, at_once=(at_once,))


def _vllm(notes: Notes, full: str, mode: str, stack: ExitStack) -> str:
    """Start vLLM's server and return its address, where nobody may answer yet."""
    port = free_port()
    command = [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", full, "--host", LOOPBACK, "--port", str(port)]
    command += [
        "--load-format",
        inflate.FORMAT,
        "--dtype",
        notes.dtype,
        "--max-model-len",
        "2048",
        "--served-model-name",
        "full",
    ]
    command += ["--generation-config", "vllm", "--kv-cache-memory-bytes", str((1 if notes.small else 4) << 30)]
    command += ["--enforce-eager"] if notes.small else ["--gpu-memory-utilization", "0.25"]
    if drafts := vllm_drafts(mode, ""):
        command += ["--speculative-config", json.dumps(drafts)]
    variables = {"VLLM_CPU_OMP_THREADS_BIND": "nobind"} if notes.small else {}
    stack.enter_context(Process(command, variables, notes.folder / f"{notes.name}-{mode}.log", piped=False))
    return f"http://{LOOPBACK}:{port}"


def _ready(notes: Notes, mode: str, url: str) -> bool:
    """Whether a server answers there, after a while."""
    end = time.monotonic() + (WAIT_S if notes.small else PATIENCE_S)
    while time.monotonic() < end:
        with suppress(urllib.error.URLError, ConnectionError, TimeoutError), urllib.request.urlopen(f"{url}/v1/models"):
            return True
        time.sleep(LOOK_S)
    notes.keep(**{mode: f"no answer at {url}, see {notes.name}-{mode}.log"})
    return False


async def _ask_vllm(url: str, mode: str, size: Size) -> list[Cell]:
    """What vLLM's server answers to the same prompts."""
    loop = asyncio.get_running_loop()
    with ThreadPoolExecutor(max(size.at_once)) as threads:

        async def stream(
            ids: list[int], params: SamplingParams, speculation: Speculation, handling: Handling
        ) -> AsyncIterator[Chunk]:
            body = {"model": "full", "prompt": ids, "max_tokens": params.max_tokens, "temperature": params.temperature}
            answer = await loop.run_in_executor(threads, _post, f"{url}/v1/completions", body | {"seed": params.seed})
            usage, text = answer["usage"], answer["choices"][0]["text"]
            stats = Stats(usage["prompt_tokens"], usage["completion_tokens"])
            yield Chunk(text, (), (), b"", Completion(text, (), "length", params.seed or 0, stats))

        return await in_turns(stream, (replace(ALONE, name=mode),), size, 0.0)


def _post(url: str, body: dict[str, Any]) -> dict[str, Any]:
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=WAIT_S) as answer:
        results: dict[str, Any] = json.load(answer)
        return results
