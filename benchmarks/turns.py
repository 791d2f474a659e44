"""Modes that take turns on every prompt, what they gave, and how their figures are named."""

import asyncio
import itertools
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeAlias

from benchmarks.asked import by_category, chat_ids
from cascade import family
from cascade.answer import Completion
from cascade.bench.load import rotated
from cascade.bench.measure import EdgeTotals, Mode, stranger
from cascade.engine.tokenizer import Tokenizer
from cascade.params import Handling, SamplingParams, Speculation

Text: TypeAlias = tuple[int, ...]  # token ids
Ask: TypeAlias = Callable[[list[int], SamplingParams, Speculation, Handling], Awaitable[Completion]]

ALONE = Mode("alone", Speculation("off"))
AGAIN = Mode("alone, again", Speculation("off"))  # the same a second time: how far it is from 1 says how well all are known
AUTO = Mode("auto", Speculation())


@dataclass(frozen=True, slots=True)
class Question:
    """A prompt as a chat, in token ids, and its kind."""

    ids: list[int]
    category: str


def questions(count: int | None) -> tuple[Question, ...]:
    """The first ``count`` built-in prompts of each category, all if ``None``, for the family."""
    tokenizer = Tokenizer.from_pretrained(family.paths()[-1])
    return tuple(Question(chat_ids(tokenizer, prompt.text), prompt.category) for prompt in by_category(count))


@dataclass(slots=True)
class Answers:
    """What one mode gave, one entry for each answer."""

    mode: Mode
    categories: list[str] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)  # from asking to the last token
    passes: list[int] = field(default_factory=list)  # of the full tier
    texts: list[Text] = field(default_factory=list)
    edges: EdgeTotals = field(default_factory=EdgeTotals)

    def add(self, category: str, seconds: float, completion: Completion) -> None:
        """Count an answer."""
        self.categories.append(category)
        self.seconds.append(seconds)
        self.passes.append(completion.stats.full_passes)
        self.texts.append(completion.token_ids)
        self.edges.add(completion.stats.edges)

    def speed(self, category: str | None = None) -> float:
        """Tokens per second of all answers, or of those to one kind of prompt."""
        chosen = self._of(category)
        return sum(len(self.texts[i]) for i in chosen) / sum(self.seconds[i] for i in chosen)

    def tokens_per_pass(self, category: str | None = None) -> float:
        """Of the full tier."""
        chosen = self._of(category)
        return sum(len(self.texts[i]) for i in chosen) / max(1, sum(self.passes[i] for i in chosen))

    def _of(self, category: str | None) -> list[int]:
        return [i for i, kind in enumerate(self.categories) if category in (None, kind)]


def at(temperature: float) -> str:
    """The name of a temperature in documents: ``t0``, ``t0.7``, ``t1.0``."""
    return f"t{temperature:.1f}" if temperature else "t0"


async def in_turns(
    ask: Ask, modes: Sequence[Mode], asked: Sequence[Question], params: SamplingParams, tell: Callable[[str], object]
) -> dict[str, Answers]:
    """Every mode on every prompt, by its name, after one prompt that does not count; seeds number the prompts.

    No prompt is known from another mode. ``tell`` is called with a line when a prompt is through.
    """
    found = {mode.name: Answers(mode) for mode in modes}
    for number in range(-1, len(asked)):
        question, own = asked[max(0, number)], replace(params, seed=max(0, number))
        for mode in rotated(modes, number):
            begin = time.perf_counter()
            completion = await ask(question.ids, own, mode.speculation, stranger())
            if number >= 0:
                found[mode.name].add(question.category, time.perf_counter() - begin, completion)
        if number >= 0:
            tell(f"{at(params.temperature)} {number + 1}/{len(asked)} {question.category}: {_last(found)}")
    return found


def _last(found: dict[str, Answers]) -> str:
    """What each mode gave of the last prompt."""
    return ", ".join(f"{name} {len(one.texts[-1]) / one.seconds[-1]:.0f}" for name, one in found.items()) + " tokens/s"


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


def same_text(modes: Iterable[Answers]) -> bool:
    """Whether all modes gave the same texts in the same order."""
    return len({tuple(answers.texts) for answers in modes}) <= 1
