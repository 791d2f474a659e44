"""Whether what the planner chooses is ever slower than the full model alone, with one request at a time and with many.

    make bench-never-slower

Alone and auto take turns through a server as `cascade serve` starts it. The first round of each load does not count: there the
planner finds out what pays. As many clients as there are requests at once ask again as soon as they are answered; then all are
broken off. Tokens are counted from the middle of the first answers on, over a whole number of answers a client. Without drafts
all clients read and write in step: a count that ended with an answer would leave out the reading of the next one, which with
drafts is partly done by then. A slow machine makes a round longer, not smaller. What counts is the median of the ratios of
rounds that followed each other. All texts must be the same in both modes, as far as they came, else the run fails. The last
line is one JSON document.
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
MEDIAN_ERROR = 1.25  # of a median, over the standard error of a mean


@dataclass(frozen=True, slots=True)
class Size:
    """How much is asked."""

    tokens: int = 48  # of an answer
    rounds: int = 4  # of each mode, after one that does not count
    loads: tuple[tuple[int, int], ...] = ((1, 5), (8, 2), (32, 1))  # requests at once, answers of each client that count
    temperatures: tuple[float, ...] = (0.0, 0.7)


QUICK = Size(tokens=8, rounds=1, loads=((1, 2), (2, 2)), temperatures=(0.0,))


@dataclass(slots=True)
class Given:
    """What one mode gave at one load."""

    speeds: list[float] = field(default_factory=list)  # tokens per second, one a round
    texts: dict[int, list[int]] = field(default_factory=dict)  # token ids by the request's seed, as far as they ever came


async def measure(stream: Stream, asked: Sequence[list[int]], size: Size, tell: Callable[[str], object]) -> dict[str, Any]:
    """Figures by temperature and load; ``tell`` is called with a line for each."""
    found: dict[str, Any] = {}
    for temperature in size.temperatures:
        cells = found[at(temperature)] = {}
        params = SamplingParams(max_tokens=size.tokens, temperature=temperature)
        for load, answers in size.loads:
            modes = {mode.name: Given() for mode in MODES}
            for number in range(-1, size.rounds):
                for mode in rotated(MODES, number):
                    await _round(Crowd(stream, mode, params, asked), load, answers, modes[mode.name], counts=number >= 0)
            cell = cells[str(load)] = figures(modes)
            tell(f"{at(temperature)}, {load} at once: auto over alone {cell['ratio']:.3f} ± {cell['error']:.3f}")
    return found


async def _round(clients: Crowd, load: int, answers: int, given: Given, *, counts: bool) -> None:
    whole = load * clients.params.max_tokens
    clients.grow(load)
    await clients.rate_of(whole // 2)
    speed = await clients.rate_of(whole * answers)
    await clients.stop()
    if counts:
        given.speeds.append(speed)
    for seed, text in clients.texts.items():
        given.texts[seed] = max(given.texts.get(seed, text), text, key=len)
    await asyncio.sleep(QUIET_S)


def figures(modes: Mapping[str, Given]) -> dict[str, Any]:
    """Median speeds, the median of the ratios of rounds that followed each other with its error, whether texts are the same."""
    alone, auto = modes[ALONE.name], modes[AUTO.name]
    both = ((alone.texts[seed], auto.texts[seed]) for seed in alone.texts.keys() & auto.texts.keys())
    same = all(one == other for texts in both for one, other in zip(*texts, strict=False))  # as far as both have come
    pairs = [fast / slow for fast, slow in zip(auto.speeds, alone.speeds, strict=True)]
    error = MEDIAN_ERROR * statistics.stdev(pairs) / len(pairs) ** 0.5 if len(pairs) > 1 else 0.0
    return {
        "same_text": same,
        "tokens_per_second": {name: round(statistics.median(given.speeds), 1) for name, given in modes.items()},
        "ratio": round(statistics.median(pairs), 3),
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
                return await measure(client.stream, chats(1), size, console.print)

        return asyncio.run(ask())


def main(arguments: Sequence[str] | None = None) -> None:
    chosen = parsed(parser("never_slower", "The planner beside no drafts."), arguments)
    found = serve(QUICK if chosen.quick else Size())
    console.print(table(found))
    finish({"head": headline(found), "loads": found} | stamp(), headline(found), chosen.results)


if __name__ == "__main__":
    main()
