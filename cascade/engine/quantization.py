"""Weights in fewer bits, by what Transformers passes on to: torchao and bitsandbytes.

All methods are weight-only, or scale every token by itself: what a row scores never depends on its companions in a pass.
"""

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from cascade.engine.devices import has_bfloat16
from cascade.errors import ModelError


@dataclass(frozen=True, slots=True)
class Method:
    """One way to hold the weights of linear layers; embeddings and the output layer stay as they are."""

    bytes_per_weight: float  # scales included
    library: str  # that must be installed
    devices: tuple[str, ...]
    config: Callable[[torch.device], Any]  # Transformers' quantization config


def quantizer(name: str, device: torch.device, dtype: torch.dtype | None = None) -> Any:
    """Transformers' config of the method ``name``; raises `ModelError` if it is unknown or cannot run here."""
    if name not in METHODS:
        raise ModelError(f"quantization is {name!r}: it must be one of {', '.join(METHODS)}")
    method = METHODS[name]
    if device.type not in method.devices:
        raise ModelError(
            f"quantization is {name!r}, which runs on {' and '.join(method.devices)} and not on {device}: take nf4 or int8"
        )
    if importlib.util.find_spec(method.library) is None:
        raise ModelError(f"quantization is {name!r}, which needs {method.library}: pip install {method.library}")
    if name == "int4" and dtype not in (None, torch.bfloat16):
        raise ModelError("quantization is 'int4', whose kernels take bfloat16 alone: set dtype to bfloat16")
    return method.config(device)


def nbytes(tensor: torch.Tensor) -> int:
    """Memory of a weight, of what it is packed into if it is quantised."""
    if hasattr(tensor, "__tensor_flatten__"):  # torchao's tensors consist of others
        return sum(nbytes(getattr(tensor, name)) for name in tensor.__tensor_flatten__()[0])
    state = getattr(tensor, "quant_state", None)  # bitsandbytes keeps scales beside
    return tensor.nbytes + (state.absmax.nbytes if state is not None else 0)


def _int8(device: torch.device) -> Any:
    from torchao.quantization import Int8WeightOnlyConfig
    from transformers import TorchAoConfig

    return TorchAoConfig(Int8WeightOnlyConfig())


def _int4(device: torch.device) -> Any:
    from torchao.quantization import Int4WeightOnlyConfig
    from transformers import TorchAoConfig

    return TorchAoConfig(Int4WeightOnlyConfig(group_size=128, int4_packing_format="tile_packed_to_4d"))


def _fp8(device: torch.device) -> Any:
    from torchao.quantization import Float8DynamicActivationFloat8WeightConfig, Float8WeightOnlyConfig, PerRow
    from transformers import TorchAoConfig

    if device.type == "cuda":  # products in 8 bits, a scale for each token
        return TorchAoConfig(Float8DynamicActivationFloat8WeightConfig(granularity=PerRow()))
    return TorchAoConfig(Float8WeightOnlyConfig())


def _nf4(device: torch.device) -> Any:
    from transformers import BitsAndBytesConfig

    computed = torch.bfloat16 if device.type == "cuda" or has_bfloat16() else torch.float32
    return BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=computed)


METHODS = {
    "int8": Method(1.02, "torchao", ("cpu", "cuda"), _int8),
    "int4": Method(0.54, "torchao", ("cuda",), _int4),
    "fp8": Method(1.02, "torchao", ("cpu", "cuda"), _fp8),
    "nf4": Method(0.57, "bitsandbytes", ("cpu", "cuda"), _nf4),
}
