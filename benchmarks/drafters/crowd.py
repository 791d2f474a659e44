"""Many requests at once, of all kinds of prompts together: clients that ask again as soon as they are answered."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from benchmarks.drafters.report import WHOLE
from benchmarks.trees.cells import level_load, rotated
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
    tokens: int = 64  # of an answer
    round_s: float = 2.5
    rounds: int = 2  # of each mode, behind one that does not count

    def num_rounds(self, modes: int) -> int:
        """Of all modes."""
        return modes * (1 + self.rounds)


async def measure(
    ask: Ask, modes: Sequence[Mode], prompts: Sequence[Prompt], temperature: float, size: Crowd, step: Callable[[], object]
) -> list[Cell]:
    """One cell for each mode; ``step`` is called after each round. Modes take turns, another one first each time."""
    cells = {mode.name: Cell(mode, WHOLE, size.clients) for mode in modes}
    for number in range(-1, size.rounds):
        for mode in rotated(modes, number):

            async def one(seed: int, mode: Mode = mode) -> Completion:
                params = SamplingParams(max_tokens=size.tokens, temperature=temperature, seed=seed, ignore_eos=True)
                return await ask(prompts[seed % len(prompts)].text, params, mode.speculation, stranger())

            speed, answers = await level_load(one, size.clients, size.round_s)
            if number >= 0:
                _count(cells[mode.name], speed, answers)
            step()
    return list(cells.values())


def _count(cell: Cell, speed: float, answers: dict[int, Completion]) -> None:
    """Count a round's answers, with the time that they take at its speed."""
    tokens = sum(len(answer.token_ids) for answer in answers.values())
    cell.tokens += tokens
    cell.seconds += tokens / speed
    cell.requests += len(answers)
    for seed, answer in answers.items():
        cell.texts[str(seed)] = answer.token_ids
        cell.edges.add(answer.stats.edges)
