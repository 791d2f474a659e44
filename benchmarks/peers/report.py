"""From what turns gave to the document: medians with spread, the best of a group, and whose text is whose."""

import statistics
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

from rich.table import Table

from benchmarks.peers.contract import Said

REFERENCE = "generate"  # whose text the others' is compared with
OURS = "cascade_"
ALONE = ("cascade_alone", "generate", "vllm_alone", "llama_alone")
DRAFTED = {
    "cascade_best": ("cascade_auto", "cascade_drafter"),
    "generate_best": ("generate_assisted", "generate_lookup"),
    "vllm_best": ("vllm_ngram", "vllm_draft"),
    "llama_best": ("llama_draft",),
}


class Cell(NamedTuple):
    """What is asked of every mode in turn."""

    temperature: float
    requests: int  # at once

    @property
    def name(self) -> str:
        """``t0`` or ``t0.8``."""
        return f"t{self.temperature:g}"


Turns: TypeAlias = Mapping[str, Sequence[Said]]  # of each mode, one a round


def speed(said: Said) -> float:
    """Tokens per second of all requests together, prompts read in that time included."""
    return sum(map(len, said.token_ids)) / said.seconds


def thrift(turns: Sequence[Said]) -> float | None:
    """Median tokens per second that a processor computed, which others on the machine hardly change."""
    thrifts = [sum(map(len, said.token_ids)) / said.processor_s for said in turns if said.processor_s]
    return round(statistics.median(thrifts), 1) if thrifts else None


def spread(turns: Sequence[Said]) -> dict[str, float]:
    """Tokens per second of the slowest round, the median one and the fastest."""
    speeds = sorted(map(speed, turns))
    return {
        "low": round(speeds[0], 1),
        "median": round(statistics.median(speeds), 1),
        "high": round(speeds[-1], 1),
    }


def headline(spreads: Mapping[str, Mapping[str, float]]) -> tuple[dict[str, float], dict[str, str]]:
    """Median tokens per second of full models alone and of the best drafted modes, and which modes these are."""
    speeds = {mode: spreads[mode]["median"] for mode in ALONE if mode in spreads}
    chosen: dict[str, str] = {}
    for name, modes in DRAFTED.items():
        if measured := [mode for mode in modes if mode in spreads]:
            chosen[name] = max(measured, key=lambda mode: spreads[mode]["median"])
            speeds[name] = spreads[chosen[name]]["median"]
    return speeds, chosen


def same_text(turns: Turns) -> dict[str, float]:
    """The share of prompts that each mode answers with the tokens of `REFERENCE`."""
    shares: dict[str, float] = {}
    for mode, said in turns.items():
        if mode != REFERENCE and REFERENCE in turns:
            pairs = zip(_texts(said), _texts(turns[REFERENCE]), strict=True)
            same = [list(own) == list(other) for own, other in pairs]
            shares[mode] = round(sum(same) / len(same), 3)
    return shares


def _texts(turns: Sequence[Said]) -> list[Sequence[int]]:
    return [text for said in turns for text in said.token_ids]


def lossless(cells: Mapping[Cell, Turns]) -> bool:
    """Whether all modes of this project wrote the same, in every cell and round."""
    ours = [[_texts(said) for mode, said in turns.items() if mode.startswith(OURS)] for turns in cells.values()]
    return all(texts == modes[0] for modes in ours for texts in modes)


def figures(cells: Mapping[Cell, Turns]) -> dict[str, Any]:
    """What the document says about one model."""
    parts = ("tokens_per_second", "at_once", "spread", "best", "tokens_per_processor_second", "same_text_as_generate")
    found: dict[str, Any] = {part: {} for part in parts}
    for cell, turns in cells.items():
        spreads = {mode: spread(said) for mode, said in turns.items() if said}
        speeds, chosen = headline(spreads)
        alone = cell.requests == 1
        place = found["tokens_per_second"] if alone else found["at_once"].setdefault(str(cell.requests), {})
        place[cell.name] = speeds
        name = cell.name if alone else f"{cell.name}, {cell.requests} at once"
        found["spread"][name], found["best"][name] = spreads, chosen
        found["tokens_per_processor_second"][name] = {mode: thrift(said) for mode, said in turns.items()}
        if not cell.temperature:
            found["same_text_as_generate"][name] = same_text({mode: said for mode, said in turns.items() if said})
    return found | {"cascade_lossless": lossless(cells)}


def document(models: Mapping[str, Mapping[str, Any]], about: Mapping[str, Any]) -> dict[str, Any]:
    """The embedded model's figures at the top, those of others under their names, then what was measured how."""
    rest = {name: dict(found) for name, found in models.items() if name != "embedded"}
    return {**models.get("embedded", {}), **rest, **about}


def table(name: str, found: Mapping[str, Any]) -> Table:
    """Tokens per second of every mode in every cell: median (slowest to fastest)."""
    grid = Table("mode", *found["spread"], title=f"{name}, tokens per second")
    for mode in dict.fromkeys(mode for spreads in found["spread"].values() for mode in spreads):
        grid.add_row(mode, *(_shown(spreads.get(mode)) for spreads in found["spread"].values()))
    return grid


def _shown(numbers: Mapping[str, float] | None) -> str:
    return "" if numbers is None else f"{numbers['median']:.1f} ({numbers['low']:.0f} to {numbers['high']:.0f})"
