"""Whether a head says what its model says, tried on a short text of the model's own: one loaded wrongly fails silently."""

from collections.abc import Sequence

import torch

from cascade.engine.model import Model
from cascade.params import SamplingParams
from cascade.scorer import Row

LENGTH = 64  # positions
PROMPT = 4  # of them, which the model does not say
TOGETHER = 16  # texts of a pass
GREEDY = SamplingParams(temperature=0, seed=0)


def probe(model: Model) -> float:
    """The share of a head's guesses that are what the model says."""
    return agreement_on(model, written(model))


@torch.inference_mode()
def written(model: Model) -> list[int]:
    """What the model writes after a few tokens."""
    text = [(7919 * place + 1) % model.vocab_size for place in range(PROMPT)]
    store = model.new_cache()
    start = 0
    while len(text) < min(LENGTH, model.context_len):
        [scored] = model.run([Row(store, start, text[start:], 1, GREEDY)])
        start = len(text)
        text += scored.own
    store.free()
    return text


@torch.inference_mode()
def agreement_on(model: Model, text: Sequence[int]) -> float:
    """The share of guesses that the text goes on with: of the next token but one, after each of its tokens from `PROMPT` on."""
    whole, ends = model.new_cache(), range(PROMPT, len(text) - 1)
    model.run([Row(whole, 0, text, 1, GREEDY)])
    right = 0
    for begin in range(0, len(ends), TOGETHER):
        stores = [model.new_cache() for _ in ends[begin : begin + TOGETHER]]
        rows = []
        for end, store in zip(ends[begin:], stores, strict=False):
            store.reserve(end)
            store.reuse(whole, end - 1)
            rows.append(Row(store, end - 1, text[end - 1 : end], 1, GREEDY, guesses=1))
        for row, scored in zip(rows, model.run(rows), strict=True):
            right += scored.draft.tokens[:1] == (text[row.start + 2],)
        for store in stores:
            store.free()
    whole.free()
    return right / max(1, len(ends))
