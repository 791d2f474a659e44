"""Cross-entropy against a teacher's likeliest tokens, without the logits of all positions in memory."""

from typing import Any

import torch
from torch import Tensor

from cascade.engine.devices import product_dtype

POSITIONS = 512  # whose logits are in memory at a time


class _TopCrossEntropy(torch.autograd.Function):
    """Computes the gradient with the loss, part by part, so that no logits are kept for the way back."""

    @staticmethod
    def forward(ctx: Any, states: Tensor, weight: Tensor, ids: Tensor, wanted: Tensor) -> Tensor:
        dtype = product_dtype(weight.device)
        matrix = weight.to(dtype)
        count, total = len(states), states.new_zeros(())
        grad_states, grad_weight = torch.empty_like(states), torch.zeros_like(weight, dtype=torch.float32)
        for begin in range(0, count, POSITIONS):
            part = slice(begin, begin + POSITIONS)
            x = states[part].to(dtype)
            logits = (x @ matrix.T).float()
            norm = logits.logsumexp(-1, keepdim=True)
            total = total - (wanted[part] * (logits.gather(1, ids[part]) - norm)).sum()
            probabilities = logits.sub_(norm).exp_().mul_(wanted[part].sum(-1, keepdim=True))
            slope = probabilities.scatter_add_(1, ids[part], -wanted[part]).to(dtype)
            grad_states[part] = (slope @ matrix).to(states.dtype)
            grad_weight += (slope.T @ x).float()
        ctx.save_for_backward(grad_states / count, grad_weight / count)
        return total / count

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None, None]:
        grad_states, grad_weight = ctx.saved_tensors
        return grad_states * grads[0], grad_weight * grads[0], None, None


def top_cross_entropy(states: Tensor, weight: Tensor, ids: Tensor, wanted: Tensor) -> Tensor:
    """Mean over positions of ``-sum_k wanted_k log softmax(states @ weight.T)[ids_k]``, nats.

    ``states`` ``[positions, width]``, ``weight`` ``[vocab, width]``, ``ids`` ``[positions, k]`` int64, ``wanted``
    ``[positions, k]`` float32: the teacher's probabilities of these tokens. Products are in `product_dtype`, sums in float32.
    This is the forward Kullback-Leibler divergence up to a constant (Hinton, Vinyals, Dean, arXiv 1503.02531), cut off at the
    likeliest.
    """
    loss: Tensor = _TopCrossEntropy.apply(states, weight, ids, wanted)  # type: ignore[no-untyped-call]
    return loss
