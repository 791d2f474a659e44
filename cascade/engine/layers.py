"""Models that keep only some layers of another, with its embeddings and final norm, and draft for it without training.

Zhang et al., Draft & Verify, arXiv 2309.08168; keeping only the first layers is an early exit. Layers are numbered from 0, and
keep their order.
"""

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, TypeAlias

from cascade.errors import ConfigError, ModelError

if TYPE_CHECKING:
    from transformers import PreTrainedConfig  # takes seconds

Layers: TypeAlias = int | str | Sequence[int | str]  # the number of first layers, or "0-11,20-31", or ["0-11", "20-31"]

SPAN = re.compile(r"\s*(\d+)(?:\s*-\s*(\d+))?\s*")
NUMBERED = re.compile(r"(?:^|\.)(?:layers|h|blocks)\.(\d+)\.")  # matches the names of layers' weights
ELSEWHERE = re.compile(r"vis|audio")  # matches names of weights of layers that read no text
PER_LAYER = "layer"  # occurs in names of configuration lists with an entry for each layer


def numbers(given: Layers) -> tuple[int, ...]:
    """Numbers of the ``given`` layers, increasing; raises `ConfigError` if the value is malformed or empty."""
    if isinstance(given, int) and not isinstance(given, bool) and given > 0:
        return tuple(range(given))
    parts = given.split(",") if isinstance(given, str) else given if isinstance(given, list | tuple) else []
    chosen: list[int] = []
    for part in parts:
        span = SPAN.fullmatch(str(part))
        if span is None or int(span[2] or span[1]) < int(span[1]):
            raise ConfigError(f"{part!r} are not layers: give numbers from 0 on and spans of them, such as [0-11, 20-31]")
        if chosen and int(span[1]) <= chosen[-1]:
            raise ConfigError(f"{part!r} overlaps with layers before it, or comes after later ones: give each once, in order")
        chosen += range(int(span[1]), int(span[2] or span[1]) + 1)
    if not chosen:
        raise ConfigError("there are no layers: give those to keep, such as [0-11, 20-31], or the number of first ones")
    return tuple(chosen)


def shown(layers: Sequence[int]) -> str:
    """Layers as text, such as ``0-11,20-31``."""
    starts = [layer for layer in layers if layer - 1 not in layers]
    ends = [layer for layer in layers if layer + 1 not in layers]
    return ",".join(str(start) if start == end else f"{start}-{end}" for start, end in zip(starts, ends, strict=True))


def cut_config(config: "PreTrainedConfig", layers: Sequence[int]) -> "PreTrainedConfig":
    """Let ``config`` describe a model of ``layers``, and return it; raises `ModelError` if the model lacks some of them."""
    text = config.get_text_config()
    total = int(text.num_hidden_layers)
    if layers[-1] >= total:
        raise ModelError(f"layers are {shown(layers)}, and the model has {total}: they go from 0 to {total - 1}")
    for name, value in vars(text).items():
        if PER_LAYER in name and isinstance(value, list | tuple) and len(value) == total:
            setattr(text, name, [value[layer] for layer in layers])
    text.num_hidden_layers = len(layers)
    return config


def renamed(name: str, layers: Sequence[int]) -> str | None:
    """The name in a model of ``layers`` of a weight of the whole model; ``None`` if its layer is left out."""
    match = NUMBERED.search(name)
    if match is None or ELSEWHERE.search(name):
        return name
    if (number := int(match[1])) not in layers:
        return None
    return f"{name[: match.start(1)]}{layers.index(number)}{name[match.end(1) :]}"
