"""Multi-level speculative decoding: the full model's text, exactly, several times faster.

>>> from cascade import Cascade, SamplingParams
>>> with Cascade.demo() as cascade:
...     completion = cascade.generate("def fibonacci(n):", SamplingParams(max_tokens=32, temperature=0))
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from cascade.answer import Chunk, Completion, Stats
from cascade.errors import CascadeError, ConfigError, InvalidRequest, ModelError, Overloaded, Unavailable
from cascade.messages import Logprobs
from cascade.params import Handling, SamplingParams, Speculation, Structured

if TYPE_CHECKING:
    from cascade.client import AsyncClient, Client
    from cascade.llm import LLM
    from cascade.local import Cascade

# imported on first use: some need PyTorch and some gRPC, and users of one need not install the other
LAZY = {"Cascade": "cascade.local", "LLM": "cascade.llm", "Client": "cascade.client", "AsyncClient": "cascade.client"}

__all__ = [
    "LLM",
    "AsyncClient",
    "Cascade",
    "CascadeError",
    "Chunk",
    "Client",
    "Completion",
    "ConfigError",
    "Handling",
    "InvalidRequest",
    "Logprobs",
    "ModelError",
    "Overloaded",
    "SamplingParams",
    "Speculation",
    "Stats",
    "Structured",
    "Unavailable",
]


def __getattr__(name: str) -> Any:
    if name in LAZY:
        return getattr(import_module(LAZY[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
