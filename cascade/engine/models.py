"""Models of one process, loaded together: they share a device, and weights where one of them is layers of another."""

from collections.abc import Sequence
from functools import partial
from typing import Any, TypeAlias

import torch

from cascade.drafters import DrafterSpec
from cascade.engine.checkpoint import anatomy
from cascade.engine.devices import UTILIZATION, cache_tokens
from cascade.engine.loading import find_device, load
from cascade.engine.model import Model
from cascade.engine.threads import apart
from cascade.engine.vllm.model import VllmModel
from cascade.errors import ConfigError

Part: TypeAlias = tuple[str, tuple[int, ...]]  # the path or hub id of a model, and those of its layers that a tier is

Loaded: TypeAlias = Model | VllmModel


def load_all(parts: Sequence[Part], head: DrafterSpec | None, options: dict[str, Any]) -> list[Model]:
    """Models of our own engine, bottom to top; caches are made when all weights are there, of what these leave.

    One that is layers of another one has no weights of its own.
    """
    if head is not None:
        raise ConfigError(f"drafter is {head.kind!r}, which only vLLM can do: set engine to 'vllm', or remove it")
    known = {"trust_remote_code": options["trust_remote_code"]}
    full, _ = parts[-1]
    device = find_device(full, options["device"])
    shared = {source for source, layers in parts if not layers}
    networks = {
        place: apart(partial(load, source, layers=layers, draft=source != full, **options))
        for place, (source, layers) in enumerate(parts)
        if not (layers and source in shared)
    }
    room = common_room(parts, device, dtype=options["dtype"], **known)
    made = {place: apart(partial(Model, network, owned=True, cache_tokens=room)) for place, network in networks.items()}
    whole = {parts[place][0]: model for place, model in made.items() if not parts[place][1]}
    return [
        made[place] if place in made else apart(partial(whole[source].cut, layers, cache_tokens=room))
        for place, (source, layers) in enumerate(parts)
    ]


def load_on_vllm(parts: Sequence[Part], head: DrafterSpec | None, options: dict[str, Any]) -> list[VllmModel]:
    """Models of vLLM, bottom to top; on a GPU they share its memory evenly."""
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


def common_room(parts: Sequence[Part], device: torch.device, **options: Any) -> int | None:
    """Positions that each of the models, whose weights are on a GPU already, may hold there.

    ``None`` on a host, where each has a share by itself. ``options`` are those of `cascade.engine.checkpoint.anatomy`.
    """
    if device.type != "cuda":
        return None
    sizes = [anatomy(source, layers=layers, **options).cache_bytes_per_token for source, layers in parts]
    return cache_tokens(device, sum(sizes), UTILIZATION)
