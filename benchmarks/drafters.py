"""Every drafter of the family beside every other, alone and with tiers below: accepted length and speed.

    make bench-drafters

Modes take turns on every prompt, at three temperatures, one request at a time, in the library of this process. No request knows
another's text. The full model alone is there twice: how far ``alone, again`` is from 1 says how well all figures are known.
Loads of many requests are `benchmarks.never_slower`'s. All modes must give the same text, else the run fails. The last line is
one JSON document.
"""

import asyncio
import random
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from math import prod
from statistics import median
from typing import Any

from rich.box import SIMPLE
from rich.table import Table

from benchmarks.document import console, finish, parsed, parser, stamp
from benchmarks.turns import AGAIN, ALONE, AUTO, Cell, Mode, Size, Stream, at, entries, in_turns, same_text
from cascade import family
from cascade.draft import NO_DRAFT
from cascade.drafters import TEXT, DrafterSpec, make
from cascade.drafters.matching import Matcher
from cascade.local import Cascade
from cascade.params import Handling, SamplingParams, Speculation
from cascade.scorer import Scored

QUICK = Size(tokens=8, temperatures=(0.0,))
LOWER = family.NAMES[:-1]
INSIDE = tuple(kind for kind in TEXT if kind != "corpus")  # which needs a user's own texts
CHAINS = (
    *((kind,) for kind in (*INSIDE, *LOWER)),
    LOWER,
    ("suffix", LOWER[0]),
)
NAMED = tuple(Mode(" + ".join(chain), Speculation(tiers=chain)) for chain in CHAINS)
MODES = (ALONE, AGAIN, AUTO, *NAMED)
FIGURES = ("mode", "category", "tokens_per_second", "speed_up", "tokens_per_full_pass")  # that are kept of a cell
CONTEXT, GUESSED, VOCAB = 8192, 2000, 500  # of a text whose guesses are timed; few words, so that there is much to find


@contextmanager
def family_in_process() -> Iterator[Stream]:
    """A cascade with what is on if nobody says anything, and one with all drafters inside tiers."""
    with ExitStack() as stack:
        default, plain = (stack.enter_context(cascade) for cascade in (Cascade.demo(), Cascade.demo(drafter=INSIDE)))

        def stream(ids: list[int], params: SamplingParams, speculation: Speculation, handling: Handling) -> Any:
            chosen = default if speculation in (ALONE.speculation, AUTO.speculation) else plain
            return chosen.astream(ids, params, speculation, handling)

        yield stream


def kept_of(measured: Mapping[str, Sequence[Cell]]) -> list[dict[str, Any]]:
    """What is kept of each mode, kind of prompt and all kinds together, and temperature."""
    return [
        {key: round(entry[key], 3) if isinstance(entry[key], float) else entry[key] for key in FIGURES}
        | {"temperature": temperature}
        for temperature, cells in measured.items()
        for entry in entries(cells)
    ]


def head(kept: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Speed and tokens a full pass of each mode, and which of those that are named is the best: by the product over all
    temperatures.

    Speed is the median over kinds of prompts: a machine that stands still for a second spoils one of them.
    """
    drafters: dict[str, dict[str, dict[str, float]]] = {mode.name: {} for mode in MODES if mode is not ALONE}
    for entry in kept:
        if entry["category"] == "all" and entry["mode"] in drafters:
            same = [
                other
                for other in kept
                if all(other[key] == entry[key] for key in ("mode", "temperature")) and other is not entry
            ]
            speed_up = median(other["speed_up"] for other in same)
            figures = {"speedup": round(speed_up, 3), "accepted_len": entry["tokens_per_full_pass"]}
            drafters[entry["mode"]][entry["temperature"]] = figures
    best = max((mode.name for mode in NAMED), key=lambda name: prod(entry["speedup"] for entry in drafters[name].values()))
    return {"drafters": drafters, "best": best}


def table(kept: Sequence[Mapping[str, Any]], temperature: str) -> Table:
    """Speed over the full model alone, by kind of prompt; * is the best of a column."""
    here = [entry for entry in kept if entry["temperature"] == temperature and entry["mode"] != ALONE.name]
    kinds = dict.fromkeys(entry["category"] for entry in here)
    most = {kind: max(entry["speed_up"] for entry in here if entry["category"] == kind) for kind in kinds}
    result = Table("mode", *kinds, "a pass", title=f"Over alone, {temperature}", box=SIMPLE)
    for mode in dict.fromkeys(entry["mode"] for entry in here):
        row = [entry for entry in here if entry["mode"] == mode]
        shown = (f"{entry['speed_up']:.2f}{'*' if entry['speed_up'] == most[entry['category']] else ''}" for entry in row)
        result.add_row(mode, *shown, f"{row[-1]['tokens_per_full_pass']:.2f}")
    return result


def guess_cost(kind: str) -> dict[str, Any]:
    """Microseconds a token that a drafter without a model takes, and bytes a position of the text."""
    [drafter] = make([DrafterSpec(kind)], [kind], None)
    guesser, chance = drafter.begin(""), random.Random(1)
    text = [chance.randrange(VOCAB) for _ in range(CONTEXT)]
    guesser.guess(text, 0, 16)
    times: list[float] = []
    for _ in range(GUESSED):
        last = text[-1]
        text.append(chance.randrange(VOCAB))
        begin = time.perf_counter()
        guesser.observe(last, NO_DRAFT, Scored(text[-1:]))
        guesser.guess(text, len(text) - 1, 16)
        times.append(time.perf_counter() - begin)
    held = round(guesser.own.nbytes / len(text), 1) if isinstance(guesser, Matcher) else None
    return {"us_a_token": round(median(times) * 1e6, 1), "bytes_a_position": held}


def main(arguments: Sequence[str] | None = None) -> None:
    chosen = parsed(parser("drafters", "Every drafter beside every other."), arguments)
    size = QUICK if chosen.quick else Size()
    measured: dict[str, Sequence[Cell]] = {}
    with family_in_process() as stream:
        for temperature in size.temperatures:
            measured[at(temperature)] = asyncio.run(in_turns(stream, MODES, size, temperature))
            console.print(table(kept_of(measured), at(temperature)))
    kept = kept_of(measured)
    costs = {kind: guess_cost(kind) for kind in INSIDE}
    console.print("Guesses without a model:", costs)
    same = all(map(same_text, measured.values()))
    finish({"head": head(kept), "cost": costs, "same_text": same} | stamp() | {"cells": kept}, head(kept), chosen.results)


if __name__ == "__main__":
    main()
