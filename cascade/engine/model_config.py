"""What the configuration of a model says. Imports no code of models, which would take seconds."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from transformers import AutoConfig, PreTrainedConfig

from cascade.engine.gguf import described
from cascade.engine.layers import cut_config
from cascade.engine.tokenizer import check_source
from cascade.errors import ModelError, reason

NO_LIMIT = 2**20  # positions of a model that names none
ADAPTER = "adapter_config.json"  # a folder with it is a model with an adapter
ROPES = ("default", "linear", "llama3", "yarn")  # kinds of positions whose angles do not depend on how long a text is
NEEDED: dict[str, tuple[str, ...]] = {"llama": (), "mistral": ("sliding_window",), "qwen2": (), "qwen3": ("head_dim",)}
"""Types of models of the Llama family, and what the configuration of each names beside `SIZES`."""
SIZES = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "max_position_embeddings",
    "rms_norm_eps",
)
CHANGES = ("auto_map", "quantization_config", "partial_rotary_factor", "per_layer_config")  # keys of models that are changed
DEFAULTS = {"hidden_act": "silu", "tie_word_embeddings": False}  # of all configurations of the family
LAYER_TYPES = {"full_attention", "sliding_attention"}  # the types that are served


class FamilyConfig(PreTrainedConfig):  # type: ignore[misc]  # Transformers has no types
    """The configuration of a model of the Llama family, which we run ourselves.

    Transformers' own classes of these configurations import the code of models, by way of their validators.
    """

    rope_parameters: Any = None


def read_config(
    source: str,
    *,
    revision: str | None = None,
    trust_remote_code: bool = False,
    layers: Sequence[int] = (),
    published: bool = False,
) -> PreTrainedConfig:
    """The configuration of a folder, a GGUF file or a hub id, or that of some of its ``layers``; raises `ModelError`.

    It is a `FamilyConfig` where that is enough, or always Transformers' own if ``published``.
    """
    folder = described(source)
    check_source(folder)
    try:
        values, _ = PreTrainedConfig.get_config_dict(folder, revision=revision)
        config: PreTrainedConfig
        if not published and is_of_family(values) and not Path(folder, ADAPTER).exists():
            config = FamilyConfig(**DEFAULTS | values)
        else:
            config = AutoConfig.from_pretrained(folder, revision=revision, trust_remote_code=trust_remote_code)
    except Exception as error:  # a library or downloaded code may raise anything
        raise ModelError(f"{source!r} has no readable config: {reason(error)}") from error
    return cut_config(config, layers) if layers else config


def is_of_family(values: Mapping[str, Any]) -> bool:
    """Whether a configuration is of a model of the Llama family that no code, quantisation or activation of its own changes.

    It must name all that Transformers would fill in by itself.
    """
    kind = values.get("model_type")
    if kind not in NEEDED or any(name not in values for name in (*SIZES, *NEEDED[kind])):
        return False
    if any(values.get(name) is not None for name in CHANGES) or values.get("hidden_act", "silu") != "silu":
        return False
    if kind in ("qwen2", "qwen3") and values.get("use_sliding_window") and not values.get("layer_types"):
        return False
    rope = values.get("rope_parameters") or values.get("rope_scaling") or {}
    return ("rope_theta" in rope or "rope_theta" in values) and rope.get("rope_type", rope.get("type", "default")) in ROPES


def unlike_attention(config: PreTrainedConfig) -> str | None:
    """Why a model is refused whose layers select or compress what is far back, which the short probe at load cannot show."""
    text = config.get_text_config()
    if strange := sorted(set(getattr(text, "layer_types", None) or ()) - LAYER_TYPES):
        return f"it has layers of type {strange[0]}, which are neither full nor sliding attention"
    if any(name.startswith("index_topk") for name in text.to_dict()):
        return "its layers attend to what an indexer selects"
    return None


def context_len(config: PreTrainedConfig) -> int:
    """Positions a model was made for, and up to which its logits do not depend on how long the text will be."""
    text = config.get_text_config()
    limits = [getattr(text, "max_position_embeddings", None) or NO_LIMIT]
    rope = getattr(text, "rope_parameters", None) or {}
    for part in (rope, *(part for part in rope.values() if isinstance(part, dict))):  # some have one per kind of layer
        if part.get("rope_type") == "longrope":  # other frequencies for all positions once one is beyond
            limits.append(part.get("original_max_position_embeddings") or NO_LIMIT)
    return int(min(limits))
