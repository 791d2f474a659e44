"""A load that rises, falls and ends on emulated devices: replicas of all tiers by worth (`docs/howto/scale.md`).

Replicas come and go while clients write. Nothing may fail, and every text must be what was recorded. The full tier's device is
one whose passes soon take longer with more tokens, so that a crowd needs more of them and drafts gain little there.
"""

import asyncio
import contextlib
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.table import Table

from benchmarks.cluster.crowd import crowd
from benchmarks.cluster.devices import Setup
from benchmarks.cluster.recording import Recording
from benchmarks.turns import AUTO
from cascade.client import AsyncClient
from deployments.ops.launch import Server

FULL_MS = {1: 22.0, 8: 26.0, 16: 36.0, 32: 58.0, 64: 104.0}
PACE = {"up_delay_s": 4, "down_delay_s": 12, "trial_s": 40, "rest_s": 120}
LOOK_S = 2.0  # between two looks at the replicas


@dataclass(frozen=True, slots=True)
class Size:
    """How much is asked."""

    stretch: float = 20.0
    tokens: int = 64  # of an answer
    max_devices: int = 6
    loads: tuple[int, ...] = (2, 24, 2, 0)  # requests at once
    phase_s: float = 56.0  # of each load; tokens count in its last quarter


def measure(recording: Path, size: Size, tell: Callable[[str], object]) -> dict[str, Any]:
    """One phase after the other, with the same clients; ``tell`` is called with a line for each."""
    scaling = {"max_devices": size.max_devices, **PACE}
    setup = Setup(size.stretch, recording=recording, autoscaling=scaling, full_ms=FULL_MS)
    with Server.start(setup.values, port=0, num_gpus=setup.num_gpus) as server:
        return asyncio.run(_measure(server.address, setup, size, tell))


async def _measure(address: str, setup: Setup, size: Size, tell: Callable[[str], object]) -> dict[str, Any]:
    assert setup.recording is not None
    prompts = [text.prompt for text in Recording.load(setup.recording).texts]
    phases: list[dict[str, Any]] = []
    timeline: list[tuple[float, dict[str, int]]] = []
    async with AsyncClient(address) as client:
        watching = asyncio.create_task(_watch(client, timeline))
        clients = crowd(client, AUTO, size.tokens, setup, prompts)
        for load in size.loads:
            await clients.stop(load)
            clients.grow(load)
            begin = time.perf_counter()
            await asyncio.sleep(0.75 * size.phase_s)
            rate = await clients.rate(0.25 * size.phase_s)
            replicas = await _replicas(client)
            seconds = round(time.perf_counter() - begin, 1)
            phases.append({"load": load, "tokens_per_second": round(rate, 2), "replicas": replicas, "seconds": seconds})
            tell(f"{load} at once: {rate:.2f} tokens/s, replicas {replicas}")
        watching.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await watching
        await clients.stop()
    return {"same_text": clients.exact, "phases": phases, "timeline": timeline}


async def _watch(client: AsyncClient, timeline: list[tuple[float, dict[str, int]]]) -> None:
    """Note the replicas whenever there are others."""
    begin = time.perf_counter()
    while True:
        replicas = await _replicas(client)
        if not timeline or timeline[-1][1] != replicas:
            timeline.append((round(time.perf_counter() - begin, 1), replicas))
        await asyncio.sleep(LOOK_S)


async def _replicas(client: AsyncClient) -> dict[str, int]:
    return {tier.name: tier.replicas for tier in (await client.describe()).tiers}


def headline(found: Mapping[str, Any]) -> dict[str, Any]:
    """Replicas and tokens per second of each phase, in order."""
    phases = found["phases"]
    return {
        "load": [phase["load"] for phase in phases],
        "replicas": ["/".join(map(str, phase["replicas"].values())) for phase in phases],
        "tokens_per_second": [phase["tokens_per_second"] for phase in phases],
    }


def table(found: Mapping[str, Any]) -> Table:
    result = Table("requests at once", "tokens/s", "replicas at the end", title="A load that rises, falls and ends")
    for phase in found["phases"]:
        replicas = "/".join(map(str, phase["replicas"].values()))
        result.add_row(str(phase["load"]), f"{phase['tokens_per_second']:.1f}", replicas)
    return result
