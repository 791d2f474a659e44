"""A load that rises and falls on emulated devices, under Ray Serve's autoscaling: replicas, tokens per second, and no error.

Full replicas come and go while clients write. Nothing may fail, and every text must be the toy's.
"""

import asyncio
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rich.table import Table

from benchmarks.cluster.crowd import THREE, crowd
from benchmarks.cluster.devices import Setup
from cascade.client import AsyncClient
from deployments.launch.server import Server

SCALING = {
    "min_replicas": 1,
    "initial_replicas": 1,
    "target_ongoing_requests": 8,
    "upscale_delay_s": 2.0,
    "downscale_delay_s": 8.0,
    "metrics_interval_s": 1.0,
    "look_back_period_s": 3.0,
}


@dataclass(frozen=True, slots=True)
class Size:
    """How much is asked."""

    stretch: float = 20.0
    tokens: int = 64  # of an answer
    most: tuple[int, ...] = (2, 2, 4)  # replicas of tiny, medium, full
    loads: tuple[int, ...] = (4, 32, 4)  # requests at once
    phase_s: float = 32.0  # of each load; tokens count in its last quarter


def measure(size: Size) -> dict[str, Any]:
    """One phase after the other, with the same clients."""
    with Server.start(Setup("code", size.stretch, size.most, SCALING).values, port=0) as server:
        return asyncio.run(_measure(server.address, size))


async def _measure(address: str, size: Size) -> dict[str, Any]:
    phases: list[dict[str, Any]] = []
    async with AsyncClient(address) as client:
        clients = crowd(client, THREE, size.tokens)
        for load in size.loads:
            await clients.stop(load)
            clients.grow(load)
            begin = time.perf_counter()
            await asyncio.sleep(0.75 * size.phase_s)
            rate = await clients.rate(0.25 * size.phase_s)
            replicas = {tier.name: tier.replicas for tier in (await client.describe()).tiers}
            seconds = round(time.perf_counter() - begin, 1)
            phases.append({"load": load, "tokens_per_second": round(rate, 2), "replicas": replicas, "seconds": seconds})
        await clients.stop()
    return {"same_text": clients.exact, "phases": phases}


def headline(found: Mapping[str, Any]) -> dict[str, Any]:
    """Full replicas and tokens per second of each phase, in order."""
    phases = found["phases"]
    return {
        "load": [phase["load"] for phase in phases],
        "full_replicas": [phase["replicas"]["full"] for phase in phases],
        "tokens_per_second": [phase["tokens_per_second"] for phase in phases],
    }


def table(found: Mapping[str, Any]) -> Table:
    result = Table("requests at once", "tokens/s", "replicas at the end", title="A load that rises and falls")
    for phase in found["phases"]:
        replicas = "/".join(map(str, phase["replicas"].values()))
        result.add_row(str(phase["load"]), f"{phase['tokens_per_second']:.1f}", replicas)
    return result
