"""Data sent to vLLM's workers and back: the rows of a pass, facts about a model, own tokens copied from a GPU."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from cascade.engine.sampling.own_tokens import Choice


@dataclass(frozen=True, slots=True)
class Batch:
    """The rows of a pass as plain lists and arrays, which are sent to every rank."""

    tokens: list[int]  # all rows' tokens, one row after the other
    starts: list[int]  # the position of each row's first token
    lengths: list[int]  # each row's number of tokens
    tables: list[Sequence[int]]  # each row's blocks
    keep: list[int]  # places in ``tokens`` whose logits are needed
    adapters: list[int]  # each row's LoRA adapter, 0 for none; empty if the model has no adapters
    choices: list[Choice] | None = None  # how own tokens are chosen, see `own_tokens`; None to return logits
    runner_ups: int = 0  # for each own token


@dataclass(frozen=True, slots=True)
class Facts:
    """Facts that a worker reports after loading its model and its cache."""

    device: torch.device
    dtype: torch.dtype
    num_blocks: int
    block: int  # positions of a block
    num_parameters: int
    backend: str  # the backend of attention
    problem: str | None  # why the model cannot be a tier


@dataclass(frozen=True, slots=True)
class Failure:
    """An error that a worker raised."""

    error: Exception


@dataclass(frozen=True, slots=True)
class HostCopy:
    """Own tokens of a pass that are being copied from a GPU to the host."""

    values: Tensor  # int64 on the host, valid after ``done``
    done: torch.cuda.Event

    @classmethod
    def begin(cls, values: Tensor) -> Self:
        """Start to copy ``values`` without waiting."""
        host = torch.empty(values.shape, dtype=values.dtype, pin_memory=True).copy_(values, non_blocking=True)
        done = torch.cuda.Event()
        done.record()
        return cls(host, done)

    def read(self) -> list[list[int]]:
        """Wait for the tokens and return them."""
        self.done.synchronize()
        values: list[list[int]] = self.values.tolist()
        return values
