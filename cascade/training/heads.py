"""A drafter that reads a model, trained for it on texts like those that it will write: given ones, or its own."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm
from transformers import PreTrainedModel

from cascade.engine.checkpoint import context_len
from cascade.engine.loading import load
from cascade.engine.tokenizer import Tokenizer
from cascade.errors import ConfigError
from cascade.training.block import BlockShape, train_blocks
from cascade.training.eagle import EagleShape, train_eagle3
from cascade.training.fitting import Batch, Schedule
from cascade.training.learning import fast_products
from cascade.training.medusa import train_medusa
from cascade.training.writing import Turns, end_tokens, own_prompts, write

KINDS = ("eagle3", "medusa", "dflash", "dspark")
OF_BLOCKS = ("dflash", "dspark")
VOCAB_SIZE = 32_768  # tokens that an EAGLE-3 head knows
HEADS = 4  # of Medusa
BLOCK_SIZE = 8  # of DFlash and DSpark
OWN_TEXT = "text.npy"  # beside the head


@dataclass(frozen=True, slots=True)
class Plan:
    """What is trained, how long, and on how much at once. Raises `ConfigError`."""

    kind: str = "eagle3"
    steps: int = 1000
    batch_size: int = 8
    context: int = 128  # tokens of a row
    vocab_size: int | None = None  # of eagle3: tokens that it knows at most, the most frequent ones of the texts
    num_heads: int | None = None  # of medusa: guesses after a text, each by a head with an output embedding of its own
    block_size: int | None = None  # of dflash and dspark: the last token and the guesses after it
    text_tokens: int = 300_000  # that the model writes where no texts are given

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ConfigError(f"kind is {self.kind!r}: it must be one of {', '.join(KINDS)}")
        for name, kinds, why in (
            ("vocab_size", ("eagle3",), "guesses among all tokens"),
            ("num_heads", ("medusa",), "makes all guesses with one"),
            ("block_size", OF_BLOCKS, "guesses no blocks"),
        ):
            if (value := getattr(self, name)) is not None and self.kind not in kinds:
                raise ConfigError(f"{name} is {value}, but {self.kind} {why}: leave it out")
        if self.kind == "medusa" and self.context <= (heads := self.num_heads or HEADS) + 1:
            raise ConfigError(f"context is {self.context}: {heads} heads need rows of more than {heads + 1} tokens")
        if self.kind in OF_BLOCKS and self.context <= (size := self.block_size or BLOCK_SIZE):
            raise ConfigError(f"context is {self.context}: blocks of {size} need rows of more than {size} tokens")


def train(source: str, files: Sequence[Path], out: Path, plan: Plan = Plan(), *, device: str | None = None) -> float:
    """Train a drafter for the model at ``source``, a path or hub id, and write it to ``out``.

    Without ``files`` the model writes the texts itself, see `cascade.training.writing`. Goes on where it was interrupted.
    Returns the mean loss of the last steps, nats a guess; raises `ConfigError` if the texts
    are too short or cannot be read, or if another drafter was trained in ``out``, `ModelError` if the model cannot be loaded.
    """
    network = load(source, device=device).requires_grad_(False)
    tokenizer = Tokenizer.from_pretrained(source)
    tokens = _tokens(tokenizer, files) if files else _own_tokens(network, tokenizer, plan.text_tokens, out / OWN_TEXT)
    context = min(plan.context, context_len(network.config))
    if len(tokens) <= context:
        raise ConfigError(f"The texts have {len(tokens)} tokens: give more than the {context} of one row")
    text, batch, schedule = network.config.get_text_config(), _batches(tokens, plan.batch_size, context), Schedule(plan.steps)
    match plan.kind:
        case "medusa":
            return train_medusa(network, batch, plan.num_heads or HEADS, schedule, out)
        case "dflash" | "dspark":
            shape = _block_shape(text, tokens, plan.block_size or BLOCK_SIZE)
            return train_blocks(network, batch, shape, schedule, out, plan.kind)
        case _:
            return train_eagle3(network, batch, _shape(text, tokens, plan.vocab_size or VOCAB_SIZE), schedule, out)


def _tokens(tokenizer: Tokenizer, files: Sequence[Path]) -> Tensor:
    """Of all texts, one after another."""
    tokens: list[int] = []
    for path in files:
        try:
            tokens += tokenizer.encode_part(path.read_text(encoding="utf-8"))
        except (OSError, UnicodeError) as error:
            raise ConfigError(f"{path} cannot be read: {error}") from None
    return torch.tensor(tokens, dtype=torch.int64)


def _own_tokens(network: PreTrainedModel, tokenizer: Tokenizer, wanted: int, kept: Path) -> Tensor:
    """Conversations that the model writes, one after another; those of an earlier call if there are any."""
    if kept.exists():
        return torch.from_numpy(np.load(kept))
    turns = Turns.of(tokenizer.backend, end_tokens(network, tokenizer.backend))
    tokens: list[int] = []
    bar = tqdm(total=wanted, desc="write", unit="token", mininterval=5)
    with fast_products(network.device), bar:
        for text in write(network, turns, own_prompts(turns)):
            tokens += text.tokens
            bar.update(len(text.tokens))
            if len(tokens) >= wanted:
                break
    kept.parent.mkdir(parents=True, exist_ok=True)
    partial = kept.with_suffix(".partial.npy")
    np.save(partial, np.asarray(tokens))
    os.replace(partial, kept)
    return torch.tensor(tokens)


def _shape(text: Any, tokens: Tensor, vocab_size: int) -> EagleShape:
    """A layer like the model's own, over a low, a middle and a high hidden state."""
    counts = torch.bincount(tokens, minlength=text.vocab_size)
    known = counts.argsort(descending=True, stable=True)[: min(vocab_size, int((counts > 0).sum()))]
    return EagleShape(**_sizes(text), tokens=tuple(sorted(known.tolist())))


def _block_shape(text: Any, tokens: Tensor, block_size: int) -> BlockShape:
    """Two layers like the model's own; masks are a token that the texts hardly have."""
    mask = int(torch.bincount(tokens, minlength=text.vocab_size).argmin())
    return BlockShape(num_layers=2, block_size=block_size, mask=mask, **_sizes(text))


def _sizes(text: Any) -> dict[str, Any]:
    """Of a layer, and the hidden states that are read."""
    layers = text.num_hidden_layers
    return {
        "num_heads": text.num_attention_heads,
        "num_kv_heads": getattr(text, "num_key_value_heads", None) or text.num_attention_heads,
        "intermediate_size": text.intermediate_size,
        "reads": tuple(sorted({min(2, layers), layers // 2, max(1, layers - 3)})) if layers > 4 else (1, layers),
    }


def _batches(tokens: Tensor, rows: int, length: int) -> Batch:
    """Rows of a step, the same ones each time that it is asked for."""

    def batch(step: int) -> Tensor:
        starts = np.random.default_rng(step).integers(0, len(tokens) - length, rows)
        return torch.stack([tokens[start : start + length] for start in starts])

    return batch
