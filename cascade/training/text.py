"""Texts on disk, with what the teacher says at each of their positions: what a student learns from."""

import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from transformers import PreTrainedModel

TOP = 32  # likeliest tokens of the teacher that are kept for a position
SHARD_TOKENS = 50_000  # of a file
HELD_OUT = 16  # one conversation of so many is never learnt from


@dataclass(frozen=True, slots=True)
class Shard:
    """Some 50,000 tokens of texts, one after another, and the teacher's distribution after each token."""

    tokens: npt.NDArray[np.int32]  # [num_tokens]
    starts: npt.NDArray[np.int64]  # [num_texts + 1]
    prompts: npt.NDArray[np.int64]  # [num_texts]: length of what stands before the answer
    temperatures: npt.NDArray[np.float32]  # [num_texts]: of the answer
    ids: npt.NDArray[np.int32] | None = None  # [num_tokens, TOP]: the teacher's likeliest next tokens
    logprobs: npt.NDArray[np.float16] | None = None  # [num_tokens, TOP]: nats

    @classmethod
    def of(cls, texts: Sequence[Sequence[int]], prompts: Sequence[int], temperatures: Sequence[float]) -> "Shard":
        starts = np.cumsum([0, *map(len, texts)])
        tokens = np.concatenate([np.asarray(text, np.int32) for text in texts])
        return cls(tokens, starts, np.asarray(prompts), np.asarray(temperatures, np.float32))

    def save(self, path: Path) -> None:
        """Write it whole, or not at all."""
        partial = path.with_suffix(".partial")
        fields: dict[str, Any] = {name: getattr(self, name) for name in self.__slots__ if getattr(self, name) is not None}
        with partial.open("wb") as file:
            np.savez(file, **fields)
        os.replace(partial, path)

    @classmethod
    def load(cls, path: Path) -> "Shard":
        with np.load(path) as file:
            return cls(**{name: file[name] for name in file.files})

    @property
    def num_texts(self) -> int:
        return len(self.prompts)

    def span(self, text: int) -> slice:
        return slice(int(self.starts[text]), int(self.starts[text + 1]))


def held_out(number: int) -> bool:
    """Whether the text of that number in a shard is kept for judging."""
    return number % HELD_OUT == 0


@torch.inference_mode()
def score(teacher: PreTrainedModel, shard: Shard, *, tokens_at_once: int = 4096) -> Shard:
    """The shard with the teacher's ``TOP`` likeliest tokens after every token, and their log-probabilities."""
    ids = np.zeros((len(shard.tokens), TOP), np.int32)
    logprobs = np.zeros((len(shard.tokens), TOP), np.float16)
    for rows in batches(shard, range(shard.num_texts), tokens_at_once):
        batch = padded(shard, rows).to(teacher.device)
        states = teacher.base_model(batch, use_cache=False).last_hidden_state
        for row, text in enumerate(rows):
            span = shard.span(text)
            logits = teacher.get_output_embeddings()(states[row, : span.stop - span.start]).float()
            top, best = logits.topk(TOP, -1)
            ids[span] = best.cpu().numpy()
            logprobs[span] = (top - logits.logsumexp(-1, keepdim=True)).cpu().numpy()
    return Shard(shard.tokens, shard.starts, shard.prompts, shard.temperatures, ids, logprobs)


def likelihood(shards: Iterable[Shard], vocab_size: int) -> npt.NDArray[np.float64]:
    """How often the teacher says each token at the positions of scored ``shards``, ``[vocab_size]``: sums of probabilities."""
    total = np.zeros(vocab_size)
    for shard in shards:
        assert shard.ids is not None
        assert shard.logprobs is not None
        total += np.bincount(shard.ids.ravel(), np.exp(shard.logprobs.ravel().astype(np.float32)), vocab_size)
    return total


def batches(shard: Shard, texts: Sequence[int], tokens: int) -> Iterator[list[int]]:
    """Texts by number, those of similar length together, at most ``tokens`` in a batch, padding included."""
    lengths = np.diff(shard.starts)
    batch: list[int] = []
    for text in sorted(texts, key=lambda number: int(lengths[number])):
        if batch and (len(batch) + 1) * int(lengths[text]) > tokens:
            yield batch
            batch = []
        batch.append(text)
    if batch:
        yield batch


def padded(shard: Shard, texts: Sequence[int]) -> torch.Tensor:
    """Token ids ``[texts, longest]`` int64, filled up with token 0 after each text: causal attention never sees it."""
    parts = [torch.from_numpy(shard.tokens[shard.span(text)].astype(np.int64)) for text in texts]
    return torch.nn.utils.rnn.pad_sequence(parts, batch_first=True)
