"""What a head guesses after texts, place after place: each guess under the noise and the parameters of its text."""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from cascade.draft import Draft
from cascade.engine.sampling.own_tokens import own_tokens_and_next, runner_ups
from cascade.engine.sampling.processors import shape_next
from cascade.engine.sampling.state import SequenceState
from cascade.params import SamplingParams
from cascade.scorer import RunnerUp, gap_byte

OFFERED = 1.0  # nats by which a first guess's runner-up may be after it to be offered, too

Step = tuple[int, Sequence[RunnerUp]]  # a guess, and the next one


class Text(NamedTuple):
    """The end of a session's text after a pass; its store holds what the head keeps of all tokens but the last."""

    store: Any
    start: int  # position of tokens[0], the first that the pass read
    tokens: Sequence[int]
    guesses: int  # wanted after it
    params: SamplingParams
    state: SequenceState | None = None  # what its own tokens depend on besides logits, if they do,
    num_new: int = 0  # which the last so many of tokens are not yet part of

    @property
    def end(self) -> int:
        return self.start + len(self.tokens)

    @property
    def shaped(self) -> bool:
        """Whether its own tokens depend on those before them: on guesses, too."""
        return self.state is not None and self.state.alters


class Guesses:
    """The guesses after several texts, which grow together.

    None waits for the host but where own tokens of a text depend on the guesses before them.
    """

    def __init__(self, texts: Sequence[Text]) -> None:
        self.texts = texts
        self.shaped = any(text.shaped for text in texts)
        self._steps: list[tuple[list[int], Tensor]] = []  # texts of a place, and what was chosen there

    @property
    def step(self) -> int:
        """Places after the texts that have guesses."""
        return len(self._steps)

    def choose(self, active: Sequence[int], logits: Tensor) -> Tensor:
        """The next guess ``[n]`` after each of the texts ``active``, of ``logits`` ``[n, vocab_size]``."""
        texts = [self.texts[number] for number in active]
        if any(text.shaped for text in texts):
            parts = logits.split(1)
            logits = torch.cat([self._shape(number, part) for number, part in zip(active, parts, strict=True)])
        chosen = own_tokens_and_next(logits, [(text.params, text.end + self.step, 1) for text in texts], 1)
        self._steps.append((list(active), chosen))
        return chosen[0]

    def choose_all(self, logits: Tensor) -> None:
        """All guesses that are wanted, of ``[texts, places, vocab_size]``: at once, where none depends on those before."""
        num_places = logits.shape[1]
        places = [[number for number, text in enumerate(self.texts) if text.guesses > step] for step in range(num_places)]
        if self.shaped:
            for step, active in enumerate(places):
                self.choose(active, logits[active, step])
            return
        chosen = own_tokens_and_next(logits.flatten(0, 1), [(text.params, text.end, num_places) for text in self.texts], 1)
        together = chosen.unflatten(1, (len(self.texts), num_places))
        self._steps += [(active, together[:, active, step]) for step, active in enumerate(places)]

    def _shape(self, number: int, logits: Tensor) -> Tensor:
        text = self.texts[number]
        if text.state is None or not text.shaped:
            return logits.float()
        before = [int(chosen[0, active.index(number)]) for active, chosen in self._steps]
        new = text.tokens[len(text.tokens) - text.num_new :]
        return shape_next(logits, text.params, text.state, text.end - text.num_new, [*new, *before])

    def drafts(self, sure: Sequence[Tensor] = ()) -> list[Draft]:
        """Those after each text; ``sure`` are nats ``[n]`` for each place, see `drafted`."""
        steps: list[list[Step]] = [[] for _ in self.texts]
        gaps: list[list[float]] = [[] for _ in self.texts]
        for active, chosen in self._steps:
            for number, step in zip(active, steps_of(chosen), strict=True):
                steps[number].append(step)
        for (active, _), nats in zip(self._steps, sure, strict=False):
            for number, gap in zip(active, nats.tolist(), strict=True):
                gaps[number].append(gap)
        return [drafted(*both) for both in zip(steps, gaps, strict=True)]


def steps_of(chosen: Tensor) -> list[Step]:
    """Guesses, each with its runner-up, from what `own_tokens_and_next` says with one of them."""
    rows = chosen.tolist()
    return list(zip(rows[0], runner_ups(rows, 1), strict=True))


def drafted(steps: Sequence[Step], sure: Sequence[float] = ()) -> Draft:
    """Guesses one after another as a draft, with the runner-up of the first as a branch where it is close.

    ``sure`` are nats by which a head knows the guesses to be right, if it says so: -log of the chance that one is not.
    """
    tokens = [token for token, _ in steps]
    parents = list(range(-1, len(steps) - 1))
    gaps = [gap_byte(gap) for gap in sure or [others[0].gap if others else math.inf for _, others in steps]]
    for other in steps[0][1] if steps else ():
        if other.gap < OFFERED:
            tokens.append(other.token)
            parents.append(-1)
            gaps.append(gap_byte(other.gap))
    return Draft(tuple(tokens), bytes(len(tokens)), bytes(gaps), tuple(parents))
