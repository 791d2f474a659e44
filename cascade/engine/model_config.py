"""Reads the configuration of a model, without importing code of models, which would take seconds."""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, TypeAlias

import torch

from cascade.engine.generation import CONFIG, read_json
from cascade.engine.gguf import described
from cascade.engine.layers import cut_config
from cascade.engine.tokenizer import check_source
from cascade.errors import model_errors

if TYPE_CHECKING:
    from transformers import PreTrainedConfig  # takes most of a second

    Config: TypeAlias = "FamilyConfig | PreTrainedConfig"

NO_LIMIT = 2**20  # positions of a model without a limit in its configuration
ADAPTER = "adapter_config.json"  # a folder with it is a model with an adapter
ROPES = ("default", "linear", "llama3", "yarn")  # kinds of positions whose angles do not depend on how long a text is
NEEDED: dict[str, tuple[str, ...]] = {"llama": (), "mistral": ("sliding_window",), "qwen2": (), "qwen3": ("head_dim",)}
"""Types of models of the Llama family, and the keys of each one's configuration besides `SIZES`."""
SIZES = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "max_position_embeddings",
)
CHANGES = {"auto_map", "quantization_config", "partial_rotary_factor", "per_layer_config"}  # keys of modified models
DEFAULTS = {"hidden_act": "silu", "tie_word_embeddings": False}  # values of absent keys
ORIGINAL = "original_max_position_embeddings"  # positions that a model was made for before its frequencies were scaled
LAYER_TYPES = {"full_attention", "sliding_attention"}  # the types that are served


class FamilyConfig:
    """The configuration of a model of the Llama family for our own network; its fields are those of Transformers' classes.

    It exists because importing Transformers takes most of a second, and its classes for these configurations three.
    """

    model_type: str
    hidden_act: str
    tie_word_embeddings: bool

    def __init__(self, values: Mapping[str, Any]) -> None:
        """``values`` must satisfy `is_of_family`."""
        vars(self).update(DEFAULTS | dict(values))
        saved = values.get("dtype") or values.get("torch_dtype")
        self.dtype = getattr(torch, saved, None) if isinstance(saved, str) else None
        self.rope_parameters = _rope(values)

    @property
    def head_size(self) -> int:
        """Size of a query, a key or a value of one head."""
        return int(getattr(self, "head_dim", None) or self.hidden_size // self.num_attention_heads)

    @property
    def windows(self) -> list[int | None]:
        """The number of positions that a query sees in each layer, its own included; None for all."""
        if self.model_type in ("llama", "mistral"):
            window = self.sliding_window if self.model_type == "mistral" else None
            return [window] * self.num_hidden_layers
        kinds = getattr(self, "layer_types", None) or ["full_attention"] * self.num_hidden_layers
        return [self.sliding_window if kind == "sliding_attention" else None for kind in kinds]

    @property
    def rotation(self) -> tuple[torch.Tensor, float]:
        """Frequencies of the rotary embedding, ``[head_size / 2]``, and a factor on cosines and sines."""
        kind = self.rope_parameters["rope_type"]
        if kind == "default":
            size = self.head_size
            return 1.0 / (self.rope_parameters["rope_theta"] ** (torch.arange(0, size, 2, dtype=torch.float) / size)), 1.0
        from transformers import PreTrainedConfig  # takes most of a second
        from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

        fields = self.to_dict()
        fields.pop("rope_scaling", None)  # would replace `rope_parameters`, without a theta
        frequencies, factor = ROPE_INIT_FUNCTIONS[kind](PreTrainedConfig(**fields))
        return frequencies, factor

    def get_text_config(self) -> Self:
        """The configuration itself, which has no other parts."""
        return self

    def to_dict(self) -> dict[str, Any]:
        return dict(vars(self))

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"the configuration has no {name}")  # tells type checkers that it may have any


def read_config(
    source: str,
    *,
    revision: str | None = None,
    trust_remote_code: bool = False,
    layers: Sequence[int] = (),
    published: bool = False,
) -> "Config":
    """The configuration of a folder, a GGUF file or a hub id, or that of some of its ``layers``; raises `ModelError`.

    It is a `FamilyConfig` if that suffices, or with ``published`` always Transformers' own class.
    """
    folder = described(source)
    check_source(folder)
    config: Config | None = None
    if not (published or Path(folder, ADAPTER).exists()):
        with suppress(Exception):  # a config may hold anything; Transformers reports it below
            values = read_json(source, CONFIG, revision)
            named = values.get("dtype") or values.get("torch_dtype")  # without one Transformers looks at the weights
            config = FamilyConfig(values) if named and is_of_family(values) else None
    if config is None:
        from transformers import AutoConfig

        with model_errors(f"{source!r} has no readable config"):
            config = AutoConfig.from_pretrained(folder, revision=revision, trust_remote_code=trust_remote_code)
    return cut_config(config, layers) if layers else config


def is_of_family(values: Mapping[str, Any]) -> bool:
    """Whether a configuration is of a model of the Llama family without code, quantisation or an activation of its own.

    It must have all values that Transformers would otherwise fill in.
    """
    kind, kinds, window = values.get("model_type"), values.get("layer_types") or (), values.get("sliding_window")
    if kind not in NEEDED or any(name not in values for name in NEEDED[kind]):
        return False
    if not all(type(values.get(name)) is int for name in SIZES) or not isinstance(values.get("rms_norm_eps"), int | float):
        return False
    if any(values.get(name) is not None for name in CHANGES) or values.get("hidden_act", "silu") != "silu":
        return False
    slides = "sliding_attention" in kinds
    if kinds and (not {*kinds} <= LAYER_TYPES or len(kinds) != values["num_hidden_layers"]):
        return False
    if kind != "mistral" and slides != bool(values.get("use_sliding_window")):
        return False
    if slides if window is None else window <= 0:
        return False
    rope = _rope(values)
    return rope["rope_type"] in ROPES and isinstance(rope["rope_theta"], int | float) and CHANGES.isdisjoint(rope)


def _rope(values: Mapping[str, Any]) -> dict[str, Any]:
    """How a configuration turns positions, as Transformers reads it: ``rope_scaling`` counts before ``rope_parameters``."""
    rope = dict(values.get("rope_scaling") or values.get("rope_parameters") or {})
    rope = {"rope_type": rope.get("type", "default"), "rope_theta": values.get("rope_theta")} | rope
    if rope["rope_type"] in ("llama3", "yarn"):
        rope[ORIGINAL] = values.get(ORIGINAL, rope.get(ORIGINAL, values["max_position_embeddings"]))
    return rope


def unlike_attention(config: "Config") -> str | None:
    """Why a model is refused whose layers select or compress distant positions, which the short probe at load cannot detect."""
    text = config.get_text_config()
    if strange := sorted(set(getattr(text, "layer_types", None) or ()) - LAYER_TYPES):
        return f"it has layers of type {strange[0]}, which are neither full nor sliding attention"
    if any(name.startswith("index_topk") for name in text.to_dict()):
        return "its layers attend to what an indexer selects"
    return None


def context_len(config: "Config") -> int:
    """Positions a model was made for, and up to which its logits do not depend on how long the text will be."""
    text = config.get_text_config()
    limits = [getattr(text, "max_position_embeddings", None) or NO_LIMIT]
    rope = getattr(text, "rope_parameters", None) or {}
    for part in (rope, *(part for part in rope.values() if isinstance(part, dict))):  # some have one for each kind of layer
        if part.get("rope_type") == "longrope":  # other frequencies for all positions once one is beyond
            limits.append(part.get(ORIGINAL) or NO_LIMIT)
    return int(min(limits))
