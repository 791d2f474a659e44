"""How fast requests are answered, one at a time or many at once, mode beside mode in one run.

Modes take turns on every batch of requests, so that whatever else the machine does slows all of them alike. Each request is a
tenant of its own: no mode knows a prompt or a text from another one.
"""

import asyncio
import contextlib
import itertools
import math
import time
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar, cast

from cascade.answer import Chunk, Completion
from cascade.errors import CascadeError
from cascade.messages import Edge, add_edges
from cascade.params import Handling, SamplingParams, Speculation
from cascade.prompts import Prompt

T = TypeVar("T")
AsyncStream = Callable[[str, SamplingParams, Speculation, Handling], AsyncIterator[Chunk]]


def isolated() -> Handling:
    """For a request that reuses nothing: no keys and values of its prompt, no texts of other requests."""
    return Handling(cache_salt=uuid.uuid4().hex)


@dataclass(frozen=True, slots=True)
class Mode:
    """One way to serve a request."""

    name: str
    speculation: Speculation


@dataclass(frozen=True, slots=True)
class Answered:
    """One answer."""

    prompt: str
    completion: Completion


@dataclass(slots=True)
class Cell:
    """The answers of one mode on one category with one number of requests at once."""

    mode: Mode
    category: str
    concurrency: int
    answers: list[Answered] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)  # one for each request that failed
    seconds: float = 0.0  # of the wall clock

    @property
    def requests(self) -> int:
        """How many were sent."""
        return len(self.answers) + len(self.errors)

    @property
    def tokens(self) -> int:
        """Output tokens of all answers."""
        return sum(answer.completion.stats.completion_tokens for answer in self.answers)

    @property
    def tokens_per_second(self) -> float:
        """Of all requests together."""
        return self.tokens / self.seconds if self.seconds else 0.0

    @property
    def tokens_per_full_pass(self) -> float:
        """Mean tokens that a pass of the full tier gave a request."""
        passes = sum(answer.completion.stats.full_passes for answer in self.answers)
        return self.tokens / passes if passes else 0.0

    @property
    def edges(self) -> list[Edge]:
        """What happened on each edge in all answers together."""
        edges = (edge for answer in self.answers for edge in answer.completion.stats.edges)
        return list(add_edges({}, edges).values())


@dataclass(frozen=True, slots=True)
class Workload:
    """What is measured: every mode on every category with every number of requests at once, ``rounds`` times."""

    modes: tuple[Mode, ...]
    prompts: tuple[Prompt, ...]
    concurrency: tuple[int, ...]
    params: SamplingParams
    rounds: int = 1

    @property
    def categories(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(prompt.category for prompt in self.prompts))

    def batch(self, category: str, concurrency: int) -> list[Prompt]:
        """Every prompt of a category at least once, repeated until each of ``concurrency`` clients sends equally many."""
        prompts = [prompt for prompt in self.prompts if prompt.category == category]
        num_requests = math.ceil(len(prompts) / concurrency) * concurrency
        return list(itertools.islice(itertools.cycle(prompts), num_requests))


async def load(
    stream: AsyncStream,
    workload: Workload,
    done: Callable[[Sequence[Cell]], object] = lambda cells: None,
) -> list[Cell]:
    """Send ``workload``, each mode warmed up at each number of requests at once.

    ``done`` is called with the cells of all modes of a category as soon as nothing is added to
    them any more. A request that fails is counted in its cell; one that fails while the server warms up raises its
    `CascadeError`.
    """
    cells = {
        (n, category, mode.name): Cell(mode, category, n)
        for n in workload.concurrency
        for category in workload.categories
        for mode in workload.modes
    }
    turns = 0
    for n in workload.concurrency:
        await _warm_up(stream, workload, n)
        for category in workload.categories:
            for _ in range(workload.rounds):
                for mode in rotated(workload.modes, turns):
                    await _send(stream, workload, cells[n, category, mode.name])
                turns += 1
            done([cells[n, category, mode.name] for mode in workload.modes])
    return list(cells.values())


def joined(cells: Sequence[Cell]) -> list[Cell]:
    """One cell for all categories together, of each mode and number of requests at once; in their order."""
    whole: dict[tuple[int, str], Cell] = {}
    for cell in cells:
        key = (cell.concurrency, cell.mode.name)
        one = whole.setdefault(key, Cell(cell.mode, "all", cell.concurrency))
        one.answers += cell.answers
        one.errors += cell.errors
        one.seconds += cell.seconds
    return list(whole.values())


def same_text(cells: Sequence[Cell]) -> bool:
    """Whether every prompt got the same tokens in all cells."""
    texts: dict[str, set[tuple[int, ...]]] = {}
    for cell in cells:
        for answer in cell.answers:
            texts.setdefault(answer.prompt, set()).add(answer.completion.token_ids)
    return all(len(different) == 1 for different in texts.values())


async def _warm_up(stream: AsyncStream, workload: Workload, concurrency: int) -> None:
    for mode in workload.modes:
        prompts = itertools.islice(itertools.cycle(workload.prompts), concurrency)
        await asyncio.gather(*(_time(stream, prompt.text, workload.params, mode.speculation) for prompt in prompts))


async def _send(stream: AsyncStream, workload: Workload, cell: Cell) -> None:
    """One batch, ``cell.concurrency`` requests at a time."""
    waiting = iter(workload.batch(cell.category, cell.concurrency))

    async def client() -> None:
        for prompt in waiting:
            try:
                cell.answers.append(await _time(stream, prompt.text, workload.params, cell.mode.speculation))
            except CascadeError as error:
                cell.errors.append(f"{type(error).__name__}: {error}")

    begin = time.perf_counter()
    async with asyncio.TaskGroup() as clients:
        for _ in range(cell.concurrency):
            clients.create_task(client())
    cell.seconds += time.perf_counter() - begin


async def _time(stream: AsyncStream, prompt: str, params: SamplingParams, speculation: Speculation) -> Answered:
    completion = None
    async with contextlib.aclosing(cast(AsyncGenerator[Chunk, Any], stream(prompt, params, speculation, isolated()))) as chunks:
        async for chunk in chunks:
            completion = chunk.completion or completion
    assert completion is not None, "a stream ends with its completion"
    return Answered(prompt, completion)


def rotated(modes: Sequence[T], turns: int) -> Sequence[T]:
    """The modes with another one first at every turn, so that none is favoured by always coming early or late."""
    first = turns % max(1, len(modes))
    return (*modes[first:], *modes[:first])
