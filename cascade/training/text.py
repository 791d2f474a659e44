"""Texts on disk, with the teacher's distribution at each position, from which a student learns."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from cascade.engine.model import Model
from cascade.errors import ConfigError
from cascade.params import SamplingParams
from cascade.scorer import Row
from cascade.training.versions import replacing

TOP = 32  # likeliest tokens of the teacher that are kept for a position
SHARD_TOKENS = 50_000  # tokens of a file
HELD_OUT = 17  # one prompt in this many only judges; a prime, so that these have all temperatures and beginnings
AT_ONCE = 1024  # tokens that one pass scores, since their logits must fit into memory


class Likeliest(NamedTuple):
    """A model's likeliest next tokens after each of some tokens."""

    ids: npt.NDArray[np.int32]  # [num_tokens, TOP], the likeliest first
    logprobs: npt.NDArray[np.float16]  # [num_tokens, TOP], nats

    @classmethod
    def of(cls, logits: Tensor) -> "Likeliest":
        """The likeliest tokens by ``logits`` ``[num_tokens, vocab_size]``."""
        logits = logits.float()
        values, ids = logits.topk(TOP, -1)
        logprobs = values - logits.logsumexp(-1, keepdim=True)
        return cls(ids.int().cpu().numpy(), logprobs.half().cpu().numpy())


@dataclass(slots=True)
class Text:
    """One text, without its ending token, so that there is something to learn after each of its tokens."""

    tokens: list[int]
    prompt_len: int  # tokens before the answer; 0 while the prompt is written
    temperature: float  # temperature of the answer
    held_out: bool = False  # whether it only judges; the same for all texts with the same prompt
    likeliest: list[Likeliest] = field(default_factory=list)  # the teacher's, after all tokens, if its passes gave them


@dataclass(frozen=True, slots=True)
class Shard:
    """Some 50,000 tokens of texts, one after another, and the teacher's distribution after each token."""

    tokens: npt.NDArray[np.int32]  # [num_tokens]
    starts: npt.NDArray[np.int64]  # [num_texts + 1]
    prompts: npt.NDArray[np.int64]  # [num_texts]: length of the text before the answer
    temperatures: npt.NDArray[np.float32]  # [num_texts]: of the answer
    held_out: npt.NDArray[np.bool_]  # [num_texts]: whether a text is never learned from
    # the teacher's likeliest next tokens and their nats, both [num_tokens, TOP]; empty until `score`
    ids: npt.NDArray[np.int32] = field(default_factory=lambda: np.zeros((0, TOP), np.int32))
    logprobs: npt.NDArray[np.float16] = field(default_factory=lambda: np.zeros((0, TOP), np.float16))

    @classmethod
    def of(cls, texts: Sequence[Text]) -> "Shard":
        """A shard of ``texts``. Either all of them have the teacher's distributions, or none."""
        shard = cls(
            tokens=np.concatenate([np.asarray(text.tokens, np.int32) for text in texts]),
            starts=np.cumsum([0, *(len(text.tokens) for text in texts)]),
            prompts=np.array([text.prompt_len for text in texts]),
            temperatures=np.array([text.temperature for text in texts], np.float32),
            held_out=np.array([text.held_out for text in texts]),
        )
        if not (parts := [part for text in texts for part in text.likeliest]):
            return shard
        ids, logprobs = (np.concatenate(arrays) for arrays in zip(*parts, strict=True))
        return replace(shard, ids=ids, logprobs=logprobs)

    def save(self, path: Path) -> None:
        """Write the shard to a file, atomically."""
        with replacing(path) as file:
            np.savez(file, **{name: getattr(self, name) for name in self.__slots__})

    @classmethod
    def load(cls, path: Path) -> "Shard":
        with np.load(path) as file:
            return cls(**{name: file[name] for name in file.files})

    @property
    def num_texts(self) -> int:
        return len(self.prompts)

    def numbers(self, *, held_out: bool) -> list[int]:
        """Numbers of the texts that judge, or of those that are learned from."""
        return [int(text) for text in np.flatnonzero(self.held_out == held_out)]

    def span(self, text: int) -> slice:
        return slice(int(self.starts[text]), int(self.starts[text + 1]))


def read(tokenizer: PreTrainedTokenizerBase, files: Iterable[Path]) -> Iterator[list[int]]:
    """Token ids of each file; raises `ConfigError` if one cannot be read."""
    for path in files:
        try:
            yield tokenizer.encode(path.read_text(encoding="utf-8"), add_special_tokens=False, verbose=False)
        except (OSError, UnicodeError) as error:
            raise ConfigError(f"{path} cannot be read: {error}") from None


@torch.inference_mode()
def score(model: Model, shard: Shard) -> Shard:
    """The shard with the likeliest tokens of ``model`` after every token."""
    ids, logprobs = np.zeros((len(shard.tokens), TOP), np.int32), np.zeros((len(shard.tokens), TOP), np.float16)
    for texts in batches(shard, range(shard.num_texts), AT_ONCE):
        spans, plain = [shard.span(text) for text in texts], SamplingParams()
        rows = [Row(model.new_cache(), 0, shard.tokens[span].tolist(), span.stop - span.start, plain) for span in spans]
        where = np.r_[tuple(spans)]
        ids[where], logprobs[where] = Likeliest.of(model.logits(rows))
        for row in rows:
            row.cache.free()
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
    """Token ids ``[texts, longest]`` int64, padded at the end with token 0, which causal attention never sees."""
    parts = [torch.from_numpy(shard.tokens[shard.span(text)].astype(np.int64)) for text in texts]
    return torch.nn.utils.rnn.pad_sequence(parts, batch_first=True)
