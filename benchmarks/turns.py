"""Modes that take turns on the same prompts, one request at a time or several, and their figures.

Whatever else the machine does slows all modes alike. Each request is a tenant of its own: no mode knows a prompt or a text from
another one.
"""

import asyncio
import contextlib
import itertools
import math
import time
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, TypeAlias, TypeVar, cast

from benchmarks.document import console
from benchmarks.prompts import by_category
from cascade import family
from cascade.agreement import chat_ids
from cascade.answer import Chunk, Completion
from cascade.engine.tokenizer import Tokenizer
from cascade.errors import CascadeError
from cascade.messages import Edge, add_edges
from cascade.params import Handling, SamplingParams, Speculation
from cascade.prompts import Prompt

T = TypeVar("T")
Stream: TypeAlias = Callable[[list[int], SamplingParams, Speculation, Handling], AsyncIterator[Chunk]]


@dataclass(frozen=True, slots=True)
class Mode:
    """One way to serve a request."""

    name: str
    speculation: Speculation


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
        """Mean tokens that a pass of the full tier gave a request; 0 if it told of no pass."""
        passes = sum(answer.completion.stats.full_passes for answer in self.answers)
        return self.tokens / passes if passes else 0.0

    @property
    def edges(self) -> list[Edge]:
        """What happened on each edge in all answers together."""
        edges = (edge for answer in self.answers for edge in answer.completion.stats.edges)
        return list(add_edges({}, edges).values())


def at(temperature: float) -> str:
    """The name of a temperature in documents: ``t0``, ``t0.7``, ``t1.0``."""
    return f"t{temperature:.1f}" if temperature else "t0"


def isolated() -> Handling:
    """For a request that reuses nothing: no keys and values of its prompt, no texts of other requests."""
    return Handling(cache_salt=uuid.uuid4().hex)


def rotated(modes: Sequence[T], turns: int) -> Sequence[T]:
    """The modes with another one first at every turn, so that none is favoured by always coming early or late."""
    first = turns % max(1, len(modes))
    return (*modes[first:], *modes[:first])


async def in_turns(stream: Stream, modes: Sequence[Mode], size: Size, temperature: float) -> list[Cell]:
    """Every mode on the family's chats, a cell for each category and mode, alone first; each cell is shown when it is done."""
    tokenizer, prompts = Tokenizer.from_pretrained(family.paths()[-1]), by_category(size.prompts)
    ids = {prompt.text: chat_ids(tokenizer, prompt.text) for prompt in prompts}
    params, results = SamplingParams(max_tokens=size.tokens, temperature=temperature, seed=0), list[Cell]()

    async def ask(prompt: str, mode: Mode) -> Answered:
        completion = None
        chunks = cast(AsyncGenerator[Chunk, Any], stream(ids[prompt], params, mode.speculation, isolated()))
        async with contextlib.aclosing(chunks):
            async for chunk in chunks:
                completion = chunk.completion or completion
        assert completion is not None, "a stream ends with its completion"
        return Answered(prompt, completion)

    for at_once in size.at_once:
        async for cells in measured(ask, modes, prompts, at_once):
            results += cells
            for cell in cells:
                console.print(at(temperature), line(cell, cells), markup=False, soft_wrap=True)
    return results


async def measured(
    ask: Callable[[str, Mode], Any], modes: Sequence[Mode], prompts: Sequence[Prompt], at_once: int
) -> AsyncIterator[list[Cell]]:
    """The cells of all modes for each category of ``prompts``, after a warm-up of each mode.

    A request that fails is counted in its cell; one that fails while the server warms up raises its `CascadeError`.
    """
    for mode in modes:
        await asyncio.gather(*(ask(prompt.text, mode) for prompt in itertools.islice(itertools.cycle(prompts), at_once)))
    for turn, category in enumerate(dict.fromkeys(prompt.category for prompt in prompts)):
        cells = [Cell(mode, category, at_once) for mode in modes]
        for cell in rotated(cells, turn):
            await _send(ask, [prompt.text for prompt in prompts if prompt.category == category], cell)
        yield cells


async def _send(ask: Callable[[str, Mode], Any], prompts: Sequence[str], cell: Cell) -> None:
    """Every prompt at least once, as many for each of the clients that ask at once."""
    number = math.ceil(len(prompts) / cell.concurrency) * cell.concurrency
    waiting = itertools.islice(itertools.cycle(prompts), number)

    async def client() -> None:
        for prompt in waiting:
            try:
                cell.answers.append(await ask(prompt, cell.mode))
            except CascadeError as error:
                cell.errors.append(f"{type(error).__name__}: {error}")

    begin = time.perf_counter()
    async with asyncio.TaskGroup() as clients:
        for _ in range(cell.concurrency):
            clients.create_task(client())
    cell.seconds += time.perf_counter() - begin


# figures


def same_text(cells: Sequence[Cell]) -> bool:
    """Whether every prompt got the same tokens in all cells."""
    texts: dict[str, set[tuple[int, ...]]] = {}
    for cell in cells:
        for answer in cell.answers:
            texts.setdefault(answer.prompt, set()).add(answer.completion.token_ids)
    return all(len(different) == 1 for different in texts.values())


def entries(cells: Sequence[Cell]) -> list[dict[str, Any]]:
    """All cells, then those of all categories together, as JSON; keys name the units."""
    whole: dict[tuple[int, str], Cell] = {}
    for cell in cells:
        total = whole.setdefault((cell.concurrency, cell.mode.name), Cell(cell.mode, "all", cell.concurrency))
        total.answers += cell.answers
        total.errors += cell.errors
        total.seconds += cell.seconds
    every = [*cells, *whole.values()]
    return [_entry(cell, every) for cell in every]


def speed_up(cell: Cell, cells: Sequence[Cell]) -> float:
    """Tokens per second of a cell over those of the first mode on the same category and concurrency; 0 if that has none."""
    base = next(c for c in cells if (c.category, c.concurrency) == (cell.category, cell.concurrency))
    return cell.tokens_per_second / base.tokens_per_second if base.tokens_per_second else 0.0


def line(cell: Cell, cells: Sequence[Cell]) -> str:
    """One cell in one line: its speed, and how many tokens a pass of the full tier gave."""
    return (
        f"{cell.concurrency:>7}  {cell.category:<14} {cell.tokens_per_second:>8.1f}  {speed_up(cell, cells):>7.2f}x"
        f"  {cell.tokens_per_full_pass:>6.2f}  {cell.mode.name}"
    )


def _entry(cell: Cell, cells: Sequence[Cell]) -> dict[str, Any]:
    return {
        "mode": cell.mode.name,
        "category": cell.category,
        "concurrency": cell.concurrency,
        "requests": cell.requests,
        "errors": sorted(set(cell.errors)),
        "failed": len(cell.errors),
        "tokens": cell.tokens,
        "seconds": cell.seconds,
        "tokens_per_second": cell.tokens_per_second,
        "speed_up": speed_up(cell, cells),
        "tokens_per_full_pass": cell.tokens_per_full_pass if cell.edges else None,
        "edges": [
            asdict(edge)
            | {"drafter": edge.drafter or None, "mean_accepted_len": edge.mean_accepted_len}
            | {"acceptance": edge.accepted / edge.proposed if edge.proposed else None}
            for edge in cell.edges
        ],
    }
