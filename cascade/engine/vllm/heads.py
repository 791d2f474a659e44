"""Heads in the passes of a tier on vLLM: vLLM's proposers run them, but pick own tokens instead of the argmax.

A head's keys and values are further layers of the same blocks, so rollback, forks, copies and prefix reuse need no code. It
reads what a pass has read of each text, each token with its next one, and guesses after the last. If the next token is unknown,
at the end of a chunk, or changes later, by a correction from above, one entry of the head is made with another token. The head
then guesses a little worse.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor

from cascade.draft import Draft
from cascade.drafters import WITHIN, DrafterSpec
from cascade.drafters.in_pass import MOST_STEPS
from cascade.engine.devices import sent
from cascade.engine.generation import CONFIG, read_json
from cascade.engine.layers import shown
from cascade.engine.sampling.own_tokens import Choice, own_tokens_and_next, runner_ups
from cascade.engine.weights import num_weights, shapes
from cascade.errors import ConfigError, ModelError
from cascade.scorer import UNREAD, Row, Scored, gap_byte

FARTHEST = 15.9  # nats: the gap of a guess without a possible alternative
ATTENTION = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj")
LAYER = (*ATTENTION, "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj", "post_attention_layernorm")
NEEDED: Mapping[str, tuple[str, ...]] = {  # tensors that a head must have, without ".weight" and the prefix before its layer
    "eagle": ("fc", *LAYER),
    "eagle3": ("fc", *LAYER, "input_layernorm", "hidden_norm", "norm", "lm_head"),
    "medusa": (),
}
NO_FURTHER = "the model's files hold no layers that predict further tokens (MTP)"
FURTHER = re.compile(r"(^|\.)mtp|\.layers\.(\d+)\.")  # names of MTP layers, or numbers of layers


@dataclass(frozen=True, slots=True)
class Reading:
    """The tokens of a pass that a head reads, and how it guesses after them; sent to the worker."""

    tokens: list[int]  # for all texts, one after the other: at each position the next token
    starts: list[int]  # each text's first position in the pass
    lengths: list[int]  # each text's number of positions in the pass
    tables: list[Sequence[int]]  # each text's blocks, with room for guesses; the null block if it has none of its own
    choices: list[Choice]  # the position of each text's first guess, and how it is chosen
    guesses: int  # number of guesses after each text


class Reader(NamedTuple):
    """A text of a pass that a head reads."""

    row: Row
    new: list[int]  # own tokens of the pass that became the text's

    @property
    def length(self) -> int:
        return len(self.row.tokens) + max(0, len(self.new) - 1)

    @property
    def end(self) -> int:
        return self.row.start + self.length

    @property
    def tokens(self) -> list[int]:
        """The next token at each position that is read; if that is unknown, the last one again."""
        text = [*self.row.tokens, *self.new]
        return [*text[1:], *([] if self.new else text[-1:])]

    @property
    def wanted(self) -> int:
        """The number of guesses to make: as many as requested, if there is room for their keys and values."""
        return min(self.row.guesses, 1 + max(0, self.row.cache.capacity - self.end)) if self.new else 0


def readers(rows: Sequence[Row], results: Sequence[Scored]) -> dict[int, Reader]:
    """The texts that a head reads of a pass, by index of their rows."""
    texts = {}
    for index, (row, scored) in enumerate(zip(rows, results, strict=True)):
        if row.guesses != UNREAD:
            texts[index] = Reader(row, row.draft.walk(scored.own)[0] if row.num_own == 1 else [])
    return texts


def reading(texts: Sequence[Reader]) -> Reading:
    """``texts`` in the form that the worker takes."""
    guesses = max(text.wanted for text in texts)
    return Reading(
        tokens=[token for text in texts for token in text.tokens],
        starts=[text.row.start for text in texts],
        lengths=[text.length for text in texts],
        tables=[text.row.cache.guessing(text.end, text.end + guesses) for text in texts],
        choices=[(text.row.params, text.end + 1, 1) for text in texts],
        guesses=guesses,
    )


def with_drafts(
    results: Sequence[Scored], texts: Mapping[int, Reader], steps: Sequence[Sequence[Sequence[int]]]
) -> list[Scored]:
    """``results`` with the guesses after each text; each of ``steps`` has one guess per text, see `own_tokens_and_next`."""
    drafted = list(results)
    gaps = [[others[0].gap if others else FARTHEST for others in runner_ups(step, 1)] for step in steps]
    for place, (index, text) in enumerate(texts.items()):
        if size := min(text.wanted, len(steps)):
            tokens = tuple(step[0][place] for step in steps[:size])
            chances = bytes(gap_byte(gap[place]) for gap in gaps[:size])
            drafted[index] = replace(drafted[index], draft=Draft(tokens, bytes(size), chances))
    return drafted


# before the engine starts


def speculative_config(drafter: DrafterSpec, source: str, layers: Sequence[int] = ()) -> dict[str, Any]:
    """vLLM's argument for a head of the model at ``source``; raises `ModelError` if the head does not fit it.

    Raises `ConfigError` together with ``layers`` of the model, since a head needs all layers.
    """
    if layers:
        raise ConfigError(f"layers are {shown(layers)} and drafter is {drafter.kind!r}, which reads all: remove one of the two")
    place = drafter.source or source
    sizes, config, model = shapes(place), _config(place), _config(source)
    inner = config.get("transformer_layer_config") or config
    if drafter.kind == WITHIN:
        num_layers = model.get("num_hidden_layers", 0)
        problem = "" if any(_further(name, num_layers) for name in sizes) else NO_FURTHER
    else:
        problem = _missing(drafter.kind, sizes) or _unlike(drafter.kind, sizes, inner, model)
    if problem:
        raise ModelError(f"The drafter {drafter.source or drafter.kind!r} cannot be used: {problem}")
    steps = int(config.get("num_heads", MOST_STEPS)) if drafter.kind == "medusa" else MOST_STEPS
    return {"method": drafter.kind, "model": place, "num_speculative_tokens": steps}


def _config(source: str) -> dict[str, Any]:
    config = read_json(source, CONFIG)
    return config.get("text_config") or config


def head_weights(drafter: DrafterSpec, source: str, num_layers: int) -> int | None:
    """The number of weights that a head adds to the model at ``source``, which has ``num_layers``, by headers of files.

    None if a hub does not provide it. Raises `ModelError` if there are no such weights.
    """
    if drafter.kind != WITHIN:
        return num_weights(drafter.source)
    number = num_weights(source, partial(_further, num_layers=num_layers))
    if number == 0:
        raise ModelError(f"The drafter {WITHIN!r} cannot be used: {NO_FURTHER}")
    return number


def _further(name: str, num_layers: int) -> bool:
    match = FURTHER.search(name)
    return match is not None and (match[2] is None or int(match[2]) >= num_layers)


def _missing(kind: str, sizes: Mapping[str, Any]) -> str:
    """A message about the first tensor that a head lacks, or ""."""
    names = [name.removesuffix(".weight").removesuffix(".qweight") for name in sizes]
    lacking = next((part for part in NEEDED[kind] if not any(f".{name}".endswith(f".{part}") for name in names)), None)
    return "" if lacking is None else f"it lacks the tensor {lacking}.weight of the kind {kind!r}"


def _unlike(kind: str, sizes: Mapping[str, list[int]], head: Mapping[str, Any], model: Mapping[str, Any]) -> str:
    """A message why a head does not fit a model, or ""."""
    size, vocab = model.get("hidden_size"), model.get("vocab_size")
    lengths = (shape[0] for end in ("t2d", "embed_tokens.weight") for name, shape in sizes.items() if name.endswith(end))
    tokens = next(lengths, head.get("vocab_size"))
    if vocab and tokens and tokens != vocab:
        return f"it is for a vocabulary of {tokens} tokens, and the model's has {vocab}"
    fc = next((shape for name, shape in sizes.items() if name.endswith("fc.weight")), None)
    wide = head.get("target_hidden_size") or (fc[1] // (3 if kind == "eagle3" else 2) if fc else head.get("hidden_size"))
    if size and wide and wide != size:
        return f"it is for a hidden size of {wide}, and the model's is {size}"
    return ""


# in the worker


@dataclass(slots=True)
class Guesses:
    """The guesses after several texts, step by step; vLLM passes it to `_own_tokens` as sampling metadata."""

    choices: Sequence[Choice]
    steps: list[Tensor] = field(default_factory=list)  # one for each step, see `own_tokens_and_next`
    all_greedy = False

    def choose(self, logits: Tensor) -> Tensor:
        step = len(self.steps)
        rows = [(params, position + step, n) for params, position, n in self.choices]
        self.steps.append(own_tokens_and_next(logits, rows, 1))
        return self.steps[-1][0]

    @property
    def all(self) -> Tensor:
        """The tensors of all steps as one, so that the host reads once."""
        return torch.stack(self.steps) if self.steps else torch.empty(0)


def _own_tokens(model: Any, hidden: Tensor, guesses: Guesses) -> tuple[Tensor, None]:
    """Chooses a guess for each text, called by vLLM's proposers: ``[texts]`` from ``[texts, hidden_size]``."""
    return guesses.choose(model.compute_logits(hidden)), None


def propose(drafter: Any, reading: Reading, hidden: Tensor, metadata: Any) -> Tensor:
    """Let a head read ``hidden`` ``[sum of lengths, width]`` of texts, and guess after them: `own_tokens_and_next` by step.

    ``metadata`` is vLLM's for these texts; it is modified.
    """
    guesses = Guesses(reading.choices)
    ends = sent([end - 1 for end in accumulate(reading.lengths)], hidden.device)
    if not hasattr(drafter, "_sample_draft_tokens"):  # Medusa's: no layers, and no steps
        if reading.guesses:
            for logits in drafter.model.compute_logits(drafter.model(hidden[ends]))[: reading.guesses]:
                guesses.choose(logits)
        return guesses.all
    drafter._sample_draft_tokens = partial(_own_tokens, drafter.model)
    tokens = sent(reading.tokens, hidden.device, torch.int32)
    drafter.propose(
        num_speculative_tokens=reading.guesses,
        target_token_ids=tokens.roll(1),  # the proposer shifts them back by one
        target_positions=metadata.positions,
        target_hidden_states=hidden,
        next_token_ids=tokens[ends],
        token_indices_to_sample=ends,
        common_attn_metadata=metadata,
        sampling_metadata=guesses,
    )
    return guesses.all
