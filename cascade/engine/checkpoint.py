"""Describes a checkpoint by its configuration and the headers of its files, before any weight is read; loads its network."""

import logging
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import Tensor, nn

from cascade.engine import draft_vocab
from cascade.engine.devices import default_device, free_bytes, held_dtype, processor
from cascade.engine.gguf import converted, described
from cascade.engine.layers import renamed
from cascade.engine.memory import GIB
from cascade.engine.model_config import FamilyConfig, context_len, read_config, unlike_attention
from cascade.engine.network import llama
from cascade.engine.network.attention import SIZES, Survey, register
from cascade.engine.network.llama import Llama, holds_exactly, is_written_out, weight_shapes
from cascade.engine.network.published import Published, keeps_bits
from cascade.engine.weights import check_files, unread
from cascade.errors import ModelError, model_errors, reason

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel  # takes seconds

Network: TypeAlias = Llama | Published

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
PACKED = {"fp8": 1.02, "bitsandbytes": 0.57}  # bytes a weight of linear layers that vLLM quantises while loading
_ADVICE = "take a larger device, a smaller dtype, or vLLM with quantization or tensor_parallel_size"

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Anatomy:
    parameters: int
    weight_bytes: int  # bytes in this dtype and quantisation
    dtype: torch.dtype
    widened: torch.dtype | None  # the checkpoint's dtype, if by default the device holds it in a wider one
    cache_bytes_per_token: int  # keys and values of all layers
    context_len: int
    same_bits: bool  # whether logits should have the same bits in every pass on the device


def anatomy(
    source: str,
    *,
    dtype: str | None = None,
    device: torch.device | None = None,
    quantization: str | None = None,
    revision: str | None = None,
    trust_remote_code: bool = False,
    layers: Sequence[int] = (),
    sizes_only: bool = False,
) -> Anatomy:
    """Describe the model at a path or hub id, or only its ``layers``; raises `ModelError` if it is damaged or cannot be
    served.

    With ``sizes_only`` it may be a model that only another engine can serve. ``dtype`` is by default the checkpoint's, see
    `held_dtype`.
    """
    config = read_config(source, revision=revision, trust_remote_code=trust_remote_code, layers=layers)
    folder = Path(described(source))
    if folder.is_dir():
        check_files(folder)
    text = config.get_text_config()
    named: Any = getattr(text, "dtype", None)
    saved = named if isinstance(named, torch.dtype) else torch.float32
    chosen = DTYPES[dtype] if dtype else saved
    quantised = getattr(config, "quantization_config", None) is not None  # quantised weights have dtypes of their own
    if dtype is None and device is not None and not quantised:
        chosen = held_dtype(saved, device)
    on_cpu = device is not None and device.type == "cpu"
    if isinstance(config, FamilyConfig):
        sizes = {name: math.prod(shape) for name, shape in weight_shapes(config).items()}
        parameters = sum(sizes.values())
        linear = sum(size for name, size in sizes.items() if "_proj.weight" in name)
        cache_size, same_bits = _nominal_size(text), on_cpu and chosen in llama.DTYPES
    else:
        network = skeleton(config, source, trust_remote_code)
        if not sizes_only and (problem := unlike_attention(config)):
            raise ModelError(f"{type(network).__name__} cannot be served: {problem}")
        kept = network.get_output_embeddings()
        parameters = sum(weight.numel() for weight in network.parameters())
        linear = sum(m.weight.numel() for m in network.modules() if isinstance(m, nn.Linear) and m is not kept)
        cache_size = _nominal_size(text) if sizes_only else _cache_size(network, text)
        same_bits = on_cpu and keeps_bits(network, chosen)
    less = chosen.itemsize - PACKED.get(quantization or "", chosen.itemsize)
    return Anatomy(
        parameters=parameters,
        weight_bytes=round(parameters * chosen.itemsize - linear * less),
        dtype=chosen,
        widened=saved if dtype is None and chosen is not saved else None,
        cache_bytes_per_token=cache_size * chosen.itemsize,
        context_len=context_len(config),
        same_bits=same_bits,
    )


def skeleton(config: "PreTrainedConfig", source: str, trust_remote_code: bool) -> "PreTrainedModel":
    """Transformers' network without memory for weights, in bfloat16, which all kernels accept."""
    from transformers import AutoModelForCausalLM

    with model_errors(f"No causal language model can be built from the config of {source!r}"), torch.device("meta"):
        network: PreTrainedModel = AutoModelForCausalLM.from_config(
            config, dtype=torch.bfloat16, trust_remote_code=trust_remote_code
        )
    network.tie_weights()
    return network.eval()


def _cache_size(network: "PreTrainedModel", text: Any) -> int:
    """Keys and values of a token in all layers, as a count of numbers; raises `ModelError` if a layer has its own attention."""
    survey = Survey()
    layers = int(text.num_hidden_layers)
    ids = torch.zeros(1, 2, dtype=torch.long, device="meta")
    register()
    try:
        network.set_attn_implementation(SIZES)
        if network.config.get_text_config()._attn_implementation == SIZES:  # else the model insists on its own attention
            with torch.inference_mode():
                network(input_ids=ids, use_cache=False, cascade_pass=survey)
    except (RuntimeError, NotImplementedError):  # dynamic RoPE and routers read numbers, which do not exist without weights
        sizes = _sizes(survey)
        return sum(sizes) * layers // len(sizes) if sizes else _nominal_size(text)
    except (TypeError, AttributeError, LookupError, ValueError) as error:
        raise ModelError(
            f"{type(network).__name__} cannot be served: it does not take packed rows ({reason(error)})"
        ) from error
    if len(sizes := _sizes(survey)) != layers:
        raise ModelError(
            f"{type(network).__name__} cannot be served: {len(sizes)} of its {layers} layers "
            "use the attention interface of Transformers"
        )
    return sum(sizes)


def _sizes(survey: Survey) -> list[int]:
    return [kv_heads * (key_size + value_size) for _, kv_heads, key_size, value_size in survey.heads.values()]


def _nominal_size(text: Any) -> int:
    heads = int(getattr(text, "num_key_value_heads", None) or text.num_attention_heads)
    width = int(getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads)
    return 2 * int(text.num_hidden_layers) * heads * width


# loading


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
        if place.type == "cpu" and model.dtype in llama.DTYPES and isinstance(config, FamilyConfig):
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
