"""Loads a network from a path or hub id to its device."""

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import Tensor

from cascade.engine import draft_vocab
from cascade.engine.checkpoint import DTYPES, Anatomy, anatomy, skeleton
from cascade.engine.devices import default_device, free_bytes, processor
from cascade.engine.gguf import converted
from cascade.engine.layers import renamed
from cascade.engine.memory import GIB
from cascade.engine.model_config import FamilyConfig, read_config
from cascade.engine.network.llama import DTYPES as DTYPES_WRITTEN_OUT
from cascade.engine.network.llama import Llama, holds_exactly, is_written_out
from cascade.engine.network.published import Published
from cascade.engine.weights import unread
from cascade.errors import ModelError, model_errors, reason

if TYPE_CHECKING:
    from transformers import PreTrainedModel  # takes seconds

Network: TypeAlias = Llama | Published

_ADVICE = "take a larger device, a smaller dtype, or vLLM with quantization or tensor_parallel_size"

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
) -> Network:
    """Load weights to the device; a GGUF file is dequantised the first time.

    On a CPU, models of the Llama family become our own network, which loads seconds faster; others become Transformers'.

    ``dtype`` is by default the checkpoint's, or float32 for float16 on a CPU; ``device`` the GPU if there is one. Only
    ``layers`` are read; by default all. A ``draft`` model predicts only its draft vocabulary, if it has one, see
    `cascade.engine.draft_vocab`. Raises `ModelError` if the checkpoint is damaged, is not a causal language model, or does not
    fit into the memory of the device, in these cases before any weight is read.
    """
    hub: dict[str, Any] = {"revision": revision, "trust_remote_code": trust_remote_code}
    place, model = _fitting(source, dtype, device, layers, hub)
    config = read_config(source, layers=layers, **hub)
    ids = draft_vocab.tokens(config, converted(source), revision=revision) if draft else None
    with _explained(source, place):
        if place.type == "cpu" and model.dtype in DTYPES_WRITTEN_OUT and isinstance(config, FamilyConfig):
            with _weights(source, layers, hub) as weights:
                if holds_exactly(weights, config):
                    return Llama(config, weights, model.dtype, ids)
        return network_of(_module(source, dtype, place, model, layers, hub), ids)


def network_of(module: "PreTrainedModel", draft_ids: Tensor | None = None) -> Network:
    """The network that runs passes of a Transformers network: our own, if it supports that one. Raises `ModelError`.

    ``draft_ids`` ``[n]`` int64 are the only tokens that it predicts, by default all.
    """
    return Llama.of(module, draft_ids) if is_written_out(module) else Published(module, draft_ids)


def load_trainable(
    source: str, *, dtype: str | None = None, device: str | None = None, layers: Sequence[int] = ()
) -> "PreTrainedModel":
    """Load a network of Transformers that can be trained; otherwise like `load`."""
    hub: dict[str, Any] = {"revision": None, "trust_remote_code": False}
    place, model = _fitting(source, dtype, device, layers, hub)
    with _explained(source, place):
        return _module(source, dtype, place, model, layers, hub)


def _fitting(
    source: str, dtype: str | None, device: str | None, layers: Sequence[int], hub: dict[str, Any]
) -> tuple[torch.device, Anatomy]:
    """The device, and the anatomy of the model; raises `ModelError` if the model does not fit."""
    if dtype is not None and dtype not in DTYPES:
        raise ModelError(f"dtype is {dtype!r}: it must be one of {', '.join(DTYPES)}")
    place = find_device(source, device)
    model = anatomy(source, dtype=dtype, device=place, layers=layers, **hub)
    need, free = model.weight_bytes, free_bytes(place)
    if need > free:
        raise ModelError(
            f"The weights of {source!r} take {need / GIB:.2f} GiB and {place} has {free / GIB:.2f} GiB free: {_ADVICE}"
        )
    if model.widened is not None:
        log.info(
            "%s was saved in %s, which is slow on this processor (%s): it is held in %s, in twice the memory; "
            "set dtype to choose",
            *(source, model.widened, processor(), model.dtype),
        )
    return place, model


@contextmanager
def _explained(source: str, place: torch.device) -> Iterator[None]:
    with model_errors(f"No model can be loaded from {source!r} on {place}"):
        try:
            yield
        except torch.OutOfMemoryError as error:
            raise ModelError(f"The weights of {source!r} do not fit into the memory of {place}: {_ADVICE}") from error


def _module(
    source: str, dtype: str | None, place: torch.device, model: Anatomy, layers: Sequence[int], hub: dict[str, Any]
) -> "PreTrainedModel":
    """Transformers' network; raises `ModelError` if the checkpoint lacks weights of it."""
    from transformers import AutoModelForCausalLM

    options: dict[str, Any] = {"output_loading_info": True, "device_map": {"": place}}
    if layers:
        config = read_config(source, layers=layers, published=True, **hub)
        kind = type(skeleton(config, source, hub["trust_remote_code"]))
        with _weights(source, layers, hub) as weights:
            network, report = kind.from_pretrained(None, config=config, state_dict=weights, dtype=model.dtype, **options)
    else:
        named = model.dtype if dtype or model.widened else "auto"
        network, report = AutoModelForCausalLM.from_pretrained(converted(source), dtype=named, **options, **hub)
    if missing := sorted(report.get("missing_keys", ())):  # Transformers has initialised them at random
        raise ModelError(f"The checkpoint {source!r} lacks {len(missing)} weights of its model, such as {missing[0]}")
    return network


@contextmanager
def _weights(source: str, layers: Sequence[int], hub: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Weights of ``layers`` (by default all), by their names in a model of only these; see `unread`."""
    with unread(converted(source), hub["revision"]) as weights:
        names = {name: renamed(name, layers) if layers else name for name in weights}
        yield {place: weights[name] for name, place in names.items() if place is not None}


def find_device(source: str, device: str | None) -> torch.device:
    """The device for ``source``: ``device``, by default the GPU if there is one; raises `ModelError` if it does not exist."""
    try:
        place = torch.device(device or default_device())
        torch.empty(0, device=place)
    except (RuntimeError, AssertionError) as error:
        raise ModelError(f"No model can be loaded from {source!r} on {device}: {reason(error)}") from error
    return place
