"""Models that the files of cluster/serve name, without their weights: what their publishers' config.json says of sizes."""

import json
from pathlib import Path
from typing import Any

from cascade.settings.config import CascadeConfig

QWEN = {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "vocab_size": 151936, "max_position_embeddings": 40960}
LLAMA = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 128256, "max_position_embeddings": 131072}
WIDTHS = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "head_dim", "tie_word_embeddings")
SIZES = {  # family, and the widths by their names; all have 8 heads of keys and values
    "Qwen/Qwen3-0.6B": (QWEN, (1024, 3072, 28, 16, 128, True)),
    "Qwen/Qwen3-4B": (QWEN, (2560, 9728, 36, 32, 128, True)),
    "Qwen/Qwen3-32B": (QWEN, (5120, 25600, 64, 64, 128, False)),
    "meta-llama/Llama-3.2-1B-Instruct": (LLAMA, (2048, 8192, 16, 32, 64, True)),
    "meta-llama/Llama-3.1-8B-Instruct": (LLAMA, (4096, 14336, 32, 32, 128, False)),
    "meta-llama/Llama-3.1-70B-Instruct": (LLAMA, (8192, 28672, 80, 64, 128, False)),
}


def here(config: CascadeConfig, folder: Path) -> CascadeConfig:
    """``config`` with the models that it names in folders of ``folder``."""
    values: dict[str, Any] = config.model_dump(mode="json")
    for tier in values["tiers"]:
        source = tier["model_loading_config"]["model_id"]
        family, widths = SIZES[source]
        place = folder / source
        place.mkdir(parents=True, exist_ok=True)
        said = {**family, **dict(zip(WIDTHS, widths, strict=True)), "num_key_value_heads": 8, "torch_dtype": "bfloat16"}
        (place / "config.json").write_text(json.dumps(said))
        tier["model_loading_config"]["model_source"] = str(place)
    return CascadeConfig.parse(values)
