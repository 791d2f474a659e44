"""Modes that take turns on the same prompts, one request at a time, and how their figures are named."""

import asyncio
import itertools
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from benchmarks.asked import by_category, chat_ids
from benchmarks.document import console
from cascade import family
from cascade.answer import Chunk, Completion
from cascade.bench import report
from cascade.bench.load import Cell, Mode, Workload, load
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
    return await load(ask, Workload(tuple(modes), by_category(size.prompts), (1,), params), done=tell)


Ask: TypeAlias = Callable[[list[int], SamplingParams, Speculation, Handling], Awaitable[Completion]]
Text: TypeAlias = tuple[int, ...]  # token ids


@dataclass(frozen=True, slots=True)
class Question:
    """A prompt as a chat, in token ids, and its kind."""

    ids: list[int]
    category: str


def questions(count: int | None) -> tuple[Question, ...]:
    """The first ``count`` built-in prompts of each category, all if ``None``, for the family."""
    tokenizer = Tokenizer.from_pretrained(family.paths()[-1])
    return tuple(Question(chat_ids(tokenizer, prompt.text), prompt.category) for prompt in by_category(count))


async def level_load(
    ask: Callable[[int], Awaitable[Completion]], clients: int, seconds: float
) -> tuple[float, dict[int, Completion]]:
    """Tokens per second while so many clients ask again as soon as they are answered, and all answers by their numbers.

    An answer that goes on after the end counts by the share of its time before it: the load is level as long as it counts.
    """
    numbers, answers, tokens = itertools.count(), dict[int, Completion](), 0.0
    end = time.perf_counter() + seconds

    async def client() -> None:
        nonlocal tokens
        while (asked := time.perf_counter()) < end:
            number = next(numbers)
            answer = answers[number] = await ask(number)
            answered = time.perf_counter()
            tokens += len(answer.token_ids) * (min(answered, end) - asked) / (answered - asked)

    await asyncio.gather(*(client() for _ in range(clients)))
    return tokens / seconds, answers
