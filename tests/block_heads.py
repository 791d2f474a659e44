"""Small random drafters of blocks in the formats that they are published in, and what their authors' models compute.

The formulas are those of ``z-lab/dflash`` and ``deepseek-ai/DeepSpec``, without any cache: a block is computed anew with all of
its text.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedModel

from tests.architectures import VOCAB

BLOCK, MASK, RANK, WINDOW, NUM_LAYERS = 5, 90, 6, 7, 2
HEADS, KV_HEADS, HEAD_DIM, WIDE = 4, 2, 8, 48
KNOWN = 40  # tokens of a drafter that does not know all
EPSILON = 1e-5
OUTPUTS = [0, 2, 4]  # layers whose outputs are read

Weights = dict[str, Tensor]
Pick = Callable[[Tensor, int], int]  # of logits, for a guess by its number


def published(style: str, noise: torch.Generator, size: int) -> tuple[Weights, dict[str, Any]]:
    """Tensors and configuration of "dflash" or "dspark", or of a variant such as "dflash-sliding"."""
    kind, _, variant = style.partition("-")
    config: dict[str, Any] = {
        "architectures": ["DFlashDraftModel" if kind == "dflash" else "Qwen3DSparkModel"],
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "num_hidden_layers": NUM_LAYERS,
        "vocab_size": VOCAB,
        "rms_norm_eps": EPSILON,
        "layer_types": ["full_attention"] * NUM_LAYERS,
        "max_position_embeddings": 16,
        "sliding_window": None,
    }
    weights = _layers(noise, size)
    if kind == "dflash":
        config |= {"block_size": BLOCK, "dflash_config": {"mask_token_id": MASK, "target_layer_ids": OUTPUTS}}
    else:
        config |= {"block_size": BLOCK, "mask_token_id": MASK, "target_layer_ids": OUTPUTS}
        weights |= _dspark(noise, size, variant, VOCAB)
    if variant == "sliding":
        config |= {"layer_types": ["full_attention", "sliding_attention"], "sliding_window": WINDOW}
    if variant == "swa":
        config["dflash_config"] |= {"use_swa": True, "swa_window_size": WINDOW, "block_size": config.pop("block_size")}
        weights["mask_embedding"] = matrix(noise, size)
    if variant == "speculators":
        keys = ("architectures", "block_size")
        config = {key: config[key] for key in keys} | {"transformer_layer_config": config, "mask_token_id": MASK}
        config |= {"aux_hidden_state_layer_ids": [layer + 1 for layer in OUTPUTS], "sample_from_anchor": kind == "dspark"}
        ids = torch.randperm(VOCAB, generator=noise)[:KNOWN].sort().values
        weights |= {"d2t": ids - torch.arange(KNOWN), "t2d": torch.zeros(VOCAB, dtype=torch.bool).index_fill(0, ids, True)}
        weights |= {"lm_head.weight": matrix(noise, KNOWN, size), "embed_tokens.weight": matrix(noise, VOCAB, size)}
        weights["verifier_norm.weight"] = torch.ones(size)
        if kind == "dspark":
            weights["markov_head.markov_w2.weight"] = matrix(noise, KNOWN, RANK)
    return weights, config


def matrix(noise: torch.Generator, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=noise) * 1.2 * shape[-1] ** (-0.5 if len(shape) > 1 else 0)


def _layers(noise: torch.Generator, size: int) -> Weights:
    weights = {"fc.weight": matrix(noise, size, len(OUTPUTS) * size)}
    for name in ("hidden_norm", "norm"):
        weights[f"{name}.weight"] = 1 + 0.1 * matrix(noise, size)
    for number in range(NUM_LAYERS):
        weights |= layer(noise, f"layers.{number}.", size, size)
        for part, width in {"self_attn.q_norm": HEAD_DIM, "self_attn.k_norm": HEAD_DIM, "input_layernorm": size}.items():
            weights[f"layers.{number}.{part}.weight"] = 1 + 0.1 * matrix(noise, width)
    return weights


def layer(noise: torch.Generator, name: str, inputs: int, size: int) -> Weights:
    """Of Llama, whose attention takes so many inputs."""
    shapes = {
        "self_attn.q_proj": (HEADS * HEAD_DIM, inputs),
        "self_attn.k_proj": (KV_HEADS * HEAD_DIM, inputs),
        "self_attn.v_proj": (KV_HEADS * HEAD_DIM, inputs),
        "self_attn.o_proj": (size, HEADS * HEAD_DIM),
        "mlp.gate_proj": (WIDE, size),
        "mlp.up_proj": (WIDE, size),
        "mlp.down_proj": (size, WIDE),
    }
    weights = {f"{name}{part}.weight": matrix(noise, *shape) for part, shape in shapes.items()}
    return weights | {f"{name}post_attention_layernorm.weight": 1 + 0.1 * matrix(noise, size)}


def _dspark(noise: torch.Generator, size: int, variant: str, tokens: int) -> Weights:
    weights = {
        "markov_head.markov_w1.weight": matrix(noise, VOCAB, RANK),
        "markov_head.markov_w2.weight": matrix(noise, tokens, RANK),
    }
    if variant == "gated":
        shape = RANK, size + RANK
        weights |= {"markov_head.gate_proj.weight": matrix(noise, *shape), "markov_head.gate_proj.bias": matrix(noise, RANK)}
    if variant == "rnn":
        shape = 3 * RANK, size + 2 * RANK
        weights |= {
            "markov_head.joint_proj.weight": matrix(noise, *shape),
            "markov_head.joint_proj.bias": matrix(noise, 3 * RANK),
        }
    inputs = size if variant == "gated" else size + RANK
    weights |= {"confidence_head.proj.weight": matrix(noise, 1, inputs), "confidence_head.proj.bias": matrix(noise, 1)}
    return weights


# what they compute


def guesses(
    made: tuple[str, Weights],
    text: Sequence[int],
    hidden: Sequence[Tensor],
    verifier: PreTrainedModel,
    number: int,
    pick: Pick,
    sure: list[float],
) -> list[int]:
    """After ``text``, whose last token the verifier has not read; ``sure`` gets -log of the chances to be wrong, if told."""
    style, w = made
    kind, _, variant = style.partition("-")
    ids, found = torch.tensor([text[-1], *[MASK] * (BLOCK - 1)]), []
    x = w["embed_tokens.weight"][ids] if "embed_tokens.weight" in w else verifier.get_input_embeddings()(ids)
    lm_head = w.get("lm_head.weight", verifier.get_output_embeddings().weight)
    out = _block(variant, w, x, hidden)[0 if kind == "dspark" else 1 :]
    last, state = text[-1], torch.zeros(RANK)
    for place in range(min(number, len(out))):
        known = lm_head @ out[place]
        if kind == "dspark":
            inputs = torch.cat([out[place], w["markov_head.markov_w1.weight"][last]])
            ask = w["confidence_head.proj.weight"][0]
            right = torch.sigmoid(ask @ inputs[: len(ask)] + w["confidence_head.proj.bias"][0])
            sure.append(-float(torch.log(1 - right)))
            bias, state = _bias(variant, w, last, out[place], state)
            known = known + bias
        logits = torch.full((VOCAB,), -torch.inf)
        logits[w["d2t"] + torch.arange(KNOWN) if "d2t" in w else torch.arange(VOCAB)] = known
        found.append(last := pick(logits, place))
    return found


def _block(variant: str, w: Weights, x: Tensor, hidden: Sequence[Tensor]) -> Tensor:
    """``[BLOCK, size]`` of what a block is embedded as."""
    context = norm(F.linear(torch.cat([hidden[layer + 1] for layer in OUTPUTS], -1), w["fc.weight"]), w["hidden_norm.weight"])
    if "mask_embedding" in w:
        x = torch.cat([x[:1], w["mask_embedding"].expand(BLOCK - 1, -1)])
    for number in range(NUM_LAYERS):
        part = {name.removeprefix(f"layers.{number}."): tensor for name, tensor in w.items()}
        every = torch.cat([context, norm(x, part["input_layernorm.weight"])])
        x = over(every, x, part, _seen(variant, number, len(context)))
    return norm(x, w["norm.weight"])


def _seen(variant: str, layer: int, start: int) -> Tensor:
    """``[BLOCK, start + BLOCK]``: what a place of a block that begins at ``start`` sees."""
    keys, queries = torch.arange(start + BLOCK), torch.arange(start, start + BLOCK)[:, None]
    if variant == "sliding" and layer == 1:
        return (keys <= queries) & (keys > queries - WINDOW)
    return (
        (keys >= start - WINDOW).expand(BLOCK, -1) if variant == "swa" else torch.ones(BLOCK, start + BLOCK, dtype=torch.bool)
    )


def over(every: Tensor, residual: Tensor, w: Weights, seen: Tensor) -> Tensor:
    """A Llama layer: the last of ``every`` input ``[n, inputs]`` look at those ``seen`` ``[len(residual), n]``."""
    residual = residual + F.linear(_attention(every, len(every) - len(residual), w, seen), w["self_attn.o_proj.weight"])
    normed = norm(residual, w["post_attention_layernorm.weight"])
    gate, up = (F.linear(normed, w[f"mlp.{name}_proj.weight"]) for name in ("gate", "up"))
    return residual + F.linear(F.silu(gate) * up, w["mlp.down_proj.weight"])


def _attention(every: Tensor, start: int, w: Weights, seen: Tensor) -> Tensor:
    query, key, value = (
        F.linear(part, w[f"self_attn.{name}_proj.weight"]).unflatten(-1, (-1, HEAD_DIM))
        for name, part in (("q", every[start:]), ("k", every), ("v", every))
    )
    if "self_attn.q_norm.weight" in w:
        query, key = norm(query, w["self_attn.q_norm.weight"]), norm(key, w["self_attn.k_norm.weight"])
    query, key = _turned(query, start), _turned(key, 0)
    out = []
    for head in range(HEADS):
        shared = head * KV_HEADS // HEADS
        scores = query[:, head] @ key[:, shared].T * HEAD_DIM**-0.5
        out.append(scores.masked_fill(~seen, -torch.inf).softmax(-1) @ value[:, shared])
    return torch.cat(out, -1)


def _bias(variant: str, w: Weights, before: int, hidden: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    e, w2 = w["markov_head.markov_w1.weight"][before], w["markov_head.markov_w2.weight"]
    if variant == "gated":
        gate = F.linear(torch.cat([hidden, e]), w["markov_head.gate_proj.weight"], w["markov_head.gate_proj.bias"])
        return w2 @ (torch.sigmoid(gate) * e), state
    if variant == "rnn":
        joint = F.linear(torch.cat([state, e, hidden]), w["markov_head.joint_proj.weight"], w["markov_head.joint_proj.bias"])
        gate, new, out = torch.sigmoid(joint[:RANK]), torch.tanh(joint[RANK : 2 * RANK]), torch.tanh(joint[2 * RANK :])
        return w2 @ out, gate * state + (1 - gate) * new
    return w2 @ e, state


def norm(x: Tensor, weight: Tensor) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + EPSILON) * weight


def _turned(x: Tensor, start: int) -> Tensor:
    """``[n, heads, head_dim]`` by rotary positions from ``start`` on."""
    half = HEAD_DIM // 2
    angles = (start + torch.arange(len(x)))[:, None, None] * 10000.0 ** (-torch.arange(half) / half)
    a, b = x[..., :half], x[..., half:]
    return torch.cat([a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()], -1)
