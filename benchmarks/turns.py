"""Modes that take turns on the same prompts, one request at a time or several, and how their figures are named."""

from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from benchmarks import report
from benchmarks.document import console
from benchmarks.load import Cell, Mode, Workload, load
from benchmarks.prompts import by_category
from cascade import family
from cascade.agreement import chat_ids
from cascade.answer import Chunk
from cascade.engine.tokenizer import Tokenizer
from cascade.params import Handling, SamplingParams, Speculation

Stream: TypeAlias = Callable[[list[int], SamplingParams, Speculation, Handling], AsyncIterator[Chunk]]

ALONE = Mode("alone", Speculation("off"))
AGAIN = Mode("alone, again", Speculation("off"))  # the same a second time: how far it is from 1 says how well all are known
AUTO = Mode("auto", Speculation())


@dataclass(frozen=True, slots=True)
class Size:
    """How much is asked."""

    prompts: int = 1  # of each category
    tokens: int = 64  # of an answer
    temperatures: tuple[float, ...] = (0.0, 0.7, 1.0)
    at_once: tuple[int, ...] = (1,)  # requests


def at(temperature: float) -> str:
    """The name of a temperature in documents: ``t0``, ``t0.7``, ``t1.0``."""
    return f"t{temperature:.1f}" if temperature else "t0"


async def in_turns(stream: Stream, modes: Sequence[Mode], size: Size, temperature: float) -> list[Cell]:
    """Every mode on the family's chats, a cell for each category and mode, alone first; each cell is shown when it is done."""
    tokenizer = Tokenizer.from_pretrained(family.paths()[-1])

    def ask(prompt: str, *how: Any) -> AsyncIterator[Chunk]:
        return stream(chat_ids(tokenizer, prompt), *how)

    def tell(cells: Sequence[Cell]) -> None:
        for cell in cells:
            console.print(at(temperature), report.line(cell, cells), markup=False, soft_wrap=True)

    params = SamplingParams(max_tokens=size.tokens, temperature=temperature, seed=0)
    return await load(ask, Workload(tuple(modes), by_category(size.prompts), size.at_once, params), done=tell)
