"""Many requests at once on emulated devices: the full model alone, three tiers and what the planner chooses, by replicas.

As many clients as there are requests at once each send one request after another. After a short while the tokens that come in a
span of time are counted. All texts, those that were broken off too, must be as recorded.
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.table import Table

from benchmarks.cluster.devices import Setup
from benchmarks.cluster.placed import full_text
from benchmarks.crowd import Crowd
from benchmarks.turns import ALONE, AUTO, Mode
from cascade import family
from cascade.client import AsyncClient
from cascade.messages import SessionSpec
from cascade.params import SamplingParams, Speculation
from cascade.simulation.recording import Recording
from cascade.simulation.toy_tier import ToyTier
from deployments.ops.launch import Server

REPLICAS = ((1, 1, 1), (1, 1, 2), (2, 2, 4))  # tiny, medium, full
LOADS = (1, 16, 64)
THREE = Mode("three", Speculation(tiers=family.NAMES[:-1]))
QUIET_S = 1.0  # until sessions that were broken off are over


@dataclass(frozen=True, slots=True)
class Size:
    """How much is asked."""

    stretch: float = 20.0
    tokens: int = 96  # of an answer
    span_s: float = 0.6  # of the devices' time, that counts
    warm_up_s: float = 0.3  # before it
    loads: tuple[int, ...] = LOADS
    replicas: tuple[tuple[int, ...], ...] = REPLICAS


@dataclass(slots=True, kw_only=True)
class ToldCrowd(Crowd):
    """A crowd whose texts are known: ``full`` writes all of them alone."""

    full: ToyTier

    @property
    def exact(self) -> bool:
        """Whether all that has come is what the full tier writes alone."""
        for seed, text in self.texts.items():
            prompt, params = tuple(self.prompt(seed)), replace(self.params, seed=seed, max_tokens=max(1, len(text)))
            if full_text(self.full, SessionSpec(prompt, len(prompt), params))[len(prompt) :][: len(text)] != text:
                return False
        return True


def crowd(client: AsyncClient, mode: Mode, tokens: int, setup: Setup, prompts: Sequence[Sequence[int]]) -> ToldCrowd:
    """Of clients that ask for answers to ``prompts`` of the tiers of ``setup``."""
    params = SamplingParams(max_tokens=tokens, temperature=0)
    return ToldCrowd(client.stream, mode, params, prompts, full=setup.models()[-1])


def measure(recording: Path, size: Size, report: Callable[[str], object]) -> dict[str, Any]:
    """Every load, on a server for each number of replicas; ``report`` is called with a line for each."""
    figures = {}
    for replicas in size.replicas:
        setup = Setup(size.stretch, replicas, recording)
        with Server.start(setup.values, port=0, num_gpus=setup.num_gpus) as server:
            figures[named(replicas)] = asyncio.run(_measure(server.address, setup, size, report))
    return figures


def named(replicas: Sequence[int]) -> str:
    return "/".join(map(str, replicas))


async def _measure(address: str, setup: Setup, size: Size, report: Callable[[str], object]) -> dict[str, Any]:
    assert setup.recording is not None
    prompts = [text.prompt for text in Recording.load(setup.recording).texts]
    figures = {}
    async with AsyncClient(address) as client:
        for load in size.loads:
            cell: dict[str, Any] = {"same_text": True}
            for mode in (ALONE, THREE, AUTO):
                clients = crowd(client, mode, size.tokens, setup, prompts)
                clients.grow(load)
                await asyncio.sleep(size.stretch * size.warm_up_s)
                cell[mode.name] = round(await clients.rate(size.stretch * size.span_s), 2)
                await clients.stop()
                await asyncio.sleep(QUIET_S)
                cell["same_text"] &= clients.exact
                report(f"{named(setup.replicas)}, {load} at once, {mode.name}: {cell[mode.name]:.2f} tokens/s")
            figures[str(load)] = cell | {"ratios": {name: round(cell[name] / cell["alone"], 3) for name in ("three", "auto")}}
    return figures


def headline(figures: Mapping[str, Any]) -> dict[str, Any]:
    """Ratios to the full model alone; and most replicas with most requests over one with its share of these."""
    line: dict[str, Any] = {name: {load: cell["ratios"] for load, cell in loads.items()} for name, loads in figures.items()}
    names = list(figures)
    first, last = names[0], names[-1]
    times = int(last.split("/")[-1]) // int(first.split("/")[-1])
    most = max(map(int, figures[last]))
    whole, share = figures[last][str(most)], figures[first].get(str(most // times), {})
    line["full_replicas"] = {
        str(times): {mode: round(whole[mode] / share[mode], 3) for mode in ("alone", "three") if mode in share}
    }
    return line


def table(figures: Mapping[str, Any]) -> Table:
    modes = ("alone", "three", "auto")
    result = Table("replicas", "requests at once", *(f"{mode}, tokens/s" for mode in modes), title="Many requests")
    for name, loads in figures.items():
        for load, cell in loads.items():
            shown = (f"{cell[mode]:.1f} ({cell[mode] / cell['alone']:.2f})" for mode in modes)
            result.add_row(name, load, *shown)
    return result
