"""Tiers of some of a model's layers on vLLM: they say what they say on our own engine, and read no other weights."""

from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from cascade import ConfigError
from cascade.drafters import DrafterSpec
from cascade.engine.model import Model
from cascade.engine.vllm.model import VllmModel
from tests.architectures import build
from tests.vllm.models import ARCHITECTURES, OPTIONS, Pair
from tests.vllm.test_laws import scores_alike

KEPT = (0, 2, 3)
WINDOWS: dict[str, Any] = {
    "llama": {},
    "gemma2": {"layer_types": ["sliding_attention", "full_attention", "full_attention", "sliding_attention"]},
}


@pytest.mark.parametrize(("name", "ranks"), [("llama", 1), ("llama", 2), ("gemma2", 1)])
def test_layers_score_as_on_our_own_engine(name: str, ranks: int, tmp_path: Path) -> None:
    """Guards names of weights, windows and every rank; a layer that is left out could not be read, for it is not whole."""
    network = build(name, num_hidden_layers=4, **ARCHITECTURES[name], **WINDOWS[name])
    network.config.architectures = [type(network).__name__]
    network.save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    spoiled = {name: part[:1].clone() if ".layers.1." in name else part.clone() for name, part in weights.items()}
    save_file(spoiled, tmp_path / "model.safetensors", metadata={"format": "pt"})
    options = {**OPTIONS, "tensor_parallel_size": ranks}
    with closing(VllmModel(str(tmp_path), cache_tokens=1024, layers=KEPT, options=options)) as model:
        own = Model.from_pretrained(str(tmp_path), dtype="float32", device="cpu", cache_tokens=1024, layers=KEPT)
        scores_alike(Pair(model, own), seed=len(name), passes=10 // ranks**2)


def test_a_head_reads_all_layers() -> None:
    """Guards heads, which read layers by number: one sentence before anything is loaded."""
    with pytest.raises(ConfigError, match="layers are 0-3 and drafter is 'eagle3', which reads all: remove one of the two"):
        VllmModel("anything", layers=range(4), drafter=DrafterSpec("eagle3", "a/b"), options={"dtype": "float32"})
