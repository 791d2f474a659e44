"""Networks on the weights of another one: copies, and networks of some of its layers."""

import copy
from collections.abc import Sequence
from typing import Any, TypeVar

from torch import nn

from cascade.engine.layers import cut_config
from cascade.errors import ModelError

Network = TypeVar("Network", bound=nn.Module)


def stack(network: Any) -> nn.ModuleList:
    """The layers of a network; raises `ModelError` if they are not in one list."""
    total = network.config.get_text_config().num_hidden_layers
    for part in network.modules():
        if isinstance(part, nn.ModuleList) and len(part) == total:
            return part
    raise ModelError(f"{type(network).__name__} has no list of its {total} layers, of which some could be left out")


def copied(network: Network) -> Network:
    """Another network, whose weights and kernels are the same objects."""
    kernels = [kernel for module in network.modules() if (kernel := vars(module).get("forward")) is not None]
    memo: dict[int, Any] = {id(part): part for part in (*network.parameters(), *network.buffers(), *kernels)}
    return copy.deepcopy(network, memo)


def cut(network: Network, layers: Sequence[int]) -> Network:
    """Another network of ``layers`` of this one, whose weights are the same tensors; raises `ModelError`."""
    other = copied(network)
    every = stack(other)
    cut_config(other.config, layers)
    kept = [every[layer] for layer in layers]
    del every[:]
    every.extend(kept)
    for place, layer in enumerate(kept):
        for part in layer.modules():
            if hasattr(part, "layer_idx"):
                part.layer_idx = place  # type: ignore[assignment]  # no module
    return other
