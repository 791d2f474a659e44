"""Whether the cascade with all that it chooses itself is ever slower than its full model alone, with few requests and many.

Alone and auto take turns. The first seconds of each load do not count: there the planner finds out what pays. As many clients
as there are requests at once each send one after another, so that those who are through early do not wait for the last.
"""

import asyncio
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from rich.table import Table

from benchmarks.trees.cells import Answers, Text, at, rotated, same_text
from benchmarks.trees.systems import Ask
from cascade.bench.measure import PROMPTS, Mode
from cascade.params import Handling, SamplingParams, Speculation

TEMPERATURES = (0.0, 0.8)
LOADS = (1, 4, 16, 64)  # requests at once
MODES = (Mode("alone", Speculation("off")), Mode("auto", Speculation()))

Cells: TypeAlias = dict[str, dict[str, dict[str, Answers]]]  # by temperature, load and mode


@dataclass(frozen=True, slots=True)
class Size:
    """How much is asked."""

    tokens: int  # of an answer
    most: int = 3072  # tokens of all answers of a round
    warm_up_s: float = 3.0
    rounds_s: float = 8.0  # for those that count
    rounds: int = 2  # at least
    in_turn: int = 3  # requests of a client in a round, one after another
    loads: tuple[int, ...] = LOADS


async def measure(ask: Ask, size: Size) -> Cells:
    """Both modes at all temperatures and loads."""
    return {at(t): {str(load): await _load(ask, t, load, size) for load in size.loads} for t in TEMPERATURES}


async def _load(ask: Ask, temperature: float, load: int, size: Size) -> dict[str, Answers]:
    found = {mode.name: Answers() for mode in MODES}
    warm = time.perf_counter() + size.warm_up_s
    number = 0
    while not number or time.perf_counter() < warm:
        for mode in MODES:
            await _together(ask, mode, temperature, load, size)
        number += 1
    end, number = time.perf_counter() + size.rounds_s, 0
    while number < size.rounds or time.perf_counter() < end:
        for mode in rotated(MODES, number):
            begin = time.perf_counter()
            texts = await _together(ask, mode, temperature, load, size)
            answers = found[mode.name]
            answers.speeds.append(sum(map(len, texts)) / (time.perf_counter() - begin))
            answers.texts += texts
        number += 1
    return found


async def _together(ask: Ask, mode: Mode, temperature: float, load: int, size: Size) -> list[Text]:
    """All clients of a round at once, with the same requests in every round."""
    handling = Handling(cache_salt=f"{time.perf_counter_ns()}")  # so that no prompt is known to any mode

    async def client(number: int) -> list[Text]:
        texts: list[Text] = []
        for seed in range(number, load * size.in_turn, load):
            tokens = min(size.tokens, size.most // load)
            params = SamplingParams(max_tokens=tokens, temperature=temperature, seed=seed, ignore_eos=True)
            texts.append((await ask(PROMPTS[seed % len(PROMPTS)], params, mode.speculation, handling)).token_ids)
        return texts

    return [text for texts in await asyncio.gather(*map(client, range(load))) for text in texts]


def figures(cells: Cells) -> dict[str, Any]:
    """Speeds, the ratio of their medians, and whether texts are the same, by temperature and load."""
    return {temperature: {load: _figures(modes) for load, modes in loads.items()} for temperature, loads in cells.items()}


def _figures(modes: Mapping[str, Answers]) -> dict[str, Any]:
    spreads = {name: answers.spread for name, answers in modes.items()}
    ratio = spreads["auto"]["median"] / spreads["alone"]["median"]
    rounds = len(modes["alone"].speeds)
    return {"same_text": same_text(modes.values()), "rounds": rounds, "tokens_per_second": spreads, "ratio": round(ratio, 3)}


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
