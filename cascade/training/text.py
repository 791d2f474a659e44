"""Texts on disk with the teacher's distribution at each position: what a student learns from."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from cascade.errors import ConfigError
from cascade.training.versions import replacing

TOP = 32  # likeliest tokens of the teacher that are kept for a position
SHARD_TOKENS = 50_000  # tokens of a file
HELD_OUT = 16  # one text in so many is never learnt from


class Text(Protocol):
    """One text with an answer."""

    @property
    def tokens(self) -> Sequence[int]: ...
    @property
    def prompt_len(self) -> int: ...
    @property
    def temperature(self) -> float: ...


@dataclass(frozen=True, slots=True)
class Shard:
    """Some 50,000 tokens of texts, one after another, and the teacher's distribution after each token."""

    tokens: npt.NDArray[np.int32]  # [num_tokens]
    starts: npt.NDArray[np.int64]  # [num_texts + 1]
    prompts: npt.NDArray[np.int64]  # [num_texts]: length of what stands before the answer
    temperatures: npt.NDArray[np.float32]  # [num_texts]: of the answer
    # the teacher's likeliest next tokens and their nats, both [num_tokens, TOP]; empty until `score`
    ids: npt.NDArray[np.int32] = field(default_factory=lambda: np.zeros((0, TOP), np.int32))
    logprobs: npt.NDArray[np.float16] = field(default_factory=lambda: np.zeros((0, TOP), np.float16))

    @classmethod
    def of(cls, texts: Sequence[Text]) -> "Shard":
        tokens = np.concatenate([np.asarray(text.tokens, np.int32) for text in texts])
        starts, prompts = np.cumsum([0, *(len(text.tokens) for text in texts)]), np.array([text.prompt_len for text in texts])
        return cls(tokens, starts, prompts, np.array([text.temperature for text in texts], np.float32))

    def save(self, path: Path) -> None:
        """Write it to a file, whole or not at all."""
        with replacing(path) as file:
            np.savez(file, **{name: getattr(self, name) for name in self.__slots__})

    @classmethod
    def load(cls, path: Path) -> "Shard":
        with np.load(path) as file:
            return cls(**{name: file[name] for name in file.files})

    @property
    def num_texts(self) -> int:
        return len(self.prompts)

    def span(self, text: int) -> slice:
        return slice(int(self.starts[text]), int(self.starts[text + 1]))


def read(tokenizer: PreTrainedTokenizerBase, files: Iterable[Path]) -> Iterator[list[int]]:
    """Token ids of each file; raises `ConfigError` if one cannot be read."""
    for path in files:
        try:
            yield tokenizer.encode(path.read_text(encoding="utf-8"), add_special_tokens=False, verbose=False)
        except (OSError, UnicodeError) as error:
            raise ConfigError(f"{path} cannot be read: {error}") from None


def held_out(number: int) -> bool:
    """Whether the text of that number in a shard only judges."""
    return number % HELD_OUT == 0


@torch.inference_mode()
def score(teacher: PreTrainedModel, shard: Shard, *, tokens_at_once: int = 4096) -> Shard:
    """The shard with the teacher's ``TOP`` likeliest tokens after every token, and their log-probabilities."""
    ids = np.zeros((len(shard.tokens), TOP), np.int32)
    logprobs = np.zeros((len(shard.tokens), TOP), np.float16)
    head = teacher.get_output_embeddings()
    for rows in batches(shard, range(shard.num_texts), tokens_at_once):
        batch = padded(shard, rows).to(teacher.device)
        states = teacher.base_model(batch, use_cache=False).last_hidden_state
        for row, text in enumerate(rows):
            span = shard.span(text)
            # as PyTorch multiplies: a `Model` that shares the teacher has put a kernel for few rows there
            logits = type(head).forward(head, states[row, : span.stop - span.start]).float()
            top, best = logits.topk(TOP, -1)
            ids[span] = best.cpu().numpy()
            logprobs[span] = (top - logits.logsumexp(-1, keepdim=True)).cpu().numpy()
    return replace(shard, ids=ids, logprobs=logprobs)


def likelihood(shards: Iterable[Shard], vocab_size: int) -> npt.NDArray[np.float64]:
    """The teacher's probability of each token, summed over all positions of scored ``shards``, ``[vocab_size]``."""
    total = np.zeros(vocab_size)
    for shard in shards:
        total += np.bincount(shard.ids.ravel(), np.exp(shard.logprobs.ravel().astype(np.float32)), vocab_size)
    return total


def batches(shard: Shard, texts: Sequence[int], tokens: int) -> Iterator[list[int]]:
    """Numbers of texts in batches of similar length, at most ``tokens`` each, padding included."""
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
    """Token ids ``[texts, longest]`` int64, padded with token 0 after each text, which causal attention never sees."""
    parts = [torch.from_numpy(shard.tokens[shard.span(text)].astype(np.int64)) for text in texts]
    return torch.nn.utils.rnn.pad_sequence(parts, batch_first=True)
