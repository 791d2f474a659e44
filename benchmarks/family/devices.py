"""What the pair gives with a device for each model: simulated along what was recorded of it, by the price of passes."""

from collections.abc import Sequence
from typing import Any

from benchmarks.document import console
from benchmarks.family.agreement import recorded
from benchmarks.turns import at
from cascade.engine.model_config import read_config
from cascade.simulation.costs import QWEN3, flat
from cascade.simulation.plan import Traffic, predict, recorded_tiers
from cascade.simulation.recording import Recording

TINY, MEDIUM, FULL = QWEN3
PRICES = {  # of a pass of 0.5B and of one of 1.5B
    "80 and 2 ms": flat(2, 80),
    "80 and 20 ms": flat(20, 80),
    "Qwen3 32B and 0.6B on an H100 each": (TINY, FULL),
    "Qwen3 32B and 4B on an H100 each": (MEDIUM, FULL),
}


def measure(models: Sequence[str], temperatures: Sequence[float]) -> dict[str, Any]:
    """By temperature, below ``cells``; raises `ConfigError` if the agreement at one was not measured here."""
    vocab, names = read_config(models[-1]).get_text_config().vocab_size, ("0.5B", "1.5B")
    cells: dict[str, Any] = {}
    for temperature in temperatures:
        recording = Recording.load(recorded(temperature))
        cells[at(temperature)] = {}
        for price, costs in PRICES.items():
            [prediction] = predict(recorded_tiers(names, costs, recording, vocab), Traffic((1,)), recording)
            [pair] = prediction.prepared.keys() - {"planner"}
            cells[at(temperature)][price] = {
                "over_alone": round(prediction.over_alone(pair), 2),
                "prepared": round(prediction.prepared[pair], 2),
                "planner": round(prediction.over_alone("planner"), 2),
            }
            console.print(at(temperature), price, cells[at(temperature)][price])
    return {"cells": cells}
