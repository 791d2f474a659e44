"""What the configuration of a model says. Imports no code of models, which would take seconds."""

from collections.abc import Sequence

from transformers import AutoConfig, PreTrainedConfig

from cascade.engine.gguf import described
from cascade.engine.layers import cut_config
from cascade.engine.tokenizer import check_source
from cascade.errors import ModelError, reason

NO_LIMIT = 2**20  # positions of a model that names none
LAYER_TYPES = {"full_attention", "sliding_attention"}  # the types that are served


def read_config(
    source: str, *, revision: str | None = None, trust_remote_code: bool = False, layers: Sequence[int] = ()
) -> PreTrainedConfig:
    """The configuration of a folder, a GGUF file or a hub id, or that of some of its ``layers``; raises `ModelError`."""
    folder = described(source)
    check_source(folder)
    try:
        config: PreTrainedConfig = AutoConfig.from_pretrained(folder, revision=revision, trust_remote_code=trust_remote_code)
    except Exception as error:  # a library or downloaded code may raise anything
        raise ModelError(f"{source!r} has no readable config: {reason(error)}") from error
    return cut_config(config, layers) if layers else config


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
