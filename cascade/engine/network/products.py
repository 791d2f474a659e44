"""Our kernels for the linear layers of a Transformers network on a CPU, the only change to it.

With PyTorch's products the bits of a row depend on the number of rows, so a text would depend on the other rows of its passes.
"""

from typing import Any

import torch
from torch import Tensor, nn

from cascade.cpu.linear import Linear
from cascade.engine.memory import host_memory
from cascade.engine.network.llama import is_written_out

CONV1D = "Conv1D"  # Transformers' linear layer with transposed weights
LANES = 16  # numbers that a vectorised operation of PyTorch processes at once
FREE_FACTOR = 2  # free memory needed, in multiples of the weights: for copies of them, and as much for keys and values


@torch.no_grad()
def multiply_row_by_row(module: nn.Module) -> None:
    """Run its linear layers, in float32 or bfloat16 on a CPU, on copies of their weights in the layout of our kernels."""
    plain: list[Any] = [layer for layer in module.modules() if _is_plain(layer)]
    if host_memory() < FREE_FACTOR * sum(layer.weight.nbytes for layer in plain):
        return
    for layer in plain:
        layer.forward = Linear(layer.weight if isinstance(layer, nn.Linear) else layer.weight.t(), layer.bias)


def _linear(layer: nn.Module) -> bool:
    """Whether it is PyTorch's linear layer, or Transformers' with transposed weights."""
    return isinstance(layer, nn.Linear) or type(layer).__name__ == CONV1D


def _is_plain(layer: nn.Module) -> bool:
    """Whether a layer is a plain linear layer: not quantised, adapted or changed."""
    if not (type(layer) is nn.Linear or type(layer).__name__ == CONV1D) or "forward" in vars(layer):
        return False
    weight = layer.weight.data
    return type(weight) is Tensor and weight.device.type == "cpu" and weight.dtype in (torch.float32, torch.bfloat16)


def keeps_bits(network: Any, dtype: torch.dtype) -> bool:
    """Whether a row's logits probably have the same bits in every pass on a CPU, judged without weights.

    Experts (a weight tensor of three dimensions) get a varying number of rows from their router. PyTorch's vectorised
    operations process `LANES` numbers at once over all rows, and round the remaining ones differently; with other widths than
    multiples of `LANES` these lie in different rows.
    """
    if dtype is torch.float16 or any(weight.dim() > 2 for weight in network.parameters()):
        return False
    head = network.get_output_embeddings()
    layers = (layer for layer in network.modules() if _linear(layer) and layer is not head)
    widths = (layer.out_features if isinstance(layer, nn.Linear) else layer.nf for layer in layers)
    return is_written_out(network) or all(width % LANES == 0 for width in widths)
