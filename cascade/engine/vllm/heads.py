"""Heads in the passes of a tier on vLLM: vLLM's own proposers run them, and say own tokens in place of their argmax.

What a head keeps are further layers of the same blocks: rollback, forks, copies and prefix reuse need no code. It is fed what a
pass has read of each text, with the token after it; after the last one it guesses. Where that token is not known yet, at the
end of a chunk, or changes, after a correction from above, one entry of the head is made with another token. It then guesses
a little worse.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from cascade.draft import Draft
from cascade.drafters import WITHIN, DrafterSpec
from cascade.drafters.in_pass import MOST_STEPS
from cascade.engine.layers import shown
from cascade.engine.sampling.own_tokens import Asked, own_tokens_and_next, runner_ups
from cascade.engine.weights import fetched, shapes
from cascade.errors import ConfigError, ModelError
from cascade.scorer import UNREAD, Row, Scored, gap_byte

FARTHEST = 15.9  # nats: the gap of a guess beside which nothing is possible
ATTENTION = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj")
LAYER = (*ATTENTION, "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj", "post_attention_layernorm")
NEEDED: Mapping[str, tuple[str, ...]] = {  # tensors that a head must have, without ".weight" and what is before its layer
    "eagle": ("fc", *LAYER),
    "eagle3": ("fc", *LAYER, "input_layernorm", "hidden_norm", "norm", "lm_head"),
    "medusa": (),
}
FURTHER = re.compile(r"(^|\.)mtp|\.layers\.(\d+)\.")  # names of layers that predict further tokens, or numbers of layers


@dataclass(frozen=True, slots=True)
class Reading:
    """What a head reads of a pass, and how it guesses after it; plain lists, which travel to the worker."""

    tokens: list[int]  # all texts' tokens, one text after the other: at each position the token after it
    starts: list[int]  # the first position that the pass read, of each text
    lengths: list[int]  # how many positions are read, of each text
    tables: list[list[int]]  # each text's blocks, with room for guesses: the null block where it has none of its own
    asked: list[Asked]  # the position of each text's first guess, and how it is chosen
    guesses: int  # wanted after each text


class Reader(NamedTuple):
    """A text of a pass that a head reads."""

    row: Row
    new: list[int]  # own tokens that the pass gave, as far as they are the text's

    @property
    def length(self) -> int:
        return len(self.row.tokens) + max(0, len(self.new) - 1)

    @property
    def end(self) -> int:
        return self.row.start + self.length

    @property
    def tokens(self) -> list[int]:
        """At each position that is read, the token after it; the last one again where that is not known."""
        text = [*self.row.tokens, *self.new]
        return [*text[1:], *([] if self.new else text[-1:])]

    @property
    def wanted(self) -> int:
        """Guesses that are made: those that are asked for, as far as there is room for what they write."""
        return min(self.row.guesses, 1 + max(0, self.row.cache.capacity - self.end)) if self.new else 0


def readers(rows: Sequence[Row], found: Sequence[Scored]) -> dict[int, Reader]:
    """The texts that a head reads of a pass, by index of their rows."""
    reads = {}
    for index, (row, scored) in enumerate(zip(rows, found, strict=True)):
        if row.guesses != UNREAD:
            reads[index] = Reader(row, row.draft.walk(scored.own)[0] if row.num_own == 1 else [])
    return reads


def reading(reads: Sequence[Reader]) -> Reading:
    """``reads`` as the worker takes them."""
    guesses = max(read.wanted for read in reads)
    return Reading(
        tokens=[token for read in reads for token in read.tokens],
        starts=[read.row.start for read in reads],
        lengths=[read.length for read in reads],
        tables=[read.row.cache.guessing(read.end, read.end + guesses) for read in reads],
        asked=[(read.row.params, read.end + 1, 1) for read in reads],
        guesses=guesses,
    )


def with_drafts(found: Sequence[Scored], reads: Mapping[int, Reader], said: Sequence[Sequence[Sequence[int]]]) -> list[Scored]:
    """``found`` with the guesses after each text: ``said`` are, step by step, results of `own_tokens_and_next`."""
    results = list(found)
    gaps = [[others[0].gap if others else FARTHEST for others in runner_ups(step, 1)] for step in said]
    for place, (index, read) in enumerate(reads.items()):
        if size := min(read.wanted, len(said)):
            tokens = tuple(said[step][0][place] for step in range(size))
            chances = bytes(gap_byte(gaps[step][place]) for step in range(size))
            results[index] = replace(results[index], draft=Draft(tokens, bytes(size), chances))
    return results


# before the engine starts


def speculative_config(drafter: DrafterSpec, source: str, layers: Sequence[int] = ()) -> dict[str, Any]:
    """vLLM's argument for a head of the model at ``source``; raises `ModelError` if the head does not fit it.

    Raises `ConfigError` beside ``layers`` of the model, for a head reads all.
    """
    if layers:
        raise ConfigError(f"layers are {shown(layers)} and drafter is {drafter.kind!r}, which reads all: remove one of the two")
    place = drafter.source or source
    sizes, config, model = shapes(place), _config(place), _config(source)
    inner = config.get("transformer_layer_config") or config
    if drafter.kind == WITHIN:
        problem = _no_further(sizes, model)
    else:
        problem = _missing(drafter.kind, sizes) or _unlike(drafter.kind, sizes, inner, model)
    if problem:
        raise ModelError(f"The drafter {drafter.source or drafter.kind!r} cannot be used: {problem}")
    steps = int(config.get("num_heads", MOST_STEPS)) if drafter.kind == "medusa" else MOST_STEPS
    return {"method": drafter.kind, "model": place, "num_speculative_tokens": steps}


def _config(source: str) -> dict[str, Any]:
    file = fetched(source) / "config.json"
    found: dict[str, Any] = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    return found.get("text_config") or found


def _no_further(sizes: Mapping[str, Any], model: Mapping[str, Any]) -> str:
    """Why a model has no layers that predict further tokens, in words; "" if it has them."""
    layers = model.get("num_hidden_layers", 0)
    found = (FURTHER.search(name) for name in sizes)
    has = any(one and (one[2] is None or int(one[2]) >= layers) for one in found)
    return "" if has else "the model's files hold no layers that predict further tokens (MTP)"


def _missing(kind: str, sizes: Mapping[str, Any]) -> str:
    """Which tensor a head lacks, in words; "" if none."""
    names = [name.removesuffix(".weight").removesuffix(".qweight") for name in sizes]
    lacking = next((part for part in NEEDED[kind] if not any(f".{name}".endswith(f".{part}") for name in names)), None)
    return "" if lacking is None else f"it lacks the tensor {lacking}.weight of the kind {kind!r}"


def _unlike(kind: str, sizes: Mapping[str, tuple[int, ...]], head: Mapping[str, Any], model: Mapping[str, Any]) -> str:
    """Why a head is not for a model, in words; "" if it may be."""
    size, vocab = model.get("hidden_size"), model.get("vocab_size")
    told = (shape[0] for end in ("t2d", "embed_tokens.weight") for name, shape in sizes.items() if name.endswith(end))
    known = next(told, head.get("vocab_size"))
    if vocab and known and known != vocab:
        return f"it is for a vocabulary of {known} tokens, and the model's has {vocab}"
    fc = next((shape for name, shape in sizes.items() if name.endswith("fc.weight")), None)
    wide = head.get("target_hidden_size") or (fc[1] // (3 if kind == "eagle3" else 2) if fc else head.get("hidden_size"))
    if size and wide and wide != size:
        return f"it is for a hidden size of {wide}, and the model's is {size}"
    return ""


# in the worker


@dataclass(slots=True)
class Guesses:
    """The guesses after several texts, step by step; vLLM hands it through to `_own_tokens` as its sampling metadata."""

    asked: Sequence[Asked]
    said: list[Tensor] = field(default_factory=list)  # one for each step, see `own_tokens_and_next`
    all_greedy = False

    def choose(self, logits: Tensor) -> Tensor:
        step = len(self.said)
        rows = [(params, position + step, n) for params, position, n in self.asked]
        self.said.append(own_tokens_and_next(logits, rows, 1))
        return self.said[-1][0]


def _own_tokens(model: Any, hidden: Tensor, guesses: Guesses) -> tuple[Tensor, None]:
    """What vLLM's proposers call to choose a guess for each text, ``[texts]`` of ``[texts, hidden_size]``."""
    return guesses.choose(model.compute_logits(hidden)), None


def propose(drafter: Any, asked: Reading, hidden: Tensor, metadata: Any) -> list[list[list[int]]]:
    """Let a head read ``hidden`` ``[sum of lengths, width]`` of texts, and guess after them; the results step by step.

    ``metadata`` is vLLM's of these texts, and is changed.
    """
    guesses = Guesses(asked.asked)
    ends = torch.tensor(asked.lengths, device=hidden.device).cumsum(0) - 1
    if not hasattr(drafter, "_sample_draft_tokens"):  # Medusa's: no layers, and no steps
        if asked.guesses:
            for logits in drafter.model.compute_logits(drafter.model(hidden[ends]))[: asked.guesses]:
                guesses.choose(logits)
        return [step.tolist() for step in guesses.said]
    drafter._sample_draft_tokens = partial(_own_tokens, drafter.model)
    tokens = torch.tensor(asked.tokens, dtype=torch.int32).to(hidden.device)
    drafter.propose(
        num_speculative_tokens=asked.guesses,
        target_token_ids=tokens.roll(1),  # the proposer moves them back by one
        target_positions=metadata.positions,
        target_hidden_states=hidden,
        next_token_ids=tokens[ends],
        token_indices_to_sample=ends,
        common_attn_metadata=metadata,
        sampling_metadata=guesses,
    )
    return [step.tolist() for step in guesses.said]
