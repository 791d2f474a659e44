"""Figures of all cells: a document, its last line, tables."""

from collections.abc import Mapping
from math import prod
from typing import Any, TypeAlias

from rich.box import SIMPLE
from rich.table import Table

from benchmarks.drafters.modes import MODES, NAMED
from benchmarks.turns import ALONE, Answers

WHOLE = "all"  # category of all prompts together
Found: TypeAlias = Mapping[str, Mapping[str, Answers]]  # by temperature and mode


def categories(modes: Mapping[str, Answers]) -> dict[str, str | None]:
    """Names of the kinds of prompts and of all together, and what `Answers` takes for them."""
    return {kind: kind for kind in dict.fromkeys(modes[ALONE.name].categories)} | {WHOLE: None}


def speed_up(modes: Mapping[str, Answers], mode: str, category: str | None) -> float:
    """Over the full model alone."""
    return modes[mode].speed(category) / modes[ALONE.name].speed(category)


def entries(found: Found) -> list[dict[str, Any]]:
    """One for each mode, kind of prompt and temperature."""
    return [
        {
            "mode": mode.name,
            "category": name,
            "temperature": temperature,
            "tokens_per_second": round(modes[mode.name].speed(category), 1),
            "speed_up": round(speed_up(modes, mode.name, category), 3),
            "tokens_per_full_pass": round(modes[mode.name].tokens_per_pass(category), 2),
        }
        for temperature, modes in found.items()
        for mode in MODES
        for name, category in categories(modes).items()
    ]


def head(found: Found) -> dict[str, Any]:
    """Speed and tokens a full pass of each mode, and which of those that are named is the best.

    That is by the product over all temperatures.
    """
    drafters: dict[str, dict[str, dict[str, float]]] = {mode.name: {} for mode in MODES if mode is not ALONE}
    for one in entries(found):
        if one["category"] == WHOLE and one["mode"] in drafters:
            figures = {"speedup": one["speed_up"], "accepted_len": one["tokens_per_full_pass"]}
            drafters[one["mode"]][one["temperature"]] = figures
    best = max((mode.name for mode in NAMED), key=lambda name: prod(one["speedup"] for one in drafters[name].values()))
    return {"drafters": drafters, "best": best}


def table(temperature: str, modes: Mapping[str, Answers]) -> Table:
    """Speed over the full model alone, by kind of prompt; * is the best of a column."""
    kinds = categories(modes)
    result = Table("mode", *kinds, "a pass", title=f"Over alone, {temperature}", box=SIMPLE)
    speeds = {mode.name: [speed_up(modes, mode.name, kind) for kind in kinds.values()] for mode in MODES if mode is not ALONE}
    most = [max(column) for column in zip(*speeds.values(), strict=True)]
    for name, row in speeds.items():
        shown = (f"{speed:.2f}{'*' if speed == best else ''}" for speed, best in zip(row, most, strict=True))
        result.add_row(name, *shown, f"{modes[name].tokens_per_pass():.2f}")
    return result
