"""A tier's pass on vLLM: its models, attention backends, quantisation and parallel ranks, driven pass by pass."""

import importlib.util
import os


def installed() -> bool:
    """Whether vLLM can be imported here. Imports nothing."""
    return importlib.util.find_spec("vllm") is not None


def batch_invariant() -> bool:
    """Whether vLLM is told to give a text's logits the same bits in every pass."""
    return bool(int(os.environ.get("VLLM_BATCH_INVARIANT", "0")))
