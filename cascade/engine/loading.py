"""From a path or hub id to a network on its device."""

import logging
from collections.abc import Sequence
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from cascade.engine.checkpoint import DTYPES, anatomy, skeleton
from cascade.engine.devices import UTILIZATION, cache_tokens, default_device, free_bytes, processor
from cascade.engine.draft_vocab import restrict
from cascade.engine.gguf import converted
from cascade.engine.layers import renamed
from cascade.engine.memory import GIB
from cascade.engine.model_config import read_config
from cascade.engine.weights import unread
from cascade.errors import ModelError, reason

log = logging.getLogger(__name__)


def load(
    source: str,
    *,
    dtype: str | None = None,
    device: str | None = None,
    revision: str | None = None,
    trust_remote_code: bool = False,
    layers: Sequence[int] = (),
    draft: bool = False,
) -> PreTrainedModel:
    """Load weights shard by shard to the device, with a progress bar; a GGUF file is dequantised the first time.

    ``dtype`` is by default the checkpoint's, or float32 for float16 on a CPU; ``device`` the GPU if there
    is one. Weights of other layers than ``layers`` are not read; by default all are. A ``draft`` model says its draft
    vocabulary alone, if it has one, see `cascade.engine.draft_vocab`. Raises `ModelError`, before any weight is read if the
    checkpoint is damaged, is no causal language model, or does not fit into the memory of the device.
    """
    if dtype is not None and dtype not in DTYPES:
        raise ModelError(f"dtype is {dtype!r}: it must be one of {', '.join(DTYPES)}")
    place, chosen = find_device(source, device), DTYPES[dtype] if dtype else None
    known: dict[str, Any] = {"revision": revision, "trust_remote_code": trust_remote_code}
    model = anatomy(source, dtype=dtype, device=place, layers=layers, **known)
    need, free = model.weight_bytes, free_bytes(place)
    if need > free:
        raise ModelError(
            f"The weights of {source!r} take {need / GIB:.2f} GiB and {place} has {free / GIB:.2f} GiB free: {_ADVICE}"
        )
    if model.widened is not None:
        chosen = model.dtype
        log.info(_WIDENED, source, model.widened, processor(), chosen)
    try:
        options = {"output_loading_info": True, "device_map": {"": place}}
        if layers:
            network, report = _some(source, layers, known, dtype=model.dtype, **options)
        else:
            network, report = AutoModelForCausalLM.from_pretrained(
                converted(source), dtype=chosen or "auto", **options, **known
            )
    except torch.OutOfMemoryError as error:
        raise ModelError(f"The weights of {source!r} do not fit into the memory of {place}: {_ADVICE}") from error
    except ModelError:
        raise
    except Exception as error:  # a library or downloaded code may raise anything
        raise ModelError(f"No model can be loaded from {source!r} on {place}: {reason(error)}") from error
    if missing := sorted(report["missing_keys"]):  # Transformers made them up
        raise ModelError(f"The checkpoint {source!r} lacks {len(missing)} weights of its model, such as {missing[0]}")
    if draft:
        restrict(network, converted(source), revision=revision)
    return network


def _some(source: str, layers: Sequence[int], known: dict[str, Any], **options: Any) -> tuple[PreTrainedModel, Any]:
    """The network of these layers, and what Transformers tells of loading it."""
    config = read_config(source, layers=layers, **known)
    with unread(converted(source), known["revision"]) as weights:
        names = {name: place for name in weights if (place := renamed(name, layers)) is not None}
        state = {place: weights[name] for name, place in names.items()}
        kind = type(skeleton(config, source, known["trust_remote_code"]))
        network, report = kind.from_pretrained(None, config=config, state_dict=state, **options)
    return network, report


def common_room(sources: Sequence[tuple[str, Sequence[int]]], device: torch.device, **options: Any) -> int | None:
    """Positions that each of the models of ``sources``, whose weights are on a GPU already, may hold there.

    ``sources`` are paths or hub ids, and layers of each, all if none are given.

    ``None`` on a host, where each has a share by itself. ``options`` are those of `cascade.engine.checkpoint.anatomy`.
    """
    if device.type != "cuda":
        return None
    sizes = [anatomy(source, layers=layers, **options).cache_bytes_per_token for source, layers in sources]
    return cache_tokens(device, sum(sizes), UTILIZATION)


_WIDENED = (  # checkpoint, its dtype, processor, dtype
    "%s was saved in %s, which is slow on this processor (%s): it is held in %s, in twice the memory; set dtype to choose"
)
_ADVICE = "take a larger device, a smaller dtype, or vLLM with quantization or tensor_parallel_size"


def find_device(source: str, device: str | None) -> torch.device:
    """Where ``source`` is loaded to: ``device``, or the GPU if there is one; raises `ModelError` if it is not there."""
    try:
        place = torch.device(device or default_device())
        torch.empty(0, device=place)
    except (RuntimeError, AssertionError) as error:
        raise ModelError(f"No model can be loaded from {source!r} on {device}: {reason(error)}") from error
    return place
