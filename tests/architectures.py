"""Small random models of many architectures, for tests of the packed pass."""

from collections.abc import Iterable
from typing import Any

import pytest
import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

VOCAB = 96
CONTEXT = 128
WINDOW = 8
TOKENS: dict[str, Any] = {"vocab_size": VOCAB, "bos_token_id": 1, "eos_token_id": None, "pad_token_id": 0}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2}
SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "max_position_embeddings": CONTEXT}
BASE = TOKENS | HEADS | SIZES
ALTERNATING = ["sliding_attention", "full_attention"]
SLIDES: dict[str, Any] = {"sliding_window": WINDOW, "layer_types": ALTERNATING}
FEW = {"num_experts": 4, "num_experts_per_tok": 2}
LOCAL = {"num_local_experts": 4, "num_experts_per_tok": 2}
LINEAR = {"linear_num_key_heads": 2, "linear_num_value_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8}
EXPERTS: dict[str, Any] = {**FEW, "moe_intermediate_size": 24}
GROUPS = {"n_group": 1, "topk_group": 1, "n_routed_experts": 4, "n_shared_experts": 1}
ROUTED: dict[str, Any] = {**GROUPS, "num_experts_per_tok": 2, "first_k_dense_replace": 1, "moe_intermediate_size": 24}
GPT = TOKENS | {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": CONTEXT}
RANKS = {"kv_lora_rank": 16, "q_lora_rank": 24}
LATENT: dict[str, Any] = {**RANKS, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 6, "num_key_value_heads": 4}
FACTORS = {"short_factor": [1.0, 1.5, 2.0, 2.5], "long_factor": [2.0, 3.0, 4.0, 5.0]}
LONGROPE = {"rope_type": "longrope", "rope_theta": 10000.0, **FACTORS, "original_max_position_embeddings": 64}
LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 32}
CAPS = {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 8.0}
ERNIE = {"moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 24, "moe_num_shared_experts": 1, "moe_layer_start_index": 1}
BY_LAYER = {"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": VOCAB}
HYBRID = {"layer_types": ["linear_attention", "full_attention"], "shared_expert_intermediate_size": 24}
CHUNKED = {"attention_chunk_size": WINDOW, "layer_types": ["chunked_attention", "full_attention"]}

# by Transformers' model_type, with a suffix for variants; what differs from BASE
SERVED: dict[str, dict[str, Any]] = {
    "llama": {},
    "llama-untied-bias": {"tie_word_embeddings": False, "attention_bias": True, "mlp_bias": True},
    "llama-wide-heads": {"head_dim": 48},
    "llama-linear": {"rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0}},
    "llama-llama3": {"rope_parameters": {"rope_type": "llama3", "rope_theta": 10000.0, "factor": 4.0, **LLAMA3}},
    "llama-yarn": {"rope_parameters": {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0}},
    "llama-dynamic": {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}},
    "qwen2": {},
    "qwen2-sliding": {"use_sliding_window": True, **SLIDES},
    "qwen3": {"head_dim": 16},
    "mistral": {"sliding_window": WINDOW},
    "gemma": {"head_dim": 8, "num_key_value_heads": 1},
    "gemma2": {"head_dim": 8, **SLIDES, "query_pre_attn_scalar": 16, **CAPS},
    "gemma3_text": {"head_dim": 8, **SLIDES},
    "mixtral": {**LOCAL, "sliding_window": WINDOW},
    "qwen2_moe": {**EXPERTS, "shared_expert_intermediate_size": 24},
    "qwen2_moe-sliding": {**EXPERTS, "shared_expert_intermediate_size": 24, "use_sliding_window": True, **SLIDES},
    "qwen3_moe": EXPERTS,
    "phi": {"partial_rotary_factor": 0.5},
    "phi3": {"sliding_window": WINDOW},
    "phi3-longrope": {"rope_parameters": LONGROPE, "original_max_position_embeddings": 64},
    "gpt_neox": {"rotary_pct": 0.5},
    "olmo2": {},
    "olmo3": {**SLIDES},
    "granite": {"attention_multiplier": 0.25, "residual_multiplier": 0.5, "logits_scaling": 2.0, "embedding_multiplier": 3.0},
    "starcoder2": {"sliding_window": WINDOW},
    "cohere": {"use_qk_norm": True},
    "cohere2": {**SLIDES},
    "deepseek_v3": {**LATENT, **ROUTED, "n_group": 2},
    "gpt2": GPT,
    "gpt_oss": {"head_dim": 8, **LOCAL, **SLIDES},
    "smollm3": {"no_rope_layers": [1, 0]},
    "opt": {"ffn_dim": 48, "word_embed_proj_dim": 32},
    "deepseek_v2": {**LATENT, **ROUTED},
    "dots1": {**ROUTED, "head_dim": 8},
    "ernie4_5": {"head_dim": 8},
    "ernie4_5_moe": ERNIE,
    "exaone4": {**SLIDES},
    "gemma4_text": {"head_dim": 8, "global_head_dim": 8, **SLIDES, **BY_LAYER},
    "glm": {"head_dim": 8},
    "glm4": {"head_dim": 8},
    "glm4_moe": {**ROUTED, "head_dim": 8},
    "glm4_moe_lite": {**LATENT, **ROUTED},
    "gpt_bigcode": GPT,
    "granitemoe": {**LOCAL},
    "hunyuan_v1_dense": {"head_dim": 8},
    "mimo_v2_flash": {**ROUTED, "head_dim": 8, "v_head_dim": 6, **SLIDES},
    "minicpm3": LATENT,
    "minimax_m2": {"head_dim": 8, **LOCAL},
    "ministral3": {"head_dim": 8},
    "olmo": {"clip_qkv": 0.8},
    "olmoe": {**FEW},
    "phimoe": {**LOCAL},
    "seed_oss": {"head_dim": 8},
}
REFUSED: dict[str, dict[str, Any]] = {
    "falcon": {"num_kv_heads": 2, "new_decoder_architecture": True},
    "bloom": {"n_layer": 2, "n_head": 4},
    "mpt": {"d_model": 32, "n_heads": 4, "n_layers": 2, "max_seq_len": CONTEXT},
    "mamba": {},
    "qwen3_next": {**EXPERTS, "head_dim": 8, **HYBRID, **LINEAR},
    "llama4_text": {**CHUNKED, "head_dim": 8, "num_local_experts": 2, "intermediate_size_mlp": 48},
    "deepseek_v32": {**LATENT, **ROUTED},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]], "num_layers": 2, "num_heads": 4},
    "jamba": {"num_experts": 2, "attn_layer_period": 2, "attn_layer_offset": 1, "mamba_d_state": 4, "use_mamba_kernels": False},
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    "minimax": {"num_local_experts": 4},
    "qwen3_5_text": {"head_dim": 8, **LINEAR},
    "recurrent_gemma": {"head_dim": 8},
    "rwkv": {},
}

# those that `cascade.engine.network.llama` runs
WRITTEN_OUT = (
    *("llama", "llama-untied-bias", "llama-wide-heads", "llama-linear", "llama-llama3", "llama-yarn"),
    *("mistral", "qwen2", "qwen2-sliding", "qwen3"),
)
# one of each kind: plain, windows in some layers, soft caps, sinks, latent attention, experts, learned positions, long RoPE
DEFAULT = ("llama", "qwen2-sliding", "gemma2", "gpt_oss", "deepseek_v3", "mixtral", "gpt2", "phi3-longrope")


def each(names: Iterable[str] = SERVED, default: Iterable[str] = DEFAULT) -> list[Any]:
    """``names`` as parameters of a test; those that are not in ``default`` are for `make test-all` alone."""
    return [pytest.param(name, id=name, marks=() if name in default else pytest.mark.slow) for name in names]


def config(name: str, **overrides: Any) -> PreTrainedConfig:
    """Configuration of the architecture ``name``."""
    own = SERVED.get(name, REFUSED.get(name, {}))
    base = {} if "n_embd" in own else BASE
    return AutoConfig.for_model(name.split("-")[0], **{**base, **own, **overrides})


def build(name: str, seed: int = 0, **overrides: Any) -> PreTrainedModel:
    """A model whose weights are large enough for every part of it to change which token is likeliest."""
    torch.manual_seed(seed)
    network = AutoModelForCausalLM.from_config(config(name, **overrides), dtype=torch.float32)
    with torch.no_grad():
        for weight in network.parameters():
            if weight.dim() > 1:
                weight.normal_(0, 1.2 * weight[0].numel() ** -0.5)
            else:
                weight.add_(torch.randn_like(weight) * 0.1)
    network.generation_config.eos_token_id = None
    network.generation_config.pad_token_id = 0
    return network.eval()


transformers.logging.set_verbosity_error()
