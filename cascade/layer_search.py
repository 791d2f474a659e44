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


@dataclass(frozen=True, slots=True)
class Found:
    """Layers of a model as a tier."""

    layers: tuple[int, ...]
    num_layers: int  # layers of the whole model
    share: float  # share of the weights that a pass of the whole model reads
    agreement: float  # share of equal positions in the answers that the search did not use


def search(
    source: str,
    prompts: Sequence[Prompt],
    params: SamplingParams,
    shares: Sequence[float],
    trials: int,
    tell: Callable[[str], object] = lambda text: None,
    dtype: str | None = None,
) -> list[Found]:
    """For each of ``shares`` the layers whose pass reads at most that share of the weights, after ``trials`` swaps.

    Answer ``i`` has the seed ``i``. Raises `ModelError` if the model cannot be loaded, `ConfigError` if it writes fewer than
    two answers, or if no layers have such a share.
    """
    seeded = [replace(params, seed=seed) for seed in range(len(prompts))]
    answers = [(text, own) for text, own in zip(written(source, prompts, seeded, dtype), seeded, strict=True) if text[1]]
    if len(answers) < LEAST:
        raise ConfigError(f"{source} wrote {len(answers)} answers: give more prompts")
    model = Model.from_pretrained(source, dtype=dtype)
    whole, each, head = model.weights_read
    total = whole * each + head
    numbers = [int((share * total - head) / each + 1e-9) for share in shares]
    for share, kept in zip(shares, numbers, strict=True):
        if not 0 < kept < whole:
            least, most = ((count * each + head) / total for count in (1, whole - 1))
            raise ConfigError(f"share is {share:g}: some of the {whole} layers take from {least:.2f} to {most:.2f} of a pass")

    def agreement(layers: Sequence[int], texts: Sequence[tuple[Written, SamplingParams]] = answers[::2]) -> float:
        """How often the own token of ``layers`` is the model's."""
        own_tokens = ranked(model.cut(layers), [text for text, _ in texts], [own for _, own in texts])
        pairs = zip(own_tokens, texts, strict=True)
        same = [near[0].token == token for own, (text, _) in pairs for near, token in zip(own, text[1], strict=True)]
        return sum(same) / len(same)

    without: list[float] = []  # the agreement without each layer
    for layer in range(whole):
        tell(f"without layer {layer} of {whole}")
        without.append(agreement([other for other in range(whole) if other != layer]))
    found = []
    for kept in numbers:
        needed = tuple(sorted(sorted(range(whole), key=without.__getitem__)[:kept]))
        right, best = max(((agreement(layers), layers) for layers in (spread(whole, kept), needed)), key=lambda pair: pair[0])
        rng = random.Random(0)
        for trial in range(trials):
            tell(f"{kept} of {whole} layers, swap {trial + 1} of {trials}: {right:.2f}")
            out, new = rng.choice(best), rng.choice([layer for layer in range(whole) if layer not in best])
            other = tuple(sorted({*best, new} - {out}))
            if (share := agreement(other)) >= right:
                best, right = other, share
        found.append(Found(best, whole, (kept * each + head) / total, agreement(best, answers[1::2])))
    return found
