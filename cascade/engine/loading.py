"""From a path or hub id to a network on its device."""

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from cascade.engine.checkpoint import DTYPES, anatomy, skeleton
from cascade.engine.devices import default_device, free_bytes, processor
from cascade.engine.draft_vocab import restrict
from cascade.engine.gguf import converted
from cascade.engine.layers import renamed
from cascade.engine.memory import GIB
from cascade.engine.model_config import FamilyConfig, read_config
from cascade.engine.network import llama
from cascade.engine.network.plain import Plain
from cascade.engine.weights import unread
from cascade.errors import ModelError, reason

if TYPE_CHECKING:
    from transformers import PreTrainedModel  # takes seconds

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
    trainable: bool = False,
) -> Any:
    """Load weights to the device; a GGUF file is dequantised the first time. Returns a network.

    On a CPU a model of the Llama family is a `Plain` one, which takes seconds less to load. All others, and those that are to
    be ``trainable``, are networks of Transformers.

    ``dtype`` is by default the checkpoint's, or float32 for float16 on a CPU; ``device`` the GPU if there is one. Weights of
    other layers than ``layers`` are not read; by default all are. A ``draft`` model predicts only its draft vocabulary, if it
    has one, see `cascade.engine.draft_vocab`. Raises `ModelError`, before any weight is read if the checkpoint is damaged, is
    no causal language model, or does not fit into the memory of the device.
    """
    if dtype is not None and dtype not in DTYPES:
        raise ModelError(f"dtype is {dtype!r}: it must be one of {', '.join(DTYPES)}")
    place, chosen = find_device(source, device), DTYPES[dtype] if dtype else None
    hub: dict[str, Any] = {"revision": revision, "trust_remote_code": trust_remote_code}
    model = anatomy(source, dtype=dtype, device=place, layers=layers, **hub)
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
        ours = place.type == "cpu" and model.dtype in llama.DTYPES and not trainable
        if ours and (plain := _plain(source, layers, hub, model.dtype)) is not None:
            network, report = plain, dict[str, Any]()
        elif layers:
            network, report = _some(source, layers, hub, dtype=model.dtype, **options)
        else:
            from transformers import AutoModelForCausalLM

            network, report = AutoModelForCausalLM.from_pretrained(converted(source), dtype=chosen or "auto", **options, **hub)
    except torch.OutOfMemoryError as error:
        raise ModelError(f"The weights of {source!r} do not fit into the memory of {place}: {_ADVICE}") from error
    except ModelError:
        raise
    except Exception as error:  # a library or downloaded code may raise anything
        raise ModelError(f"No model can be loaded from {source!r} on {place}: {reason(error)}") from error
    if missing := sorted(report.get("missing_keys", ())):  # Transformers made them up
        raise ModelError(f"The checkpoint {source!r} lacks {len(missing)} weights of its model, such as {missing[0]}")
    if draft:
        restrict(network, converted(source), revision=revision)
    return network


def _plain(source: str, layers: Sequence[int], hub: dict[str, Any], dtype: torch.dtype) -> Plain | None:
    """The network of these layers; None if it is none of the Llama family, or the files hold other weights than it has."""
    config = read_config(source, layers=layers, **hub)
    if not isinstance(config, FamilyConfig):
        return None
    network = Plain(config)
    with _weights(source, layers, hub) as weights:
        return network if network.fill(weights, dtype) else None


def _some(source: str, layers: Sequence[int], hub: dict[str, Any], **options: Any) -> "tuple[PreTrainedModel, Any]":
    """Transformers' network of these layers, and what it tells of loading it."""
    config = read_config(source, layers=layers, published=True, **hub)
    kind = type(skeleton(config, source, hub["trust_remote_code"]))
    with _weights(source, layers, hub) as weights:
        network, report = kind.from_pretrained(None, config=config, state_dict=weights, **options)
    return network, report


@contextmanager
def _weights(source: str, layers: Sequence[int], hub: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Weights of these layers by their names in a model of them, all if none are given; see `unread`."""
    with unread(converted(source), hub["revision"]) as weights:
        names = {name: renamed(name, layers) if layers else name for name in weights}
        yield {place: weights[name] for name, place in names.items() if place is not None}


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
