"""A tier's passes on vLLM, with its models, attention backends, quantisation and parallel ranks."""

import importlib.util
import os
from collections.abc import Sequence
from typing import Any

from cascade.engine.layers import cut_config


def installed() -> bool:
    """Whether vLLM is installed; does not import it."""
    return importlib.util.find_spec("vllm") is not None


def batch_invariant() -> bool:
    """Whether vLLM is set to give a text's logits the same bits in every pass."""
    return bool(int(os.environ.get("VLLM_BATCH_INVARIANT", "0")))


def with_layers(config: Any, layers: Sequence[int]) -> Any:
    """See `cut_config`; vLLM first passes an empty configuration, which stays unchanged.

    It is in this module since workers import it before vLLM has bound its kernels, which fails once `cascade.cpu` is imported.
    """
    return cut_config(config, layers) if hasattr(config.get_text_config(), "num_hidden_layers") else config
