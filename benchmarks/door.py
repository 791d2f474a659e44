"""What the front door costs: a served toy tier, over gRPC and HTTP, beside the same tier in this process, in alternation.

    make bench-door

The toy's pass takes 3 ms, or nothing at all: then everything that is left is the way of the messages. The last line is one
JSON document.
"""

import http.client
import json
import os
import statistics
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import ray.util
from ray import serve

from cascade import family
from cascade.client import Client
from cascade.engine.devices import processor
from cascade.engine.tokenizer import Tokenizer
from cascade.local import Cascade
from cascade.params import SamplingParams
from cascade.simulation.toy import ToyModel
from cascade.tier.tier import Tier
from deployments import app
from deployments.launch.server import APPLICATION, Server
from deployments.links.uplink import LinkServer

RESULT = Path(__file__).parent / "results" / "door.json"
VOCAB = 4096  # of the toy: the first token ids of SmolLM2's tokenizer
PASS_S = (0.003, 0.0)
PROMPT = "def read_config(path):\n"
PARAMS = SamplingParams(max_tokens=128, temperature=0, seed=1, ignore_eos=True)
ROUNDS, WARM_UP = 40, 5
MAX_FIRST_MS, MAX_MESSAGE_MS, MAX_HTTP = 5.0, 0.3, 1.5  # what gRPC may add; what HTTP may add, relative to gRPC

Stream = Callable[[], Iterator[int]]  # the tokens of each message as it comes


class ToyReplica:
    """In place of `deployments.tier.TierReplica`: real leases and links, and a model without weights."""

    pass_s = 0.0

    async def __init__(  # type: ignore[misc]
        self, config: Mapping[str, Any], level: int, lower: Mapping[str, Any], drafters: Sequence[str]
    ) -> None:
        self._model = ToyModel(VOCAB, pass_s=self.pass_s)
        self._tier = Tier(config["name"], level, self._model)
        self._tier.start()
        self._server = LinkServer(self._tier)
        await self._server.start(ray.util.get_node_ip_address())

    async def lease(self, session: str) -> AsyncIterator[str]:
        async for address in self._server.lease(session):
            yield address

    async def describe(self) -> dict[str, Any]:
        return {"name": "full", "model": "toy", "context_len": self._model.context_len, "vocab_size": VOCAB}


def config() -> dict[str, Any]:
    """One tier; of its model only the tokenizer is read."""
    source = {"model_id": "toy", "model_source": family.path("tiny")}
    return {"tiers": [{"name": "full", "model_loading_config": source}], "verify": False}


def library(cascade: Cascade) -> Iterator[int]:
    """In this process."""
    for chunk in cascade.stream(PROMPT, PARAMS):
        yield len(chunk.token_ids)


def over_grpc(client: Client) -> Iterator[int]:
    """Through the gRPC door."""
    for chunk in client.stream(PROMPT, PARAMS):
        yield len(chunk.token_ids)


def over_http(connection: http.client.HTTPConnection) -> Iterator[int]:
    """Through the HTTP door; token ids are asked for, so that messages can be counted."""
    body = {"model": "toy", "prompt": PROMPT, "max_tokens": PARAMS.max_tokens, "temperature": 0, "seed": 1, "stream": True}
    body |= {"ignore_eos": True, "history": True}
    connection.request("POST", "/v1/completions", json.dumps(body), {"content-type": "application/json"})
    with connection.getresponse() as answer:
        assert answer.status == 200, answer.read()
        for line in answer:
            if line.startswith(b"data: {"):
                yield len(json.loads(line[6:])["choices"][0]["cascade"]["token_ids"])


def timed(stream: Stream) -> tuple[float, float, float, int]:
    """Milliseconds to the first message, from there to the last one by token, of the whole answer; and messages."""
    begin, times, num_tokens = time.perf_counter(), [], 0
    for count in stream():
        times.append(time.perf_counter())
        num_tokens += count
    assert num_tokens == PARAMS.max_tokens, num_tokens
    later = (times[-1] - times[0]) * 1e3 / (num_tokens - 1)
    return (times[0] - begin) * 1e3, later, (times[-1] - begin) * 1e3, len(times)


def compare(ways: Mapping[str, Stream]) -> dict[str, Any]:
    """Medians of each way, and what the doors add to the library."""
    seen: dict[str, list[tuple[float, float, float, int]]] = {name: [] for name in ways}
    order = list(ways)
    for number in range(WARM_UP + ROUNDS):
        for name in order[number % len(order) :] + order[: number % len(order)]:
            taken = timed(ways[name])
            if number >= WARM_UP:
                seen[name].append(taken)
    result: dict[str, Any] = {}
    for name, rows in seen.items():
        first, token, answer, messages = (statistics.median(column) for column in zip(*rows, strict=True))
        result[name] = {"first_token_ms": first, "token_ms": token, "answer_ms": answer, "messages": messages}
    base = result["library"]
    for name in order[1:]:
        result[name] |= {f"added_{key}": result[name][key] - base[key] for key in ("first_token_ms", "token_ms", "answer_ms")}
    return result


def lease_ms() -> float:
    """Median of what Ray Serve takes to lease a replica: a part of every first token."""
    leases = serve.get_deployment_handle("full", APPLICATION).options(stream=True).lease
    times = []
    for number in range(WARM_UP + ROUNDS):
        begin = time.perf_counter()
        lease = leases.remote(f"lease-{number}")
        next(lease)
        times.append((time.perf_counter() - begin) * 1e3)
        lease.cancel()
    return statistics.median(times[WARM_UP:])


def measure(pass_s: float) -> dict[str, Any]:
    """Start a server whose passes take so long, and compare the ways to it."""
    app.TierReplica = type("Toy", (ToyReplica,), {"pass_s": pass_s})  # type: ignore[attr-defined]
    cascade = Cascade([ToyModel(VOCAB, pass_s=pass_s)], Tokenizer.from_pretrained(family.path("tiny")), drafter=None)
    with cascade, Server.start(config(), port=0) as server, Client(server.address) as client:
        connection = http.client.HTTPConnection(urlsplit(server.url).netloc)
        ways: dict[str, Stream] = {
            "library": lambda: library(cascade),
            "grpc": lambda: over_grpc(client),
            "http": lambda: over_http(connection),
        }
        result = {"lease_ms": lease_ms(), **compare(ways)}
        connection.close()
    return {"pass_ms": pass_s * 1e3, **result}


def _added(way: Mapping[str, float]) -> float:
    """Milliseconds a token that a door adds to a whole answer, its share of the first one's included."""
    return way["added_answer_ms"] / PARAMS.max_tokens


def main() -> None:
    runs = [measure(pass_s) for pass_s in PASS_S]
    grpc, http_ = runs[0]["grpc"], runs[0]["http"]
    document = {
        "machine": {"cores": os.cpu_count(), "processor": processor()},
        "rounds": ROUNDS,
        "max_tokens": PARAMS.max_tokens,
        "runs": runs,
        "reached": {
            "grpc_first_token": grpc["added_first_token_ms"] <= MAX_FIRST_MS,
            "grpc_message": all(_added(run["grpc"]) <= MAX_MESSAGE_MS for run in runs),
            "http_first_token": http_["added_first_token_ms"] <= MAX_HTTP * grpc["added_first_token_ms"],
            "http_message": all(_added(run["http"]) <= MAX_HTTP * MAX_MESSAGE_MS for run in runs),
        },
    }
    RESULT.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(document))


if __name__ == "__main__":
    main()
