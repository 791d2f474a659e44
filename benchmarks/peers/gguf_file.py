"""A Llama-architecture checkpoint as a GGUF file, as llama.cpp's converter writes it."""

import hashlib
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

Array: TypeAlias = npt.NDArray[np.float32]

NAMES = {  # of tensors in GGUF, by their names in Transformers
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
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
NORMAL, CONTROL = 1, 3  # types of tokens
KINDS = {"float32": "F32", "bfloat16": "BF16"}  # of matrices in GGUF, by their names in Transformers


def tensor_name(name: str) -> str:
    """``blk.3.attn_q.weight`` for ``model.layers.3.self_attn.q_proj.weight``."""
    stem = name.removesuffix(".weight")
    if not stem.startswith("model.layers."):
        return f"{NAMES[stem]}.weight"
    layer, _, part = stem.removeprefix("model.layers.").partition(".")
    return f"blk.{layer}.{NAMES[part]}.weight"


def permuted(weight: Array, num_heads: int) -> Array:
    """Rows of a query or key projection for llama.cpp, which rotates neighbours: Transformers rotates halves of a head."""
    halves = weight.reshape(num_heads, 2, weight.shape[0] // num_heads // 2, weight.shape[1])
    return halves.swapaxes(1, 2).reshape(weight.shape)


def tensors(folder: Path) -> dict[str, Array]:
    """Weights of a checkpoint in float32, exactly: safetensors files of float32, or of bfloat16, which numpy does not know."""
    arrays: dict[str, Array] = {}
    for path in sorted(folder.glob("*.safetensors")):
        raw = path.read_bytes()
        size = int.from_bytes(raw[:8], "little")
        header: dict[str, Any] = json.loads(raw[8 : 8 + size])
        header.pop("__metadata__", None)
        for name, entry in header.items():
            begin, end = (8 + size + offset for offset in entry["data_offsets"])
            arrays[name] = _widened(raw[begin:end], entry["dtype"]).reshape(entry["shape"])
    return arrays


def _widened(raw: bytes, dtype: str) -> Array:
    if dtype == "BF16":
        return (np.frombuffer(raw, np.uint16).astype(np.uint32) << 16).view(np.float32)
    if dtype == "F32":
        return np.frombuffer(raw, np.float32)
    raise ValueError(f"{dtype} weights are not converted: BF16 and F32 are")


def converted(folder: Path, dtype: str, work: Path) -> Path:
    """The GGUF file of a checkpoint, in ``work``; written if it is not there, or older than the weights.

    ``dtype`` is "float32" or "bfloat16"; norms are in float32 in either, as llama.cpp wants them.
    """
    name = hashlib.sha256(str(folder.resolve()).encode()).hexdigest()[:8]
    target = work / f"{folder.name}-{name}-{dtype}.gguf"
    newest = max(path.stat().st_mtime for path in folder.iterdir())
    if not target.exists() or target.stat().st_mtime < newest:
        draft = target.with_suffix(f".{os.getpid()}.part")
        write(folder, draft, KINDS[dtype])
        draft.replace(target)
    return target


def write(
    folder: Path,
    target: Path,
    kind: str,
    *,
    architecture: str = "llama",
    without: str = "",
    more: Callable[[Any], object] = lambda writer: None,
) -> None:
    """Write the checkpoint in ``folder`` to ``target``, its matrices as a ``kind`` such as F32, BF16 or Q4_1.

    For files that are not as they should be: it lacks the tensor ``without`` and has what ``more`` adds.
    """
    import gguf  # in the environment of llama.cpp alone, and in that of tests

    config: dict[str, Any] = json.loads((folder / "config.json").read_text())
    writer = gguf.GGUFWriter(target, architecture)
    writer.add_file_type(gguf.LlamaFileType["ALL_F32" if kind == "F32" else f"MOSTLY_{kind}"])
    _write_config(writer, config)
    _write_vocabulary(writer, json.loads((folder / "tokenizer.json").read_text()), config)
    heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
    for name, weight in tensors(folder).items():
        if name == without:
            continue
        projection = name.split(".")[-2]
        rows = np.ascontiguousarray(permuted(weight, heads[projection]) if projection in heads else weight)
        kept = gguf.GGMLQuantizationType["F32" if rows.ndim == 1 else kind]
        writer.add_tensor(tensor_name(name), gguf.quants.quantize(rows, kept), raw_dtype=kept)
    more(writer)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _write_config(writer: Any, config: dict[str, Any]) -> None:
    writer.add_vocab_size(config["vocab_size"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    size = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    writer.add_key_length(size)
    writer.add_value_length(size)
    writer.add_rope_dimension_count(size)
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])


def _write_vocabulary(writer: Any, tokenizer: dict[str, Any], config: dict[str, Any]) -> None:
    """Byte-level BPE, as of GPT-2; prompts come as token ids, so it is hardly used."""
    vocabulary: dict[str, int] = tokenizer["model"]["vocab"]
    special = {entry["id"] for entry in tokenizer["added_tokens"] if entry["special"]}
    names = {index: name for name, index in vocabulary.items()}
    names |= {entry["id"]: entry["content"] for entry in tokenizer["added_tokens"]}
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list([names[index] for index in range(config["vocab_size"])])
    writer.add_token_types([CONTROL if index in special else NORMAL for index in range(config["vocab_size"])])
    writer.add_token_merges([" ".join(merge) for merge in tokenizer["model"]["merges"]])
    writer.add_bos_token_id(config["bos_token_id"])
    writer.add_eos_token_id(config["eos_token_id"])
    writer.add_add_bos_token(False)
