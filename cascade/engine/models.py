"""Loads the models of one process together: they share a device, and weights if one consists of layers of another."""

from collections.abc import Sequence
from functools import partial
from typing import Any, TypeAlias

import torch

from cascade.drafters import DrafterSpec
from cascade.engine.checkpoint import load
from cascade.engine.devices import UTILIZATION, cache_tokens
from cascade.engine.model import Model
from cascade.engine.threads import apart
from cascade.engine.vllm.model import VllmModel
from cascade.errors import ConfigError

Part: TypeAlias = tuple[str, tuple[int, ...]]  # path or hub id of a tier's model, and the layers that it keeps (empty: all)

Loaded: TypeAlias = Model | VllmModel


def load_all(parts: Sequence[Part], head: DrafterSpec | None, options: dict[str, Any]) -> list[Model]:
    """Load models on our own engine, bottom to top; caches share the memory that all weights leave.

    A model that consists of layers of another one shares its weights.
    """
    if head is not None:
        raise ConfigError(f"drafter is {head.kind!r}, which only vLLM can do: set engine to 'vllm', or remove it")
    full, _ = parts[-1]
    shared = {source for source, layers in parts if not layers}
    networks = {
        place: apart(partial(load, source, layers=layers, draft=source != full, **options))
        for place, (source, layers) in enumerate(parts)
        if not (layers and source in shared)
    }
    made = {place: apart(partial(Model, network)) for place, network in networks.items()}
    whole = {parts[place][0]: model for place, model in made.items() if not parts[place][1]}
    models = [
        made[place] if place in made else apart(partial(whole[source].cut, layers))
        for place, (source, layers) in enumerate(parts)
    ]
    share_memory(models)
    return models


def load_on_vllm(parts: Sequence[Part], head: DrafterSpec | None, options: dict[str, Any]) -> list[VllmModel]:
    """Load models on vLLM, bottom to top; on a GPU they share its memory evenly."""
    if options["device"]:
        raise ConfigError(
            f"device is {options['device']!r}, which is for our own engine: remove it, or set engine to 'cascade'"
        )
    given = {name: options[name] for name in ("dtype", "trust_remote_code") if options[name]}
    if torch.cuda.is_available():
        given["gpu_memory_utilization"] = UTILIZATION / len(parts)
    loaded: list[VllmModel] = []
    try:
        for place, (source, layers) in enumerate(parts, 1):
            last = place == len(parts)
            chosen: dict[str, Any] = {"layers": layers, "draft": source != parts[-1][0], "drafter": head if last else None}
            loaded.append(VllmModel(source, options=given, **chosen))
    except BaseException:
        for model in loaded:
            model.close()
        raise
    return loaded


def share_memory(models: Sequence[Model]) -> None:
    """Give models on one GPU the same number of positions; on a host each model already has its own share."""
    device = models[-1].device
    if device.type == "cuda":
        room = cache_tokens(device, sum(model.bytes_per_token for model in models), UTILIZATION)
        for model in models:
            model.cache_tokens = room
