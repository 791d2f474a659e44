"""From what turns gave to the document: tokens per second, the best of an engine, whose text is whose."""

import math
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

from rich.table import Table

from benchmarks.peers.contract import Said

Turns: TypeAlias = Mapping[str, Sequence[Said]]  # of each mode, one a round
REFERENCE = "generate"  # whose text the others' is compared with
ALONE = {"cascade": "cascade_alone", "vllm": "vllm_alone", "llama": "llama_alone", "generate": "generate"}
BF16 = "_bf16"


def engine(mode: str) -> str:
    return mode.partition("_")[0]


def alone(mode: str) -> str:
    """The mode of the same engine and dtype without drafts."""
    return ALONE[engine(mode)] + (BF16 if mode.endswith(BF16) else "")


def speed(turns: Sequence[Said]) -> float:
    """Tokens per second of all answers together, prompts read in that time included."""
    return sum(len(answer.token_ids) for answer in turns) / sum(answer.seconds for answer in turns)


def thrift(turns: Sequence[Said]) -> float | None:
    """Tokens per second that a processor computed, which others on the machine hardly change."""
    computed = sum(answer.processor_s for answer in turns)
    return round(sum(len(answer.token_ids) for answer in turns) / computed, 1) if computed else None


def spread(turns: Sequence[Said], base: Sequence[Said]) -> float | None:
    """Standard error of the speed over that of ``base``, by leaving out one prompt at a time: a share of it.

    ``base`` may be the turns themselves: then it is the error of their speed. ``None`` of one prompt.
    """
    n = len(turns)
    if n < 2 or len(base) != n:
        return None
    own = turns is base

    def left_out(index: int) -> float:
        some = [[answer for i, answer in enumerate(group) if i != index] for group in (turns, base)]
        return math.log(speed(some[0])) - (0.0 if own else math.log(speed(some[1])))

    values = [left_out(index) for index in range(n)]
    mean = sum(values) / n
    return round(math.sqrt((n - 1) / n * sum((value - mean) ** 2 for value in values)), 3)


def paying(turns: Turns) -> set[str]:
    """Modes without drafts, what the planner chooses, and drafted modes that were faster than their engine alone."""
    always = {mode for mode in turns if mode == alone(mode) or mode.startswith("cascade_auto")}
    measured = {mode: answer for mode, answer in turns.items() if alone(mode) in turns}
    return always | {mode for mode, answer in measured.items() if speed(answer) > speed(turns[alone(mode)])}


def cells(turns: Turns, compared: bool) -> dict[str, dict[str, Any]]:
    """All that is known of each mode at one temperature; texts are ``compared`` where they have to be the same."""
    results: dict[str, dict[str, Any]] = {}
    for mode, answers in turns.items():
        base = turns.get(alone(mode))
        results[mode] = {
            "tokens_per_second": round(speed(answers), 1),
            "over_alone": round(speed(answers) / speed(base), 3) if base else None,
            "error": spread(answers, base) if base else None,
            "tokens_per_processor_second": thrift(answers),
            "tokens": sum(len(answer.token_ids) for answer in answers),
            "same_text_as_generate": same_text(answers, turns.get(REFERENCE) if compared else None),
        }
    return results


def same_text(turns: Sequence[Said], reference: Sequence[Said] | None) -> float | None:
    """The share of prompts that are answered with the tokens of `REFERENCE`."""
    if reference is None:
        return None
    same = [list(own.token_ids) == list(other.token_ids) for own, other in zip(turns, reference, strict=True)]
    return round(sum(same) / len(same), 3)


def lossless(turns: Turns) -> bool:
    """Whether all modes of this project wrote the same, of each dtype."""
    for kind in ("", BF16):
        ours = [answers for mode, answers in turns.items() if engine(mode) == "cascade" and mode.endswith(BF16) == bool(kind)]
        texts = [[list(answer.token_ids) for answer in answers] for answers in ours]
        if any(text != texts[0] for text in texts):
            return False
    return True


def headline(results: Mapping[str, Mapping[str, Any]]) -> dict[str, float | None]:
    """Tokens per second in float32: alone, by the planner, and the best mode of each engine, drafts or none."""
    speeds = {mode: cell["tokens_per_second"] for mode, cell in results.items() if not mode.endswith(BF16)}

    def best(name: str) -> float | None:
        return max((value for mode, value in speeds.items() if engine(mode) == name), default=None)

    return {
        "alone": speeds.get("cascade_alone"),
        "auto": speeds.get("cascade_auto"),
        "best": best("cascade"),
        "vllm_alone": speeds.get("vllm_alone"),
        "vllm_best": best("vllm"),
        "llama_alone": speeds.get("llama_alone"),
        "llama_best": best("llama"),
        "generate": speeds.get("generate"),
    }


def best_drafter(results: Mapping[str, Mapping[str, Any]], name: str) -> str | None:
    """The fastest drafted float32 mode of an engine in the cells of one temperature."""
    speeds = {
        mode: cell["tokens_per_second"]
        for mode, cell in results.items()
        if engine(mode) == name and mode != alone(mode) and not mode.endswith(BF16)
    }
    return max(speeds, key=lambda mode: speeds[mode], default=None)


def table(title: str, results: Mapping[str, Mapping[str, Any]]) -> Table:
    """The cells of one temperature, or of one number of requests."""
    columns = {"tokens/s": "tokens_per_second", "over alone": "over_alone", "±": "error", "same text": "same_text_as_generate"}
    grid = Table("mode", *columns, title=title)
    for mode, cell in results.items():
        values = [cell.get(name) for name in columns.values()]
        grid.add_row(mode, *("" if value is None else f"{value:g}" for value in values))
    return grid
