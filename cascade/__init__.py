"""Multi-level speculative decoding: the full model's text, exactly, several times faster.

>>> from cascade import Cascade, SamplingParams
>>> with Cascade.demo() as cascade:
...     completion = cascade.generate("def fibonacci(n):", SamplingParams(max_tokens=32, temperature=0))
"""

import logging
from typing import TYPE_CHECKING, Any

from cascade.answer import Chunk, Completion, Stats
from cascade.errors import CascadeError, ConfigError, InvalidRequest, ModelError, Overloaded, Unavailable
from cascade.messages import Logprobs
from cascade.params import Handling, SamplingParams, Speculation, Structured

if TYPE_CHECKING:
    from cascade.local import Cascade

# at import torchao tells of every kernel that this machine cannot run, and PyTorch of how torchao registers its types
for _name in ("torchao", "torch.utils._pytree"):
    logging.getLogger(_name).setLevel(logging.ERROR)

__all__ = [
    "Cascade",
    "CascadeError",
    "Chunk",
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
    # clients import this package too and need no torch: the library is loaded when it is asked for
    if name == "Cascade":
        from cascade.local import Cascade

        return Cascade
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
