"""One request at a time, a device for each tier: modes beside each other, and beside what the simulator predicts of each.

Simulator and server run the same tiers and the same requests, so texts and agreement are the same to the token: what differs
is time, and what follows from it. All seconds are those of stretched time.
"""

import itertools
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import median
from typing import Any

from rich.table import Table

from benchmarks.cluster.devices import Setup, Simulated, simulated
from cascade import family
from cascade.bench.measure import PROMPTS, EdgeTotals, Mode, stranger
from cascade.client import Client
from cascade.engine.tokenizer import Tokenizer
from cascade.params import SamplingParams, Speculation
from cascade.simulation.scenario import SimTier
from deployments.launch.server import Server

KINDS = ("chat", "code", "embedded")
LOWER = family.NAMES[:-1]
WINDOWS = (2, 3, 4, 6, 8, 12)  # of lockstep pairs
ALONE = Mode("alone", Speculation("off"))
PAIRS = tuple(Mode(f"async pair, {name}", Speculation(tiers=(name,))) for name in LOWER)
THREE = Mode("async three", Speculation(tiers=LOWER))
AUTO = Mode("auto", Speculation())
WARM_ALONE = 8  # tokens


@dataclass(frozen=True, slots=True)
class Size:
    """How much is asked."""

    stretch: float = 10.0
    tokens: int = 96  # of an answer
    alone: int = 24  # the same of the full tier alone, which always takes as long
    warm_up: int = 48  # of one that does not count, in each mode
    prompts: int = 2
    windows: tuple[int, ...] = WINDOWS
    kinds: tuple[str, ...] = KINDS


@dataclass(slots=True)
class Run:
    """Answers in one mode, and what the simulator says of the same requests."""

    mode: Mode
    expected: Simulated
    tokens: int = 0
    seconds: float = 0.0
    texts: list[tuple[int, ...]] = field(default_factory=list)
    edges: EdgeTotals = field(default_factory=EdgeTotals)

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds

    @property
    def figures(self) -> dict[str, Any]:
        return {
            "tokens_per_second": round(self.tokens_per_second, 3),
            "simulated": round(self.expected.tokens_per_second, 3),
            "measured_over_simulated": round(self.tokens_per_second / self.expected.tokens_per_second, 3),
            "tokens_per_full_pass": round(self.tokens / max(1, self.edges.full_passes), 3),
            "simulated_tokens_per_full_pass": round(self.expected.tokens_per_pass, 3),
        }


def measure(size: Size) -> dict[str, Any]:
    """Every kind, with a server of its own."""
    return {kind: _measure(Setup(kind, size.stretch), size) for kind in size.kinds}


def _measure(setup: Setup, size: Size) -> dict[str, Any]:
    tokenizer = Tokenizer.from_pretrained(family.paths()[-1])
    prompts = [tokenizer.encode(text) for text in PROMPTS[: size.prompts]]
    params = SamplingParams(max_tokens=size.tokens, temperature=0, ignore_eos=True)
    tiers = setup.tiers()
    locked = [best_lockstep(tiers, prompts, params, name, size) for name in LOWER]
    runs = [predicted(tiers, prompts, params, mode, size) for mode in (ALONE, *locked, *PAIRS, THREE, AUTO)]
    with Server.start(setup.values, port=0) as server, Client(server.address) as client:
        for run in runs:  # links and leases exist, and the planner knows what pays
            answer(client, prompts[0], replace(params, max_tokens=warm_up(run.mode, size), seed=len(prompts)), run.mode)
        for seed, run in itertools.product(range(len(prompts)), runs):
            tokens = size.alone if run.mode is ALONE else size.tokens
            begin = time.perf_counter()
            completion = answer(client, prompts[seed], replace(params, max_tokens=tokens, seed=seed), run.mode)
            run.seconds += time.perf_counter() - begin
            run.tokens += len(completion.token_ids)
            run.texts.append(completion.token_ids)
            run.edges.add(completion.stats.edges)
        passes = {tier.name: dict(tier.pass_cost)[1] for tier in client.describe().tiers}
    return figures(setup, runs) | {"pass_over_device": pass_over_device(setup, passes)}


def answer(client: Client, prompt: Sequence[int], params: SamplingParams, mode: Mode) -> Any:
    return client.generate(prompt, params, mode.speculation, stranger())


def predicted(
    tiers: Sequence[SimTier], prompts: Sequence[Sequence[int]], params: SamplingParams, mode: Mode, size: Size
) -> Run:
    """What the simulator says."""
    tokens = size.alone if mode is ALONE else size.tokens
    return Run(mode, simulated(tiers, prompts, replace(params, max_tokens=tokens), mode.speculation, warm_up(mode, size)))


def warm_up(mode: Mode, size: Size) -> int:
    """Tokens of the first answer; the full tier alone has nothing to learn."""
    return min(WARM_ALONE, size.warm_up) if mode is ALONE else size.warm_up


def best_lockstep(
    tiers: Sequence[SimTier],
    prompts: Sequence[Sequence[int]],
    params: SamplingParams,
    drafter: str,
    size: Size,
) -> Mode:
    """The lockstep pair of a drafter with the window that is best in the simulator."""
    modes = [
        Mode(f"lockstep pair, {drafter}, {window}", Speculation(tiers=(drafter,), window=window, schedule="lockstep"))
        for window in size.windows
    ]
    times = [simulated(tiers, prompts, params, mode.speculation, size.warm_up).seconds for mode in modes]
    return modes[times.index(min(times))]


def figures(setup: Setup, runs: Sequence[Run]) -> dict[str, Any]:
    """Speeds, ratios, what a pass alone takes beside the device, and whether all texts are those of the simulator."""
    by_name = {run.mode.name: run for run in runs}
    alone = by_name[ALONE.name]
    return {
        "same_text": all(tuple(run.texts) == run.expected.texts for run in runs),
        "overhead_ms": round((alone.seconds / alone.tokens - setup.full_pass_s) * 1e3, 2),
        "modes": {name: run.figures for name, run in by_name.items()},
        "measured": ratios({name: run.tokens_per_second for name, run in by_name.items()}),
        "simulated": ratios({name: run.expected.tokens_per_second for name, run in by_name.items()}),
    }


def pass_over_device(setup: Setup, seconds: Mapping[str, float]) -> dict[str, float]:
    """By how much passes of one token were longer, as each tier has seen them last, than those of its device."""
    devices = {tier.name: tier.engine_kwargs.emulated for tier in setup.config.tiers}
    return {name: round(seconds[name] / device.points[0][1], 3) for name, device in devices.items() if device is not None}


def ratios(speeds: Mapping[str, float]) -> dict[str, float]:
    """Of three tiers, and of those that the planner chooses."""
    best = {kind: max(speed for name, speed in speeds.items() if name.startswith(kind)) for kind in ("lockstep", "async pair")}
    three, auto, alone = (speeds[mode.name] for mode in (THREE, AUTO, ALONE))
    found = {
        "three_vs_alone": three / alone,
        "three_vs_async_pair": three / best["async pair"],
        "three_vs_lockstep_pair": three / best["lockstep"],
        "auto_vs_alone": auto / alone,
    }
    return {name: round(value, 3) for name, value in found.items()}


def headline(found: Mapping[str, Any]) -> dict[str, Any]:
    """Ratios that were measured; least, median and most of what speeds are over simulated ones, the planner's apart."""
    line = {}
    for kind, one in found.items():
        off = [mode["measured_over_simulated"] for name, mode in one["modes"].items() if name != AUTO.name]
        line[kind] = one["measured"] | {"measured_over_simulated": [min(off), round(median(off), 3), max(off)]}
    return line


def table(kind: str, one: Mapping[str, Any]) -> Table:
    columns = ("mode", "tokens/s", "simulated", "measured over simulated", "tokens a full pass", "simulated")
    result = Table(*columns, title=f"One request, {kind}; a pass alone takes {one['overhead_ms']} ms more than the device")
    for name, mode in one["modes"].items():
        result.add_row(name, *(f"{value:g}" for value in mode.values()))
    return result
