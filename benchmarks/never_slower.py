"""Whether what the planner chooses is ever slower than the full model alone, with one request at a time and with many.

    make bench-never-slower

Alone and auto take turns through a server as `cascade serve` starts it. At each load a round without drafts comes first, which
does not count. All rounds with drafts do: in the first ones the planner finds out what pays, and those who ask then pay for its
tries. In a round as many clients as there are requests at once ask, and ask again as soon as they are answered; after one and a
half answers each all are broken off. A round that ended with an answer would leave out the reading of the next one, part of
which is done by then. Rounds are short and many, for machines change their speed within seconds. Answers differ in length.
The ratio is that of the seconds that all rounds took; its error comes from the ratios of rounds that followed each other. All
texts must be the same in both modes, as far as they came, else the run fails. The last line is one JSON document.
"""

import asyncio
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rich.table import Table

from benchmarks.crowd import Crowd
from benchmarks.document import console, finish, parsed, parser, stamp
from benchmarks.prompts import chats
from benchmarks.turns import ALONE, AUTO, Stream, at, rotated
from cascade.client import AsyncClient
from cascade.params import SamplingParams
from deployments.ops.launch import Server

MODES = (ALONE, AUTO)
QUIET_S = 0.3  # until requests that were broken off are over


@dataclass(frozen=True, slots=True)
class Size:
    """How much is asked."""

    tokens: int = 48  # of an answer in the mean
    loads: tuple[tuple[int, int], ...] = ((1, 40), (8, 16), (32, 6), (64, 4))  # requests at once, rounds of each mode
    temperatures: tuple[float, ...] = (0.0, 0.7, 1.0)


QUICK = Size(tokens=8, loads=((1, 2), (2, 2)), temperatures=(0.0,))


@dataclass(slots=True)
class Given:
    """What one mode gave at one load."""

    speeds: list[float] = field(default_factory=list)  # tokens per second, one a round
    texts: dict[int, list[int]] = field(default_factory=dict)  # token ids by the request's seed, as far as they ever came


async def measure(stream: Stream, prompts: Sequence[list[int]], size: Size, tell: Callable[[str], object]) -> dict[str, Any]:
    """Figures by temperature and load; ``tell`` is called with a line for each."""
    results: dict[str, Any] = {}
    for temperature in size.temperatures:
        cells = results[at(temperature)] = {}
        params = SamplingParams(max_tokens=size.tokens, temperature=temperature)
        for load, rounds in size.loads:
            modes = {mode.name: Given() for mode in MODES}
            await _round(Crowd(stream, ALONE, params, prompts), load, Given())
            for number in range(rounds):
                for mode in rotated(MODES, number):
                    await _round(Crowd(stream, mode, params, prompts, first=load * number), load, modes[mode.name])
            cell = cells[str(load)] = figures(modes)
            tell(f"{at(temperature)}, {load} at once: auto over alone {cell['ratio']:.3f} ± {cell['error']:.3f}")
    return results


async def _round(clients: Crowd, load: int, given: Given) -> None:
    clients.grow(load)
    given.speeds.append(await clients.rate_of(load * clients.params.max_tokens * 3 // 2))
    await clients.stop()
    for seed, text in clients.texts.items():
        given.texts[seed] = max(given.texts.get(seed, text), text, key=len)
    await asyncio.sleep(QUIET_S)


def figures(modes: Mapping[str, Given]) -> dict[str, Any]:
    """Speeds over all rounds, their ratio with its error, and whether texts are the same."""
    alone, auto = modes[ALONE.name], modes[AUTO.name]
    both = ((alone.texts[seed], auto.texts[seed]) for seed in alone.texts.keys() & auto.texts.keys())
    same = all(own == other for texts in both for own, other in zip(*texts, strict=False))  # as far as both have come
    pairs = [fast / slow for fast, slow in zip(auto.speeds, alone.speeds, strict=True)]
    error = statistics.stdev(pairs) / len(pairs) ** 0.5 if len(pairs) > 1 else 0.0
    speeds = {name: statistics.harmonic_mean(given.speeds) for name, given in modes.items()}  # all rounds have as many tokens
    return {
        "same_text": same,
        "tokens_per_second": {name: round(speed, 1) for name, speed in speeds.items()},
        "ratio": round(speeds[AUTO.name] / speeds[ALONE.name], 3),
        "error": round(error, 3),
        "rounds": len(pairs),
    }


def headline(results: Mapping[str, Any]) -> dict[str, dict[str, float]]:
    """The ratio at each temperature and load."""
    return {temperature: {load: cell["ratio"] for load, cell in loads.items()} for temperature, loads in results.items()}


def table(results: Mapping[str, Any]) -> Table:
    columns = ("temperature", "requests at once", "alone, tokens/s", "auto, tokens/s", "auto over alone")
    result = Table(*columns, title="Never slower")
    for temperature, loads in results.items():
        for load, cell in loads.items():
            speeds = [f"{speed:.1f}" for speed in cell["tokens_per_second"].values()]
            result.add_row(temperature, load, *speeds, f"{cell['ratio']:.2f} ± {cell['error']:.2f}")
    return result


def serve(size: Size) -> dict[str, Any]:
    """Figures of a server."""
    with Server.start(None, port=0) as server:

        async def ask() -> dict[str, Any]:
            async with AsyncClient(server.address) as client:
                return await measure(client.stream, chats(1), size, console.print)

        return asyncio.run(ask())


def main(arguments: Sequence[str] | None = None) -> None:
    chosen = parsed(parser("never_slower", "The planner beside no drafts."), arguments)
    results = serve(QUICK if chosen.quick else Size())
    console.print(table(results))
    finish({"head": headline(results), "loads": results} | stamp(), headline(results), chosen.results)


if __name__ == "__main__":
    main()
