"""GGUF files of small models, written as llama.cpp's converter does."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGMLQuantizationType, GGUFWriter, TokenType, quantize
from safetensors.torch import load_file

from tests import small

CHAT = "{% for message in messages %}<{{ message.role }}>{{ message.content }}{% endfor %}"
TENSORS = {  # their names in GGUF by their names in Transformers, Llama
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def write(
    target: Path,
    kind: str = "Q4_1",
    *,
    source: str = "",
    architecture: str = "llama",
    without: str = "",
    more: Callable[[GGUFWriter], object] = lambda writer: None,
) -> str:
    """The path of a file of the model in ``source``, the tiny one unless given.

    Its matrices are of a ``kind`` such as Q4_1, BF16 or F32; it lacks the tensor ``without`` and has what ``more`` adds.
    """
    folder = Path(source or small.paths()[0])
    config = json.loads((folder / "config.json").read_text())
    writer = GGUFWriter(target, architecture)
    _write_config(writer, config)
    _write_tokenizer(writer, json.loads((folder / "tokenizer.json").read_text()), config)
    for name, weight in load_file(folder / "model.safetensors").items():
        if name != without:
            _write_tensor(writer, name, weight.float(), kind, config)
    more(writer)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return str(target)


def _write_config(writer: GGUFWriter, config: dict[str, Any]) -> None:
    writer.add_vocab_size(config["vocab_size"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_rope_dimension_count(config["head_dim"])
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])


def _write_tokenizer(writer: GGUFWriter, tokenizer: dict[str, Any], config: dict[str, Any]) -> None:
    names = {index: name for name, index in tokenizer["model"]["vocab"].items()}
    names |= {entry["id"]: entry["content"] for entry in tokenizer["added_tokens"]}
    special = {entry["id"] for entry in tokenizer["added_tokens"]}
    ids = range(config["vocab_size"])
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list([names[index] for index in ids])
    writer.add_token_types([TokenType.CONTROL if index in special else TokenType.NORMAL for index in ids])
    writer.add_token_merges([" ".join(merge) for merge in tokenizer["model"]["merges"]])
    writer.add_bos_token_id(config["bos_token_id"])
    writer.add_eos_token_id(config["eos_token_id"])
    writer.add_eot_token_id(7)
    writer.add_add_bos_token(False)
    writer.add_chat_template(CHAT)


def _write_tensor(writer: GGUFWriter, name: str, weight: torch.Tensor, kind: str, config: dict[str, Any]) -> None:
    layer, _, part = name.removesuffix(".weight").removeprefix("model.layers.").partition(".")
    named = f"blk.{layer}.{TENSORS[part]}" if layer.isdigit() else TENSORS[name.removesuffix(".weight")]
    heads = {"self_attn.q_proj": config["num_attention_heads"], "self_attn.k_proj": config["num_key_value_heads"]}
    if part in heads:  # llama.cpp rotates neighbours, Transformers halves of a head
        weight = weight.reshape(heads[part], 2, -1, weight.shape[1]).swapaxes(1, 2).reshape(weight.shape)
    kept = GGMLQuantizationType.F32 if weight.ndim == 1 else GGMLQuantizationType[kind]
    numbers = np.ascontiguousarray(weight.numpy())
    writer.add_tensor(f"{named}.weight", quantize(numbers, kept), raw_dtype=kept)
