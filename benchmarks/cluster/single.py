"""One request at a time, a device for each tier: modes beside each other, and beside what the simulator predicts of each.

Simulator and server run the same tiers and the same requests, so texts and agreement are the same to the token: what differs
is time, and what follows from it. All seconds are those of stretched time.
"""

import itertools
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import median
from typing import Any

from rich.table import Table

from benchmarks.cluster.devices import Setup, Simulated, simulated
from benchmarks.turns import ALONE, AUTO, Mode, isolated
from cascade.client import Client
from cascade.params import SamplingParams, Speculation
from cascade.simulation.recording import RecordedText, Recording
from cascade.simulation.scenario import Request, SimTier
from deployments.ops.launch import Server

PAIR, THREE = "pair, ", "three"  # names of modes: the first is followed by that of the lower tier
TEXT, ALL = "text drafters", "three, text drafters"
WARM_ALONE = 8  # tokens


@dataclass(frozen=True, slots=True)
class Size:
    """How much is asked."""

    stretch: float = 6.0
    tokens: int = 64  # of an answer
    alone: int = 16  # the same of the full tier alone, which always takes as long
    warm_up: int = 48  # of one that does not count, in each mode


def modes(names: Sequence[str], drafters: tuple[str, ...]) -> tuple[Mode, ...]:
    """Of tiers of these names, bottom to top: the full one alone, each pair, three tiers if there are, the planner's choice.

    If there are ``drafters`` inside the full tier: also these alone, and with all tiers.
    """
    *lower, _ = names
    pairs = [Mode(f"{PAIR}{name}", Speculation(tiers=(name,))) for name in lower]
    three = [Mode(THREE, Speculation(tiers=tuple(lower)))] if len(lower) > 1 else []
    text = [Mode(TEXT, Speculation(tiers=drafters)), Mode(ALL, Speculation(tiers=(*drafters, *lower)))] if drafters else []
    return (ALONE, *pairs, *three, *text, AUTO)


@dataclass(slots=True)
class Run:
    """Answers in one mode, and what the simulator says of the same requests."""

    mode: Mode
    expected: Simulated
    seconds: list[float] = field(default_factory=list)  # of each answer
    texts: list[tuple[int, ...]] = field(default_factory=list)
    full_passes: int = 0

    def speed(self, which: Sequence[int] | None = None) -> float:
        """Tokens per second of the answers of these numbers, or of all."""
        chosen = range(len(self.texts)) if which is None else which
        return sum(len(self.texts[i]) for i in chosen) / sum(self.seconds[i] for i in chosen)

    @property
    def figures(self) -> dict[str, Any]:
        expected = self.expected.tokens_per_second
        return {
            "tokens_per_second": round(self.speed(), 3),
            "simulated": round(expected, 3),
            "measured_over_simulated": round(self.speed() / expected, 3),
            "tokens_per_full_pass": round(sum(map(len, self.texts)) / max(1, self.full_passes), 3),
            "simulated_tokens_per_full_pass": round(self.expected.tokens_per_pass, 3),
        }


def measure(recording: Recording, setup: Setup, size: Size, report: Callable[[str], object]) -> dict[str, Any]:
    """Every mode on every recorded prompt; ``report`` is called with a line when a prompt is through."""
    texts, ends, names = recording.texts, setup.ends, [tier.name for tier in setup.config.tiers]
    prompts, params = [text.prompt for text in texts], SamplingParams(max_tokens=size.tokens, temperature=0)
    requests = [Request(prompt, replace(params, seed=seed), ends) for seed, prompt in enumerate(prompts)]
    runs = [predicted(setup.tiers(), requests, mode, size) for mode in modes(names, setup.drafters)]
    with Server.start(setup.values, port=0, num_gpus=setup.num_gpus) as server, Client(server.address) as client:
        for run in runs:  # links and leases exist, and the planner knows what pays
            answer(client, prompts[0], replace(params, max_tokens=warm_up(run.mode, size), seed=len(prompts)), run.mode)
        for number, request in enumerate(requests):
            for run in runs:
                begin = time.perf_counter()
                completion = answer(client, request.prompt, shortened(request, run.mode, size).params, run.mode)
                run.seconds.append(time.perf_counter() - begin)
                run.texts.append(completion.token_ids)
                run.full_passes += completion.stats.full_passes
            speeds = ", ".join(f"{run.mode.name} {run.speed([number]):.2f}" for run in runs)
            report(f"{number + 1}/{len(prompts)} {texts[number].category}: {speeds} tokens/s")
    return figures(setup, runs, texts) | {"agreement": agreement(recording, names)}


def answer(client: Client, prompt: Sequence[int], params: SamplingParams, mode: Mode) -> Any:
    return client.generate(list(prompt), params, mode.speculation, isolated())


def predicted(tiers: Sequence[SimTier], requests: Sequence[Request], mode: Mode, size: Size) -> Run:
    """What the simulator says."""
    fitting = [shortened(request, mode, size) for request in requests]
    return Run(mode, simulated(tiers, fitting, mode.speculation, warm_up(mode, size)))


def shortened(request: Request, mode: Mode, size: Size) -> Request:
    """The full tier alone always takes as long for a token, and is given fewer."""
    return replace(request, params=replace(request.params, max_tokens=size.alone)) if mode is ALONE else request


def warm_up(mode: Mode, size: Size) -> int:
    """Tokens of the first answer; the full tier alone has nothing to learn."""
    return min(WARM_ALONE, size.warm_up) if mode is ALONE else size.warm_up


def figures(setup: Setup, runs: Sequence[Run], texts: Sequence[RecordedText]) -> dict[str, Any]:
    """Speeds, ratios, what a pass alone takes beside the device, and whether all texts are those of the simulator."""
    by_name = {run.mode.name: run for run in runs}
    alone = by_name[ALONE.name]
    kinds: dict[str, list[int]] = {}
    for number, text in enumerate(texts):
        kinds.setdefault(text.category, []).append(number)
    per_token = sum(alone.seconds) / sum(map(len, alone.texts))
    return {
        "same_text": all(_recorded(run, texts) and tuple(run.texts) == run.expected.texts for run in runs),
        "overhead_ms": round((per_token - setup.full_pass_s) * 1e3, 2),
        "modes": {name: run.figures for name, run in by_name.items()},
        "measured": ratios({name: run.speed() for name, run in by_name.items()}),
        "by_category": {
            kind: ratios({name: run.speed(which) for name, run in by_name.items()}) for kind, which in kinds.items()
        },
        "simulated": ratios({name: run.expected.tokens_per_second for name, run in by_name.items()}),
    }


def _recorded(run: Run, texts: Sequence[RecordedText]) -> bool:
    """Whether all answers are what the full model wrote when it was recorded, as far as they go."""
    return all(output == text.output[: len(output)] for output, text in zip(run.texts, texts, strict=True))


def agreement(recording: Recording, names: Sequence[str]) -> dict[str, float]:
    """Share of positions where a tier's own token is that of a tier above it."""
    pairs = itertools.combinations(range(len(names)), 2)
    return {f"{names[i]} → {names[j]}": round(recording.shared(i, j), 3) for i, j in pairs}


def ratios(speeds: Mapping[str, float]) -> dict[str, float]:
    """Of the best pair, of three tiers if they ran, and of those that the planner chooses."""
    alone, auto = speeds[ALONE.name], speeds[AUTO.name]
    pair = max(speed for mode, speed in speeds.items() if mode.startswith(PAIR))
    ratios = {
        "auto_vs_best": auto / max(speed for mode, speed in speeds.items() if mode != AUTO.name),
        "auto_vs_alone": auto / alone,
        "pair_vs_alone": pair / alone,
    }
    if (three := speeds.get(THREE)) is not None:
        ratios |= {"three_vs_alone": three / alone, "three_vs_pair": three / pair}
    return {name: round(value, 3) for name, value in ratios.items()}


def headline(results: Mapping[str, Any]) -> dict[str, Any]:
    """Ratios that were measured; least, median and most of what speeds are over simulated ones, the planner's apart."""
    off = [mode["measured_over_simulated"] for name, mode in results["modes"].items() if name != AUTO.name]
    whole = results["measured"] | {"measured_over_simulated": [min(off), round(median(off), 3), max(off)]}
    return {"all": whole, **results["by_category"], "agreement": results["agreement"]}


def table(results: Mapping[str, Any]) -> Table:
    columns = ("mode", "tokens/s", "simulated", "measured over simulated", "tokens a full pass", "simulated")
    result = Table(*columns, title=f"One request; a pass alone takes {results['overhead_ms']} ms more than the device")
    for name, mode in results["modes"].items():
        result.add_row(name, *(f"{value:g}" for value in mode.values()))
    return result
