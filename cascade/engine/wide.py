"""bfloat16 on processors with matrix tiles: products take it, and whatever lies between them is float32.

Weights are the checkpoint's, a product rounds what it multiplies, and keys and values are rounded as they are kept, as in a
network in bfloat16. Hidden states and norms are not: what lies between products is a small part of a pass. A network and its
head are both wide, or none is: they share hidden states.
"""

from functools import partial
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn

from cascade.engine.memory import host_memory
from cascade.engine.packed_linear import FREE_FACTOR, is_plain, mixes
from cascade.native.matrix_tile import has_matrix_tiles

_wide: WeakSet[nn.Module] = WeakSet()  # those that were claimed


def could_be_wide(network: nn.Module, dtype: torch.dtype) -> bool:
    """Whether a network of ``dtype`` is served so on this processor, told without weights. Experts are not packed."""
    return dtype is torch.bfloat16 and has_matrix_tiles() and not mixes(network)


def claim(network: nn.Module) -> bool:
    """Decide once whether ``network`` is to be wide, before its head is loaded; its weights are left as they are."""
    if network in _wide:
        return True
    weights = list(network.parameters())
    if not could_be_wide(network, weights[0].dtype):
        return False
    plain = all(type(weight.data) is Tensor and weight.device.type == "cpu" for weight in weights)
    others = [m for m in network.modules() if isinstance(m, nn.Linear) and not is_plain(m)]  # quantised or adapted
    if not plain or others or host_memory() < FREE_FACTOR * sum(weight.nbytes for weight in weights):
        return False
    _wide.add(network)
    return True


def is_wide(network: nn.Module) -> bool:
    """Whether it was claimed, see `claim`."""
    return network in _wide


@torch.inference_mode(False)
@torch.no_grad()
def widen(network: nn.Module) -> None:
    """Hold all but matrices in float32, in place, and have embeddings give float32. The linear layers are to be packed."""
    for module in network.modules():
        if isinstance(module, nn.Embedding):
            if "forward" not in vars(module):
                module.forward = partial(_embed, module)  # type: ignore[method-assign]
        elif not isinstance(module, nn.Linear) and not is_plain(module):
            for name, part in [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]:
                if part.dtype is torch.bfloat16:  # another network may hold the same tensor
                    setattr(module, name, nn.Parameter(part.float(), False) if isinstance(part, nn.Parameter) else part.float())


def _embed(module: Any, *given: Any, **named: Any) -> Tensor:
    out: Tensor = type(module).forward(module, *given, **named)
    return out.float()
