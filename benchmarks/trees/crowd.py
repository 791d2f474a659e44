"""Whether the cascade with all that it chooses itself is ever slower than its full model alone, with few requests and many.

Alone and auto take turns. The first seconds of each load do not count: there the planner finds out what pays. As many clients
as there are requests at once ask again as soon as they are answered, until the round ends: the load is level all the time. What
counts is what came while it lasted; an answer that went on behind its end counts by the share of its time before it.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from rich.table import Table

from benchmarks.trees.cells import Text, at, level_load, rotated, spread
from benchmarks.trees.systems import Ask
from cascade.answer import Completion
from cascade.bench.measure import PROMPTS, Mode, stranger
from cascade.params import SamplingParams, Speculation

TEMPERATURES = (0.0, 0.8)
LOADS = (1, 4, 16, 64)  # requests at once
MODES = (Mode("alone", Speculation("off")), Mode("auto", Speculation()))


@dataclass(slots=True)
class Given:
    """What one mode gave."""

    speeds: list[float] = field(default_factory=list)  # tokens per second, one a round
    texts: dict[int, Text] = field(default_factory=dict)  # by the number of the request


Cells: TypeAlias = dict[str, dict[str, dict[str, Given]]]  # by temperature, load and mode


@dataclass(frozen=True, slots=True)
class Size:
    """How much is asked."""

    tokens: int  # of an answer
    most: int = 3072  # tokens of the answers to all who ask at once
    warm_up: int = 1  # rounds of each mode that do not count
    rounds: int = 8  # of each mode: with four, a ratio of two modes that are the same was found to be 0.88
    round_s: float = 3.0
    loads: tuple[int, ...] = LOADS


async def measure(ask: Ask, size: Size) -> Cells:
    """Both modes at all temperatures and loads."""
    return {at(t): {str(load): await _load(ask, t, load, size) for load in size.loads} for t in TEMPERATURES}


async def _load(ask: Ask, temperature: float, load: int, size: Size) -> dict[str, Given]:
    found = {mode.name: Given() for mode in MODES}
    for number in range(-size.warm_up, size.rounds):
        for mode in rotated(MODES, number):
            given = found[mode.name]
            speed, texts = await _round(ask, mode, temperature, load, size)
            if number >= 0:
                given.speeds.append(speed)
            given.texts |= texts
    return found


async def _round(ask: Ask, mode: Mode, temperature: float, load: int, size: Size) -> tuple[float, dict[int, Text]]:
    """Tokens per second under a level load, and the texts; requests are the same in every round, one after another."""

    async def one(number: int) -> Completion:
        tokens = min(size.tokens, size.most // load)
        params = SamplingParams(max_tokens=tokens, temperature=temperature, seed=number, ignore_eos=True)
        return await ask(PROMPTS[number % len(PROMPTS)], params, mode.speculation, stranger())

    speed, answers = await level_load(one, load, size.round_s)
    return speed, {number: answer.token_ids for number, answer in answers.items()}


def figures(cells: Cells) -> dict[str, Any]:
    """Speeds, the ratio of their means, and whether texts are the same, by temperature and load."""
    return {temperature: {load: _figures(modes) for load, modes in loads.items()} for temperature, loads in cells.items()}


def _figures(modes: Mapping[str, Given]) -> dict[str, Any]:
    alone, auto = modes["alone"], modes["auto"]
    same = all(alone.texts[number] == auto.texts[number] for number in alone.texts.keys() & auto.texts.keys())
    speeds = {name: spread(given.speeds) for name, given in modes.items()}
    ratio = sum(auto.speeds) / sum(alone.speeds)
    return {"same_text": same, "rounds": len(alone.speeds), "tokens_per_second": speeds, "ratio": round(ratio, 3)}


def headline(found: Mapping[str, Any]) -> dict[str, dict[str, float]]:
    return {temperature: {load: one["ratio"] for load, one in loads.items()} for temperature, loads in found.items()}


def table(system: str, found: Mapping[str, Any]) -> Table:
    columns = ("temperature", "requests at once", "alone, tokens/s", "auto, tokens/s", "auto over alone", "rounds")
    result = Table(*columns, title=f"Never slower, through the {system}")
    for temperature, loads in found.items():
        for load, one in loads.items():
            speeds = [f"{speed['median']:.0f}" for speed in one["tokens_per_second"].values()]
            result.add_row(temperature, load, *speeds, f"{one['ratio']:.2f}", str(one["rounds"]))
    return result
