"""Small random models on vLLM and on our own engine."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cascade import SamplingParams
from cascade.engine.model import Model
from cascade.engine.vllm.model import VllmModel
from tests.architectures import build

GREEDY = SamplingParams(temperature=0, seed=0)
OPTIONS: dict[str, Any] = {"dtype": "float32", "enforce_eager": True, "block_size": 32}
WIDE: dict[str, Any] = {"hidden_size": 64, "head_dim": 32, "intermediate_size": 96}
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "llama": WIDE,
    "qwen2": {"hidden_size": 128},
    "qwen3": WIDE,
    "mistral": {**WIDE, "sliding_window": 8},
    "mixtral": {"hidden_size": 128, "sliding_window": None},
    "gemma2": WIDE,
    "phi3": {"hidden_size": 128, "sliding_window": None},
    "granite": {"hidden_size": 128},
}


@dataclass(frozen=True)
class Pair:
    """The same weights on both engines."""

    vllm: VllmModel
    own: Model


def saved(name: str, folder: Path) -> str:
    network = build(name, **ARCHITECTURES[name])
    network.config.architectures = [type(network).__name__]
    network.save_pretrained(folder)
    return str(folder)


def started(source: str, cache_tokens: int = 1024, **options: Any) -> VllmModel:
    return VllmModel(source, cache_tokens=cache_tokens, options={**OPTIONS, **options})
