"""Searches for the layers of a model that agree best with it at a given share of its pass.

Sets of layers are judged along the model's own answers, by how often their own token is the model's (SWIFT, Xia et al., arXiv
2410.06916, here over whole layers). The search begins with the better of two sets: evenly spread layers, and the layers whose
single removal changes the model most. Then it swaps a random layer that is kept for one that is not, and keeps the swap if it
is no worse. The search uses every second answer; the others measure the agreement of the result.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from cascade.agreement import Written, ranked, written
from cascade.engine.model import Model
from cascade.errors import ConfigError
from cascade.params import SamplingParams
from cascade.prompts import Prompt
from cascade.training.student import spread

LEAST = 2  # answers: one for the search, one to measure the result
Tell = Callable[[str], object]


@dataclass(frozen=True, slots=True)
class Found:
    """Layers of a model as a tier of their own."""

    layers: tuple[int, ...]
    share: float  # weights that a pass reads, as a share of those of the whole model
    agreement: float  # share of positions of answers that the search did not use


class LayerSearch:
    """A model, and its answers to ``prompts`` with ``params``; answer ``i`` has the seed ``i``."""

    def __init__(self, source: str, prompts: Sequence[Prompt], params: SamplingParams, dtype: str | None = None) -> None:
        """Raises `ModelError` if the model cannot be loaded, `ConfigError` if it does not write two answers."""
        seeded = [replace(params, seed=seed) for seed in range(len(prompts))]
        texts = [(text, own) for text, own in zip(written(source, prompts, seeded, dtype), seeded, strict=True) if text[1]]
        if len(texts) < LEAST:
            raise ConfigError(f"{source} wrote {len(texts)} answers: give more prompts")
        self._read, self._judged = texts[::2], texts[1::2]
        self._model = Model.from_pretrained(source, dtype=dtype)
        self.num_layers, self._layer, self._head = self._model.weights_read
        self._alone: list[int] = []  # by layer: how many tokens are right without it

    def find(self, share: float, trials: int, tell: Tell = lambda text: None) -> Found:
        """Layers whose pass reads at most ``share`` of the weights, after ``trials`` swaps; raises `ConfigError` if none do."""
        whole, total = self.num_layers, self.num_layers * self._layer + self._head
        kept = int((share * total - self._head) / self._layer + 1e-9)
        if not 0 < kept < whole:
            least, most = ((count * self._layer + self._head) / total for count in (1, whole - 1))
            raise ConfigError(f"share is {share:g}: some of the {whole} layers take from {least:.2f} to {most:.2f} of a pass")
        best, right = max(((layers, self._right(layers)) for layers in self._beginnings(kept, tell)), key=lambda pair: pair[1])
        rng = random.Random(0)
        for trial in range(trials):
            tell(f"{kept} of {whole} layers, swap {trial + 1} of {trials}: {right / self._positions:.2f}")
            out, new = rng.choice(best), rng.choice([layer for layer in range(whole) if layer not in best])
            other = tuple(sorted({*best, new} - {out}))
            if (count := self._right(other)) >= right:
                best, right = other, count
        return Found(best, (kept * self._layer + self._head) / total, self.agreement(best))

    def agreement(self, layers: Sequence[int]) -> float:
        """How often the own token of these layers is the model's, as a share of positions of the other answers."""
        return self._right(layers, self._judged) / sum(len(text[1]) for text, _ in self._judged)

    def _beginnings(self, kept: int, tell: Tell) -> tuple[tuple[int, ...], tuple[int, ...]]:
        everything = range(self.num_layers)
        for layer in everything[len(self._alone) :]:
            tell(f"without layer {layer} of {self.num_layers}")
            self._alone.append(self._right([other for other in everything if other != layer]))
        needed = sorted(everything, key=lambda layer: self._alone[layer])[:kept]
        return spread(self.num_layers, kept), tuple(sorted(needed))

    @property
    def _positions(self) -> int:
        return sum(len(text[1]) for text, _ in self._read)

    def _right(self, layers: Sequence[int], texts: Sequence[tuple[Written, SamplingParams]] = ()) -> int:
        """How many tokens of ``texts``, by default those for the search, equal the own token of these layers."""
        chosen = texts or self._read
        own_tokens = ranked(self._model.cut(layers), [text for text, _ in chosen], [own for _, own in chosen])
        pairs = zip(own_tokens, chosen, strict=True)
        return sum(near[0].token == token for own, (text, _) in pairs for near, token in zip(own, text[1], strict=True))
