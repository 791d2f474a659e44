"""Processes that train together, each on a part of the texts: the default group of `torch.distributed`.

Without such a group, the normal case, a process is the only one, and these functions cost nothing.
"""

from collections.abc import Iterable, Sequence
from typing import TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

T = TypeVar("T")


def size() -> int:
    """Number of processes that train."""
    return dist.get_world_size() if dist.is_initialized() else 1


def rank() -> int:
    """Number of this process, from 0."""
    return dist.get_rank() if dist.is_initialized() else 0


def part(items: Sequence[T]) -> Sequence[T]:
    """The items for this process; all of them if there are fewer items than processes."""
    return items[rank() :: size()] if len(items) >= size() else items


def of_first(value: float) -> float:
    """The value of the first process."""
    if size() == 1:
        return value
    shared = torch.tensor(value, dtype=torch.float64)
    dist.broadcast(shared, 0)
    return shared.item()


def equalize(parameters: Iterable[Tensor]) -> None:
    """Give all processes the parameters of the first."""
    if size() > 1:
        for parameter in parameters:
            dist.broadcast(parameter.detach(), 0)


def average(parameters: Iterable[Tensor]) -> None:
    """Replace the gradient of each parameter by its mean over all processes, as in one step on all their texts.

    Every parameter must have a gradient in every process.
    """
    if size() > 1:
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        for handle in [dist.all_reduce(gradient, async_op=True) for gradient in gradients]:
            handle.wait()
        torch._foreach_div_(gradients, size())


def together(part: np.ndarray) -> np.ndarray:
    """The arrays ``[n, ...]`` of all processes, of one dtype, concatenated along the first axis."""
    if size() == 1:
        return part
    parts: list[np.ndarray] = [part] * size()
    dist.all_gather_object(parts, part)
    return np.concatenate(parts)
