"""How often 0.5B says what 1.5B says, along the answers of 1.5B: by kind of prompt, by place in the answer, by gap and rank."""

from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import Any, TypeAlias

from benchmarks.document import console
from benchmarks.turns import at
from cascade.agreement import agreement, record
from cascade.params import SamplingParams
from cascade.prompts import Prompt
from cascade.simulation.recording import Recording, Said

RANKS = 8  # runner-ups that are looked at
PLACES = (0, 1, 2, 4, 8, 16, 32, 64, 128)  # in an answer, bounds of what is counted together
GAPS = (0.0, 0.25, 0.5, 1.0, 2.0, 4.0, 8.0, float("inf"))  # in nats, from an own token to its first runner-up
Case: TypeAlias = tuple[int, Said, int]  # a place in an answer, what 0.5B says there, and the right token


def measure(
    models: Sequence[str], prompts: Sequence[Prompt], tokens: int, temperatures: Sequence[float], dtype: str
) -> dict[str, Any]:
    """By temperature, below ``cells``."""
    found: dict[str, Any] = {}
    for temperature in temperatures:
        params = SamplingParams(max_tokens=tokens, temperature=temperature, seed=0)
        found[at(temperature)] = shares(record(models, prompts, params, dtype, RANKS))
        console.print(at(temperature), found[at(temperature)]["kinds"])
    return {"cells": found}


def shares(recording: Recording) -> dict[str, Any]:
    """Of one temperature. ``ranks``: how often runner-up 1, 2, ... is right where 0.5B is wrong."""
    cases = list(_cases(recording))
    kinds: list[str | None] = [None, *dict.fromkeys(text.category for text in recording.texts)]
    every = [agreement(recording, 0, kind) for kind in kinds]
    return {
        "positions": len(cases),
        "kinds": {kind or "all": round(one.own, 3) for kind, one in zip(kinds, every, strict=True)},
        "after_error": None if every[0].after_error is None else round(every[0].after_error, 3),
        "ranks": [round(share, 3) for share in every[0].runner_ups],
        "places": _between(cases, PLACES, lambda place, said: place),
        "gaps": _between(cases, GAPS, lambda place, said: said[1].gap if len(said) > 1 else GAPS[-2]),
    }


def _cases(recording: Recording) -> Iterator[Case]:
    for text in recording.texts:
        for place, (said, full) in enumerate(zip(text.said[0], text.said[-1], strict=True)):
            yield place, said, full[0].token


def _between(cases: Sequence[Case], bounds: Sequence[float], key: Callable[[int, Said], float]) -> list[dict[str, Any]]:
    """Of the cases between each two bounds: how many, how often 0.5B is right, and how often each runner-up where it is not."""
    found = []
    for low, high in pairwise(bounds):
        some = [(said, token) for place, said, token in cases if low <= key(place, said) < high]
        if not some:
            continue
        wrong = [([other.token for other in said[1:]], token) for said, token in some if said[0].token != token]
        ranks = [sum(others[rank : rank + 1] == [token] for others, token in wrong) for rank in range(RANKS)]
        found.append(
            {
                "from": low,
                "positions": len(some),
                "own": round(1 - len(wrong) / len(some), 3),
                "ranks": [round(count / max(1, len(wrong)), 3) for count in ranks],
            }
        )
    return found
