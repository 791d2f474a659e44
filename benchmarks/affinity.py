"""What it is worth that requests which begin alike meet the same full replica: tokens not read again, and first tokens.

A toy on two emulated devices, each with memory for half of the beginnings that there are; the same requests with
`router.prefix_affinity` and without, and with a `cache_salt` of its own for each request, which shares nothing. The last
line is JSON.

python -m benchmarks.affinity [without] [with] [salted]
"""

import asyncio
import json
import random
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from cascade.bench.scrape import Scrape, scrape
from cascade.client import AsyncClient
from cascade.params import Handling, SamplingParams
from deployments.ops.launch.server import Server
from deployments.ops.observer import OBSERVE_S

VOCAB = 4096
CASES = {"without": (False, False), "with": (True, False), "salted": (True, True)}  # affinity, salts


@dataclass(frozen=True, slots=True)
class Load:
    """What is asked."""

    prefixes: int = 12
    prefix_len: int = 480  # tokens
    own_len: int = 32  # tokens of a prompt after its prefix
    requests: int = 10  # for each prefix
    at_once: int = 4
    cache_tokens: int = 4096  # of each replica: seven or eight of the prefixes

    def prompts(self) -> list[list[int]]:
        """All of them, in a random order."""
        chance = random.Random(1)
        begins = [[chance.randrange(1, VOCAB) for _ in range(self.prefix_len)] for _ in range(self.prefixes)]
        asked = [
            begin + [chance.randrange(1, VOCAB) for _ in range(self.own_len)] for begin in begins for _ in range(self.requests)
        ]
        chance.shuffle(asked)
        return asked


@dataclass(frozen=True, slots=True)
class Found:
    """What came of it."""

    hit_rate: float  # tokens that replicas did not read again, of those that came
    known: float  # share of the sessions that met a replica which knows their beginning
    first_token_ms: float  # mean
    first_token_p90_ms: float
    busiest: float  # share of the tokens that came to one replica, the busier one


def values(load: Load, affinity: bool) -> dict[str, Any]:
    """The configuration: one tier, twice."""
    device = {"pass_ms": {1: 10, 64: 15, 512: 80}, "agreement": []}
    full = {
        "name": "full",
        "model_loading_config": {"model_id": "toy-full", "model_source": "embedded:tiny"},
        "engine_kwargs": {"drafter": [], "num_threads": 1, "emulated": device, "cache_tokens": load.cache_tokens},
        "deployment_config": {"num_replicas": 2, "ray_actor_options": {"num_cpus": 0, "num_gpus": 1}},
    }
    return {"tiers": [full], "router": {"prefix_affinity": affinity}}


async def ask(address: str, load: Load, salted: bool) -> tuple[list[float], list[tuple[int, ...]]]:
    """Seconds to each request's first token, and the texts."""
    params = SamplingParams(max_tokens=4, temperature=1.0, seed=1, ignore_eos=True)
    free = asyncio.Semaphore(load.at_once)

    async def one(client: AsyncClient, number: int, prompt: Sequence[int]) -> tuple[float, tuple[int, ...]]:
        async with free:
            begin = time.perf_counter()
            handling = Handling(cache_salt=f"tenant {number}" if salted else "")
            completion = await client.generate(prompt, params, handling=handling)
            return time.perf_counter() - begin, completion.token_ids

    async with AsyncClient(address) as client:
        answers = await asyncio.gather(*(one(client, *asked) for asked in enumerate(load.prompts())))
    return [seconds for seconds, _ in answers], [text for _, text in answers]


def found(seconds: Sequence[float], before: Scrape, after: Scrape) -> Found:
    """What a scrape says that ``before`` it did not."""
    counted = after.since(before)
    asked = {labels: value for (name, labels), value in counted.samples.items() if name == "kv_asked_tokens"}
    routes = {dict(labels)["outcome"]: n for (name, labels), n in counted.samples.items() if name == "prefix_routes_total"}
    total = sum(asked.values())
    return Found(
        hit_rate=round(counted.total("kv_reused_tokens") / total, 3),
        known=round(routes.get("known", 0.0) / max(1.0, sum(routes.values())), 3),
        first_token_ms=round(1e3 * statistics.fmean(seconds), 1),
        first_token_p90_ms=round(1e3 * statistics.quantiles(seconds, n=10)[-1], 1),
        busiest=round(max(asked.values()) / total, 3),
    )


def measure(load: Load, *, affinity: bool, salted: bool) -> tuple[Found, list[tuple[int, ...]]]:
    with Server.start(values(load, affinity), port=0) as server:
        before = scrape(server.url)
        seconds, texts = asyncio.run(ask(server.address, load, salted))
        time.sleep(OBSERVE_S + 1.0)  # until the metrics are new
        return found(seconds, before, scrape(server.url)), texts


def main() -> None:
    load = Load()
    result: dict[str, Mapping[str, Any]] = {"load": asdict(load)}
    texts = []
    for name in sys.argv[1:] or CASES:
        affinity, salted = CASES[name]
        measured, text = measure(load, affinity=affinity, salted=salted)
        result[name] = asdict(measured)
        texts.append(text)
        print(name, asdict(measured), flush=True)
    assert all(text == texts[0] for text in texts), "a text depends on where it was written"
    print(json.dumps(result))


if __name__ == "__main__":
    main()
