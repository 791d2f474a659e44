"""Small random MTP layers under the names of each publisher, and what their formulas say, without any cache."""

from collections.abc import Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedModel

from tests.architectures import EXPERTS, build
from tests.block_heads import Weights, matrix
from tests.heads import SIZE, Made

LAYERS = 6
# by style, the architecture of the model that the layer is of, and what differs
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "mtp-deepseek": ("deepseek_v3", {}),
    "mtp-glm": ("glm4_moe", {}),
    "mtp-qwen": ("qwen3_next", {"layer_types": ["full_attention"] * LAYERS, **EXPERTS}),  # such models are hybrids
    "mtp-mimo": ("qwen2", {}),
}
NUMBERED = {  # DeepSeek's, GLM's
    "enorm": f"model.layers.{LAYERS}.enorm",
    "hnorm": f"model.layers.{LAYERS}.hnorm",
    "proj": f"model.layers.{LAYERS}.eh_proj",
    "norm": f"model.layers.{LAYERS}.shared_head.norm",
    "block": f"model.layers.{LAYERS}",
    "embed": f"model.layers.{LAYERS}.embed_tokens",
    "head": f"model.layers.{LAYERS}.shared_head.head",
}
NAMES = {
    "mtp-deepseek": NUMBERED,
    "mtp-glm": NUMBERED,
    "mtp-qwen": {
        "enorm": "mtp.pre_fc_norm_embedding",
        "hnorm": "mtp.pre_fc_norm_hidden",
        "proj": "mtp.fc",
        "norm": "mtp.norm",
        "block": "mtp.layers.0",
    },
    "mtp-mimo": {
        "enorm": "model.mtp_layers.0.token_layernorm",
        "hnorm": "model.mtp_layers.0.hidden_layernorm",
        "proj": "model.mtp_layers.0.input_proj",
        "norm": "model.mtp_layers.0.final_layernorm",
        "block": "model.mtp_layers.0",
    },
}


def network_of(style: str, seed: int = 0, **overrides: Any) -> PreTrainedModel:
    """The model that a layer is of."""
    name, own = MODELS[style]
    return build(name, seed, num_hidden_layers=LAYERS, **own, **overrides)


@cache
def donor(style: str) -> Any:
    """Another model, whose last layer and norms are the MTP layer."""
    network = network_of(style, seed=1)
    network.set_attn_implementation("eager")
    return network


def mtp(folder: Path, style: str) -> Made:
    """The layer alone; experts lie one by one in files, and DeepSeek's and GLM's have the model's embeddings, too."""
    names, other, noise = NAMES[style], donor(style), torch.Generator().manual_seed(3)
    parts = {f"{names['block']}.{name}": tensor for name, tensor in other.model.layers[-1].state_dict().items()}
    weights: Weights = {name: tensor.clone() for name, tensor in _by_expert(parts).items()}
    weights[f"{names['proj']}.weight"] = matrix(noise, SIZE, 2 * SIZE)
    for norm in ("enorm", "hnorm", "norm"):
        weights[f"{names[norm]}.weight"] = other.model.norm.weight.detach() + 0.1 * matrix(noise, SIZE)
    if "embed" in names:
        model = network_of(style)
        weights[f"{names['embed']}.weight"] = model.get_input_embeddings().weight.detach().clone()
        weights[f"{names['head']}.weight"] = model.get_output_embeddings().weight.detach().clone()
    return Made("mtp", weights, {}, folder, out=partial(out_of, style, weights))


def _by_expert(parts: Weights) -> Weights:
    """As published: the tensors of experts, which Transformers holds as one."""
    found: Weights = {}
    for name, tensor in parts.items():
        base, _, last = name.rpartition(".")
        if last == "gate_up_proj":
            for number, expert in enumerate(tensor):
                gate, up = expert.chunk(2)
                found |= {f"{base}.{number}.gate_proj.weight": gate, f"{base}.{number}.up_proj.weight": up}
        elif last == "down_proj":
            found |= {f"{base}.{number}.down_proj.weight": expert for number, expert in enumerate(tensor)}
        else:
            found[name] = tensor
    return found


def out_of(style: str, weights: Weights, verifier: PreTrainedModel, text: Sequence[int], states: Tensor) -> Tensor:
    """What the layer makes of a whole text and the states at all but its last token, ``[n - 1, size]``."""
    names, other, n = NAMES[style], donor(style), len(text) - 1
    embedded = verifier.get_input_embeddings()(torch.tensor(text[1:]))
    parts = [_norm(style, weights, embedded, "enorm"), _norm(style, weights, states, "hnorm")]
    order = (1, 0) if style == "mtp-mimo" else (0, 1)
    x = F.linear(torch.cat([parts[part] for part in order], -1), weights[f"{names['proj']}.weight"])[None]
    mask = torch.full((n, n), -torch.inf).triu(1)[None, None]
    positions = torch.arange(n)[None]
    angles = other.model.rotary_emb(x, positions)
    out = other.model.layers[-1](x, attention_mask=mask, position_ids=positions, position_embeddings=angles)
    return _norm(style, weights, out[0], "norm")


def _norm(style: str, weights: Weights, x: Tensor, name: str) -> Tensor:
    """Weights of Qwen's are what is added to one."""
    weight = weights[f"{NAMES[style][name]}.weight"]
    x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + donor(style).config.rms_norm_eps)
    return x * (1 + weight if style == "mtp-qwen" else weight)
