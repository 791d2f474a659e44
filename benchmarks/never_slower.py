"""Whether what the planner chooses is ever slower than the full model alone, with one request at a time and with many.

    make bench-never-slower

Alone and auto take turns through a server as `cascade serve` starts it. The first round of each load does not count: there the
planner finds out what pays. As many clients as there are requests at once ask again as soon as they are answered, until the
round ends: the load is level all the time. What counts is what came while it lasted; an answer that went on after its end
counts by the share of its time before it. All texts must be the same in both modes, else the run fails. The last line is one
JSON document.
"""

import asyncio
import itertools
import statistics
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from rich.table import Table

from benchmarks.document import console, finish, parsed, parser, stamp
from benchmarks.prompts import chats
from benchmarks.turns import ALONE, AUTO, at
from cascade.answer import Completion
from cascade.bench.load import Mode, isolated, rotated
from cascade.client import AsyncClient
from cascade.params import Handling, SamplingParams, Speculation
from deployments.ops.launch import Server

Ask: TypeAlias = Callable[[list[int], SamplingParams, Speculation, Handling], Awaitable[Completion]]
Text: TypeAlias = tuple[int, ...]  # token ids
MODES = (ALONE, AUTO)


@dataclass(frozen=True, slots=True)
class Size:
    """How much is asked."""

    tokens: int = 64  # of an answer
    rounds: int = 4  # of each mode, after one that does not count
    round_s: float = 6.0
    loads: tuple[int, ...] = (1, 8, 32)  # requests at once
    temperatures: tuple[float, ...] = (0.0, 0.7)


QUICK = Size(tokens=8, rounds=1, round_s=0.5, loads=(1, 2), temperatures=(0.0,))


@dataclass(slots=True)
class Given:
    """What one mode gave at one load."""

    speeds: list[float] = field(default_factory=list)  # tokens per second, one a round
    texts: dict[int, Text] = field(default_factory=dict)  # by the number of the request


async def measure(ask: Ask, asked: Sequence[list[int]], size: Size, tell: Callable[[str], object]) -> dict[str, Any]:
    """Figures by temperature and load; ``tell`` is called with a line for each."""
    found: dict[str, Any] = {}
    for temperature in size.temperatures:
        cells = found[at(temperature)] = {}
        for load in size.loads:
            cell = cells[str(load)] = figures(await _load(ask, asked, temperature, load, size))
            tell(f"{at(temperature)}, {load} at once: auto over alone {cell['ratio']:.3f} ± {cell['error']:.3f}")
    return found


async def _load(ask: Ask, asked: Sequence[list[int]], temperature: float, load: int, size: Size) -> dict[str, Given]:
    found = {mode.name: Given() for mode in MODES}
    for number in range(-1, size.rounds):
        for mode in rotated(MODES, number):
            given = found[mode.name]
            speed, texts = await _round(ask, asked, mode, temperature, load, size)
            if number >= 0:
                given.speeds.append(speed)
            given.texts |= texts
    return found


async def _round(
    ask: Ask, asked: Sequence[list[int]], mode: Mode, temperature: float, load: int, size: Size
) -> tuple[float, dict[int, Text]]:
    """Tokens per second under a level load, and the texts; requests are the same in every round, one after another."""

    async def one(number: int) -> Completion:
        params = SamplingParams(max_tokens=size.tokens, temperature=temperature, seed=number)
        return await ask(asked[number % len(asked)], params, mode.speculation, isolated())

    speed, answers = await level_load(one, load, size.round_s)
    return speed, {number: answer.token_ids for number, answer in answers.items()}


async def level_load(
    ask: Callable[[int], Awaitable[Completion]], clients: int, seconds: float
) -> tuple[float, dict[int, Completion]]:
    """Tokens per second while so many clients ask again as soon as they are answered, and all answers by their numbers.

    An answer that goes on after the end counts by the share of its time before it: the load is level as long as it counts.
    """
    numbers, answers, tokens = itertools.count(), dict[int, Completion](), 0.0
    end = time.perf_counter() + seconds

    async def client() -> None:
        nonlocal tokens
        while (asked := time.perf_counter()) < end:
            number = next(numbers)
            answer = answers[number] = await ask(number)
            answered = time.perf_counter()
            tokens += len(answer.token_ids) * (min(answered, end) - asked) / (answered - asked)

    await asyncio.gather(*(client() for _ in range(clients)))
    return tokens / seconds, answers


def figures(modes: Mapping[str, Given]) -> dict[str, Any]:
    """Mean speeds, their ratio with its standard error, and whether texts are the same."""
    alone, auto = modes[ALONE.name], modes[AUTO.name]
    same = all(alone.texts[number] == auto.texts[number] for number in alone.texts.keys() & auto.texts.keys())
    pairs = [fast / slow for fast, slow in zip(auto.speeds, alone.speeds, strict=True)]
    error = statistics.stdev(pairs) / len(pairs) ** 0.5 if len(pairs) > 1 else 0.0
    return {
        "same_text": same,
        "tokens_per_second": {name: round(statistics.fmean(given.speeds), 1) for name, given in modes.items()},
        "ratio": round(sum(auto.speeds) / sum(alone.speeds), 3),
        "error": round(error, 3),
        "rounds": len(pairs),
    }


def headline(found: Mapping[str, Any]) -> dict[str, dict[str, float]]:
    """The ratio at each temperature and load."""
    return {temperature: {load: one["ratio"] for load, one in loads.items()} for temperature, loads in found.items()}


def table(found: Mapping[str, Any]) -> Table:
    columns = ("temperature", "requests at once", "alone, tokens/s", "auto, tokens/s", "auto over alone")
    result = Table(*columns, title="Never slower")
    for temperature, loads in found.items():
        for load, one in loads.items():
            speeds = [f"{speed:.1f}" for speed in one["tokens_per_second"].values()]
            result.add_row(temperature, load, *speeds, f"{one['ratio']:.2f} ± {one['error']:.2f}")
    return result


def serve(size: Size) -> dict[str, Any]:
    """Figures of a server."""
    with Server.start(None, port=0) as server:

        async def ask() -> dict[str, Any]:
            async with AsyncClient(server.address) as client:
                return await measure(client.generate, chats(1), size, console.print)

        return asyncio.run(ask())


def main(arguments: Sequence[str] | None = None) -> None:
    chosen = parsed(parser("never_slower", "The planner beside no drafts."), arguments)
    found = serve(QUICK if chosen.quick else Size())
    console.print(table(found))
    finish({"head": headline(found), "loads": found} | stamp(), headline(found), chosen.results)


if __name__ == "__main__":
    main()
