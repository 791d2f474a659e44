"""A tier's pass on vLLM: its models, attention backends, quantisation and parallel ranks, driven pass by pass."""

import importlib.util
import os
from collections.abc import Sequence
from typing import Any

from cascade.engine.layers import cut_config


def installed() -> bool:
    """Whether vLLM can be imported here. Imports nothing."""
    return importlib.util.find_spec("vllm") is not None


def batch_invariant() -> bool:
    """Whether vLLM is told to give a text's logits the same bits in every pass."""
    return bool(int(os.environ.get("VLLM_BATCH_INVARIANT", "0")))


def with_layers(config: Any, layers: Sequence[int]) -> Any:
    """See `cut_config`; vLLM asks about an empty configuration first, which stays as it is.

    It stands here since workers import it before vLLM has bound its kernels, which it could not do after `cascade.cpu`.
    """
    return cut_config(config, layers) if hasattr(config.get_text_config(), "num_hidden_layers") else config
