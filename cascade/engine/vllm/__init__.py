"""A tier's pass on vLLM: its models, attention backends, quantisation and parallel ranks, driven pass by pass."""

import importlib.util


def installed() -> bool:
    """Whether vLLM can be imported here. Imports nothing."""
    return importlib.util.find_spec("vllm") is not None
