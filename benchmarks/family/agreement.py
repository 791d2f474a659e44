"""How often 0.5B agrees with 1.5B along the answers of 1.5B: by kind of prompt, by place in the answer, by gap and rank."""

from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeAlias

from benchmarks.document import console
from benchmarks.family.models import WORK
from benchmarks.turns import at
from cascade.agreement import agreement, record
from cascade.params import SamplingParams
from cascade.prompts import Prompt
from cascade.simulation.recording import Ranked, Recording

RANKS = 8  # runner-ups that are looked at
PLACES = (0, 1, 2, 4, 8, 16, 32, 64, 128)  # in an answer, bounds of what is counted together
GAPS = (0.0, 0.25, 0.5, 1.0, 2.0, 4.0, 8.0, float("inf"))  # in nats, from an own token to its first runner-up
Case: TypeAlias = tuple[int, Ranked, int]  # a place in an answer, what 0.5B ranks first there, and the right token


def recorded(temperature: float) -> Path:
    """The file in which a measurement leaves the own tokens of both models."""
    return WORK / f"recording-{at(temperature)}.json"


def measure(
    models: Sequence[str], prompts: Sequence[Prompt], tokens: int, temperatures: Sequence[float], dtype: str
) -> dict[str, Any]:
    """By temperature, below ``cells``."""
    cells: dict[str, Any] = {}
    for temperature in temperatures:
        params = SamplingParams(max_tokens=tokens, temperature=temperature, seed=0)
        recording = record(models, prompts, params, dtype, RANKS)
        recording.save(recorded(temperature))
        cells[at(temperature)] = shares(recording)
        console.print(at(temperature), cells[at(temperature)]["kinds"])
    return {"cells": cells}


def shares(recording: Recording) -> dict[str, Any]:
    """Of one temperature. ``ranks``: how often runner-up 1, 2, ... is right where 0.5B is wrong."""
    cases = list(_cases(recording))
    kinds: list[str | None] = [None, *dict.fromkeys(text.category for text in recording.texts)]
    every = [agreement(recording, 0, kind) for kind in kinds]
    return {
        "positions": len(cases),
        "kinds": {kind or "all": round(share.own, 3) for kind, share in zip(kinds, every, strict=True)},
        "after_error": None if every[0].after_error is None else round(every[0].after_error, 3),
        "ranks": [round(share, 3) for share in every[0].runner_ups],
        "places": _between(cases, PLACES, lambda place, ranked: place),
        "gaps": _between(cases, GAPS, lambda place, ranked: ranked[1].gap if len(ranked) > 1 else GAPS[-2]),
    }


def _cases(recording: Recording) -> Iterator[Case]:
    for text in recording.texts:
        for place, (ranked, full) in enumerate(zip(text.ranked[0], text.ranked[-1], strict=True)):
            yield place, ranked, full[0].token


def _between(cases: Sequence[Case], bounds: Sequence[float], key: Callable[[int, Ranked], float]) -> list[dict[str, Any]]:
    """Of the cases between each two bounds: how many, how often 0.5B is right, and how often each runner-up where it is not."""
    counts = []
    for low, high in pairwise(bounds):
        some = [(ranked, token) for place, ranked, token in cases if low <= key(place, ranked) < high]
        if not some:
            continue
        wrong = [([other.token for other in ranked[1:]], token) for ranked, token in some if ranked[0].token != token]
        ranks = [sum(others[rank : rank + 1] == [token] for others, token in wrong) for rank in range(RANKS)]
        counts.append(
            {
                "from": low,
                "positions": len(some),
                "own": round(1 - len(wrong) / len(some), 3),
                "ranks": [round(count / max(1, len(wrong)), 3) for count in ranks],
            }
        )
    return counts
