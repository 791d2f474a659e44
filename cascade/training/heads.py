"""An EAGLE-3 head for a model, trained on texts like those that it will write: given ones, or its own."""

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

from cascade.engine.loading import load
from cascade.engine.model_config import context_len
from cascade.engine.tokenizer import Tokenizer
from cascade.errors import ConfigError
from cascade.training.eagle import Batch, EagleShape, Schedule, train_eagle3
from cascade.training.learning import mixed_precision
from cascade.training.writing import Turns, end_tokens, own_prompts, write

OWN_TEXT = "text.npy"  # beside the head


@dataclass(frozen=True, slots=True)
class Plan:
    """How long it is trained, and on how much at once."""

    steps: int = 1000
    batch_size: int = 8
    context: int = 128  # tokens of a row
    vocab_size: int = 32_768  # tokens that it knows at most, the most frequent ones of the texts
    text_tokens: int = 300_000  # that the model writes where no texts are given


def train(source: str, files: Sequence[Path], out: Path, plan: Plan = Plan(), *, device: str | None = None) -> float:
    """Train a head for the model at ``source``, a path or hub id, and write it to ``out``.

    Without ``files`` the model writes the texts itself, see `cascade.training.writing`. Goes on where it was interrupted.
    Returns the mean loss of the last steps, nats a guess; raises `ConfigError` if the texts
    are too short or cannot be read, or if another head was trained in ``out``, `ModelError` if the model cannot be loaded.
    """
    network = load(source, device=device).requires_grad_(False)
    tokenizer = Tokenizer.from_pretrained(source)
    tokens = _tokens(tokenizer, files) if files else _own_tokens(network, tokenizer, plan.text_tokens, out / OWN_TEXT)
    context = min(plan.context, context_len(network.config))
    if len(tokens) <= context:
        raise ConfigError(f"The texts have {len(tokens)} tokens: give more than the {context} of one row")
    shape = _shape(network.config.get_text_config(), tokens, plan.vocab_size)
    return train_eagle3(network, _batches(tokens, plan.batch_size, context), shape, Schedule(plan.steps), out)


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
    with mixed_precision(network.device), bar:
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
    layers, counts = text.num_hidden_layers, torch.bincount(tokens, minlength=text.vocab_size)
    known = counts.argsort(descending=True, stable=True)[: min(vocab_size, int((counts > 0).sum()))]
    return EagleShape(
        num_heads=text.num_attention_heads,
        num_kv_heads=getattr(text, "num_key_value_heads", None) or text.num_attention_heads,
        intermediate_size=text.intermediate_size,
        reads=tuple(sorted({min(2, layers), layers // 2, max(1, layers - 3)})) if layers > 4 else (1, layers),
        tokens=tuple(sorted(known.tolist())),
    )


def _batches(tokens: Tensor, rows: int, length: int) -> Batch:
    """Rows of a step, the same ones each time that it is asked for."""

    def batch(step: int) -> Tensor:
        starts = np.random.default_rng(step).integers(0, len(tokens) - length, rows)
        return torch.stack([tokens[start : start + length] for start in starts])

    return batch
