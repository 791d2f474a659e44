"""Reads some layers of a checkpoint for vLLM. Workers import it instead of `cascade.engine.vllm.worker`, as it needs vLLM."""

import copy
from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn
from vllm.model_executor.model_loader import register_model_loader
from vllm.model_executor.model_loader.default_loader import DefaultModelLoader

from cascade.engine.layers import renamed
from cascade.engine.vllm.worker import LAYERS, CascadeWorker

__all__ = ["CascadeWorker", "LayersLoader"]


@register_model_loader(LAYERS)
class LayersLoader(DefaultModelLoader):  # type: ignore[misc]  # vLLM may be missing
    """vLLM's loader for a model of some layers of a checkpoint; weights of other layers are not read."""

    def __init__(self, load_config: Any) -> None:
        load_config = copy.copy(load_config)
        more = dict(load_config.model_loader_extra_config)
        self._layers: tuple[int, ...] = tuple(more.pop(LAYERS))
        load_config.load_format, load_config.model_loader_extra_config = "auto", more
        super().__init__(load_config)

    def get_all_weights(self, model_config: Any, model: nn.Module) -> Iterator[tuple[str, Tensor]]:
        """Weights, with their names in the model of these layers."""
        for name, weight in super().get_all_weights(model_config, model):
            if (place := renamed(name, self._layers)) is not None:
                yield place, weight
