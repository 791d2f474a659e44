"""A published pair, Qwen2.5-Coder-Instruct 0.5B and 1.5B in bfloat16, on this machine's processor.

    make family bench-family

Parts: ``agreement`` of 0.5B with 1.5B along its answers; ``devices``: what follows from it with a device for each, simulated;
``modes``: one request at a time, every way to draft in turns; ``vllm``, ``llama``: the same beside vLLM and llama.cpp, which
draft with the same pair; ``long`` prompts. All modes must give the same text. A part that is not run keeps what an earlier run
gave, a temperature what one on the same processor gave. The last line is JSON; the whole document is kept in
``benchmarks/results/family.json``.
"""

import argparse
import json
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.document import RESULTS, dated, finish, keep, parsed, parser, shape, stamp
from benchmarks.family import agreement, devices, long, speed
from benchmarks.family.models import MODEL, PAIR, WORK, name, path
from benchmarks.family.prompts import human_eval, prompts_of
from cascade import family

PARTS = ("agreement", "devices", *speed.CONTESTS, "long")
TEMPERATURES = (0.0, 0.7, 1.0)
SIZES = {"agreement": (8, 1, 64), "long": (3, 0, 48)}  # problems of HumanEval, chats of each kind, tokens of an answer at most
SIZES["devices"] = SIZES["agreement"]  # whose recordings it reads
SPEED = 6, 0, 64  # of the other parts
QUICK = 1, 1, 8


def options(arguments: Sequence[str] | None) -> argparse.Namespace:
    made = parser("family", "A published pair.", PARTS)
    made.add_argument("--minutes", type=float, default=5, help="of each contest, after which no round begins (%(default)g)")
    made.add_argument(
        "--temperatures", type=float, nargs="+", default=TEMPERATURES, help="others keep what is known of them (%(default)s)"
    )
    chosen = parsed(made, arguments)
    chosen.results = chosen.results or (WORK / "quick.json" if chosen.quick else RESULTS / "family.json")
    chosen.only = chosen.only or PARTS
    return chosen


def begun(place: Path, models: Sequence[str]) -> dict[str, Any]:
    """What earlier runs of these models gave."""
    document = {"model": MODEL} | stamp({name(size): shape(source) for size, source in zip(PAIR, models, strict=True)})
    earlier: dict[str, Any] = json.loads(place.read_text(encoding="utf-8")) if place.exists() else {}
    return {**earlier, **document} if earlier.get("family") == document["family"] else document


def main(arguments: Sequence[str] | None = None) -> None:
    chosen = options(arguments)
    models = [path(size) for size in PAIR]
    for part in chosen.only:
        problems, kinds, tokens = QUICK if chosen.quick else SIZES.get(part, SPEED)
        prompts = prompts_of(problems, kinds)
        add = partial(added, chosen.results, models, part, {"prompts": len(prompts), "tokens": tokens})
        if part == "agreement":
            add(agreement.measure(models, prompts, tokens, chosen.temperatures, family.DTYPE))
        elif part == "devices":
            add(devices.measure(models, chosen.temperatures))
        elif part == "long":
            add(long.measure(models, human_eval(), problems, tokens, family.DTYPE))
        else:
            speed.measure(part, prompts, tokens, chosen.temperatures, 60 * chosen.minutes, add)
    document = begun(chosen.results, models)
    finish(document, {part: headline(part, document[part]["cells"]) for part in chosen.only}, chosen.results)


def added(place: Path, models: Sequence[str], part: str, how: Mapping[str, Any], measured: Mapping[str, Any]) -> None:
    """Keep what was measured of a part."""
    document = begun(place, models)
    here = document.get("processors", {}).get(part) == document["processor"]
    cells = (document[part]["cells"] if here else {}) | measured["cells"]
    keep(dated(document | {part: {**how, **measured, "cells": cells}}, [part]), place)


def headline(part: str, cells: dict[str, Any]) -> dict[str, Any]:
    """Of each temperature: agreement by kind, or tokens per second by mode."""
    if part == "agreement":
        return {temperature: cell["kinds"] for temperature, cell in cells.items()}
    if part in ("devices", "long"):
        return cells
    return {key: {mode: cell["tokens_per_second"] for mode, cell in modes.items()} for key, modes in cells.items()}


if __name__ == "__main__":
    main()
