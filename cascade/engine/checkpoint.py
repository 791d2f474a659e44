"""Describes a checkpoint by its configuration and the headers of its files, before any weight is read."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from cascade.engine.devices import held_dtype
from cascade.engine.gguf import described
from cascade.engine.model_config import FamilyConfig, context_len, read_config, unlike_attention
from cascade.engine.network import llama
from cascade.engine.network.attention import SIZES, Survey, register
from cascade.engine.network.llama import weight_shapes
from cascade.engine.network.published import keeps_bits
from cascade.engine.weights import check_files
from cascade.errors import ModelError, model_errors, reason

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel  # takes seconds

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
PACKED = {"fp8": 1.02, "bitsandbytes": 0.57}  # bytes a weight of linear layers that vLLM quantises while loading


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
