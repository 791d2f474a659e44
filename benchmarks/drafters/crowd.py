"""Many requests at once, of all kinds of prompts together: clients that each ask one after another."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from benchmarks.drafters.report import WHOLE
from benchmarks.trees.cells import in_turn, rotated
from benchmarks.trees.systems import Ask
from cascade.answer import Completion
from cascade.bench.load import Cell
from cascade.bench.measure import Mode, stranger
from cascade.bench.prompts import Prompt
from cascade.params import SamplingParams


@dataclass(frozen=True, slots=True)
class Crowd:
    """How much is asked."""

    clients: int = 16
    in_turn: int = 3  # requests of a client in a round, one after another
    tokens: int = 64  # of an answer
    rounds: int = 1  # behind one of a request each, which does not count

    def num_requests(self, modes: int) -> int:
        """Of all rounds."""
        return modes * self.clients * (1 + self.in_turn * self.rounds)


async def measure(
    ask: Ask, modes: Sequence[Mode], prompts: Sequence[Prompt], temperature: float, size: Crowd, step: Callable[[], object]
) -> list[Cell]:
    """One cell for each mode; ``step`` is called after each request. Modes take turns, another one first in each round."""
    cells = {mode.name: Cell(mode, WHOLE, size.clients) for mode in modes}
    for number in range(-1, size.rounds):
        for mode in rotated(modes, max(0, number)):

            async def one(seed: int, mode: Mode = mode) -> tuple[int, Completion]:
                params = SamplingParams(max_tokens=size.tokens, temperature=temperature, seed=seed, ignore_eos=True)
                answer = await ask(prompts[seed % len(prompts)].text, params, mode.speculation, stranger())
                step()
                return seed, answer

            begin = time.perf_counter()
            answers = await in_turn(one, size.clients, 1 if number < 0 else size.in_turn)
            if number >= 0:
                _count(cells[mode.name], answers, time.perf_counter() - begin)
    return list(cells.values())


def _count(cell: Cell, answers: Sequence[tuple[int, Completion]], seconds: float) -> None:
    cell.seconds += seconds
    cell.requests += len(answers)
    for seed, answer in answers:
        cell.tokens += len(answer.token_ids)
        cell.texts[str(seed)] = answer.token_ids
        cell.edges.add(answer.stats.edges)
