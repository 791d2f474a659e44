"""Whether a head says what its model says, tried on a short text of the model's own.

A head that was loaded wrongly fails silently: its guesses are refused, and all else works. One that nobody has trained agrees
no more often either, so that is no proof. But where the same weights, given other hidden states, agree clearly more often, they
are meant to be given those.
"""

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from cascade.engine.heads.head import Head
from cascade.errors import ModelError
from cascade.params import SamplingParams
from cascade.scorer import Row

if TYPE_CHECKING:
    from cascade.engine.model import Model

log = logging.getLogger(__name__)

LENGTH = 64  # positions
PROMPT = 4  # of them, which the model does not say
TOGETHER = 16  # texts of a pass
CHANCE = 0.05  # share of guesses that may be right by chance
CLEAR = 0.15  # by which another reading must be better
GREEDY = SamplingParams(temperature=0, seed=0)


def probe(model: "Model", source: str) -> float:
    """The share of a head's guesses that are what the model says; raises `ModelError` if another reading is clearly right."""
    reader = model.reader
    assert reader is not None
    text, reads = written(model), reader.head.reads
    agreement = agreement_on(model, text)
    if agreement > CHANCE:
        return agreement
    found = {}
    for other in _readings(reader.head, reader.num_layers):
        reader.set_reads(other)
        found[other] = agreement_on(model, text)
    reader.set_reads(reads)
    best = max(found, key=found.__getitem__, default=reads)
    if found and found[best] > agreement + CLEAR:
        raise ModelError(
            f"The drafter {source!r} reads the hidden states {_list(reads)}, and {agreement:.0%} of its guesses are right: "
            f"of {_list(best)} it would be {found[best]:.0%}, so name those in its config.json"
        )
    if (way := reader.head.otherwise()) is not None:
        with way as words:
            better = agreement_on(model, text)
        if better > agreement + CLEAR:
            raise ModelError(
                f"Of the guesses of the drafter {source!r} {agreement:.0%} are right: with {words} in its config.json "
                f"it would be {better:.0%}"
            )
    log.warning("%.0f %% of the guesses of the drafter %s are right on a text of the model", 100 * agreement, source)
    return agreement


def _list(reads: Sequence[int]) -> str:
    return ", ".join(map(str, reads))


def _readings(head: Head, num_layers: int) -> list[tuple[int, ...]]:
    """Others that may have been meant: layers count from their inputs or from their outputs, or are the usual ones."""
    shifted = [tuple(layer + by for layer in head.reads) for by in (1, -1)]
    usual = [(2, num_layers // 2, num_layers - 3)] if len(head.reads) == 3 else []
    fitting = (one for one in shifted + usual if all(0 <= layer <= num_layers for layer in one))
    return [one for one in dict.fromkeys(fitting) if one != head.reads]


@torch.inference_mode()
def written(model: "Model") -> list[int]:
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
def agreement_on(model: "Model", text: Sequence[int]) -> float:
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
