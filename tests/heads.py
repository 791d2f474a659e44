"""Small random heads in the formats that they are published in, and what their papers' formulas say, without any cache."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedModel

from cascade.engine.sampling.own_tokens import own_tokens
from cascade.params import SamplingParams
from tests.architectures import VOCAB

SIZE = 32
HEADS, KV_HEADS, HEAD_DIM, WIDE = 4, 2, 8, 48
KNOWN = 40  # tokens of an EAGLE-3 head
EPSILON = 1e-5
CONFIG = {"num_attention_heads": HEADS, "num_hidden_layers": 40, "vocab_size": VOCAB, "rms_norm_eps": EPSILON}

Weights = dict[str, Tensor]


@dataclass
class Made:
    """A head that was written to ``folder``, under the names of one format."""

    kind: str
    weights: Weights
    config: dict[str, Any]
    folder: Path
    reads: tuple[int, ...] = ()  # as Transformers counts hidden states

    def write(self, file: str = "model.safetensors", **changes: Any) -> str:
        """Its files; ``changes`` are of its configuration."""
        self.folder.mkdir(parents=True, exist_ok=True)
        if file.endswith(".safetensors"):
            save_file({name: tensor.contiguous() for name, tensor in self.weights.items()}, self.folder / file)
        else:
            torch.save(self.weights, self.folder / file)
        (self.folder / "config.json").write_text(json.dumps({**self.config, **changes}))
        return str(self.folder)


def eagle(folder: Path) -> Made:
    """With the verifier's embedding again, and its number of layers."""
    noise = torch.Generator().manual_seed(0)
    weights = layer(noise, "layers.0.", SIZE) | {
        "fc.weight": matrix(noise, SIZE, 2 * SIZE),
        "fc.bias": matrix(noise, SIZE),
    }
    weights["embed_tokens.weight"] = matrix(noise, VOCAB, SIZE)
    return Made("eagle", weights, dict(CONFIG), folder)


def eagle3(folder: Path, style: str = "") -> Made:
    """Of the authors, of SpecForge, which names the layers whose outputs it reads, or of the ``speculators`` library."""
    noise = torch.Generator().manual_seed(0)
    name = "midlayer." if style != "speculators" else "layers.0."
    weights = layer(noise, name, 2 * SIZE) | {"fc.weight": matrix(noise, SIZE, 3 * SIZE)}
    weights["lm_head.weight"] = matrix(noise, KNOWN, SIZE)
    for norm_of in (f"{name}input_layernorm", f"{name}hidden_norm", "norm"):
        weights[f"{norm_of}.weight"] = 1 + 0.1 * matrix(noise, SIZE)
    ids = torch.randperm(VOCAB, generator=noise)[:KNOWN].sort().values
    weights["d2t"] = ids - torch.arange(KNOWN)
    weights["t2d"] = torch.zeros(VOCAB, dtype=torch.bool).index_fill(0, ids, True)
    made = Made("eagle3", weights, {**CONFIG, "draft_vocab_size": KNOWN, "max_position_embeddings": 16}, folder)
    if style == "specforge":
        made.config["eagle_config"] = {"eagle_aux_hidden_state_layer_ids": [0, 2, 3]}
        made.reads = (1, 3, 4)
    if style == "speculators":
        weights["embed_tokens.weight"] = matrix(noise, VOCAB, SIZE)
        weights["input_norm.weight"] = 1 + 0.1 * matrix(noise, 3 * SIZE)
        options = {"norm_before_residual": True, "norm_before_fc": True, "norm_output": True}
        made.config = {"transformer_layer_config": CONFIG, "eagle_aux_hidden_state_layer_ids": [1, 2, 5], **options}
        made.reads = (1, 2, 5)
    return made


def make(style: str, folder: Path) -> Made:
    """One of a kind, such as "eagle3", or of a variant, such as "eagle3-speculators"."""
    kind, _, variant = style.partition("-")
    return eagle(folder) if kind == "eagle" else eagle3(folder, variant)


def matrix(noise: torch.Generator, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=noise) * 1.2 * shape[-1] ** (-0.5 if len(shape) > 1 else 0)


def layer(noise: torch.Generator, name: str, inputs: int) -> Weights:
    """Of Llama, whose attention takes so many inputs."""
    shapes = {
        "self_attn.q_proj": (HEADS * HEAD_DIM, inputs),
        "self_attn.k_proj": (KV_HEADS * HEAD_DIM, inputs),
        "self_attn.v_proj": (KV_HEADS * HEAD_DIM, inputs),
        "self_attn.o_proj": (SIZE, HEADS * HEAD_DIM),
        "mlp.gate_proj": (WIDE, SIZE),
        "mlp.up_proj": (WIDE, SIZE),
        "mlp.down_proj": (SIZE, WIDE),
    }
    weights = {f"{name}{part}.weight": matrix(noise, *shape) for part, shape in shapes.items()}
    return weights | {f"{name}post_attention_layernorm.weight": 1 + 0.1 * matrix(noise, SIZE)}


# the formulas


@dataclass
class Paper:
    """What a head guesses after a text, computed anew for each guess by the formulas of its paper."""

    made: Made
    verifier: PreTrainedModel  # with Transformers' own attention
    logits: list[Tensor] = field(default_factory=list)  # of the last guesses, over all tokens

    def __post_init__(self) -> None:
        self.weights = {name.replace("midlayer.", "layers.0."): tensor for name, tensor in self.made.weights.items()}

    @torch.no_grad()
    def guesses(self, text: Sequence[int], number: int, params: SamplingParams) -> list[int]:
        """Tokens after ``text``, the last token of which the verifier has not read."""
        out = self.verifier(torch.tensor([text[:-1]]), output_hidden_states=True, use_cache=False)
        states, text, self.logits = self._read([state[0] for state in out.hidden_states]), list(text), []
        for _ in range(number):
            last = self._layer(text[1:], states)[-1:]
            self.logits.append(self._logits(last[0]))
            text.append(int(own_tokens(self.logits[-1][None], [(params, len(text), 1)])[0]))
            normed = norm(last, self.weights["norm.weight"]) if self.made.config.get("norm_output") else last
            states = torch.cat([states, normed])
        return text[-number:]

    def _read(self, hidden: Sequence[Tensor]) -> Tensor:
        """What a head makes of the hidden states that it reads."""
        w, n = self.weights, len(hidden) - 1
        if self.made.kind == "eagle":
            return hidden[-1]
        read = torch.cat([hidden[layer] for layer in self.made.reads or (2, n // 2, n - 3)], -1)
        return F.linear(norm(read, w["input_norm.weight"]) if "input_norm.weight" in w else read, w["fc.weight"])

    def _layer(self, tokens: Sequence[int], states: Tensor) -> Tensor:
        w = self.weights
        if self.made.kind == "eagle":
            embedded = self.verifier.get_input_embeddings()(torch.tensor(tokens))
            x = F.linear(torch.cat([embedded, states], -1), w["fc.weight"], w["fc.bias"])
            return self._over(x, x)
        embedding = w.get("embed_tokens.weight", self.verifier.get_input_embeddings().weight)
        normed = norm(states, w["layers.0.hidden_norm.weight"])
        x = torch.cat([norm(embedding[list(tokens)], w["layers.0.input_layernorm.weight"]), normed], -1)
        return self._over(x, normed if self.made.config.get("norm_before_residual") else states)

    def _logits(self, out: Tensor) -> Tensor:
        if self.made.kind == "eagle":
            said: Tensor = self.verifier.get_output_embeddings()(out)
            return said
        w, logits = self.weights, torch.full((VOCAB,), -torch.inf)
        logits[w["d2t"] + torch.arange(KNOWN)] = w["lm_head.weight"] @ norm(out, w["norm.weight"])
        return logits

    def _over(self, x: Tensor, residual: Tensor) -> Tensor:
        """A Llama layer over a whole text, ``[n, inputs]``."""
        w = {name.removeprefix("layers.0."): tensor for name, tensor in self.weights.items()}
        residual = residual + F.linear(_attention(x, w), w["self_attn.o_proj.weight"])
        normed = norm(residual, w["post_attention_layernorm.weight"])
        gate, up = (F.linear(normed, w[f"mlp.{name}_proj.weight"]) for name in ("gate", "up"))
        return residual + F.linear(F.silu(gate) * up, w["mlp.down_proj.weight"])


def _attention(x: Tensor, w: Weights) -> Tensor:
    query, key, value = (F.linear(x, w[f"self_attn.{name}_proj.weight"]).unflatten(-1, (-1, HEAD_DIM)) for name in "qkv")
    parts = (part.transpose(0, 1)[None] for part in (_turned(query), _turned(key), value))
    return F.scaled_dot_product_attention(*parts, is_causal=True, enable_gqa=True)[0].transpose(0, 1).flatten(1)


def norm(x: Tensor, weight: Tensor) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + EPSILON) * weight


def _turned(x: Tensor) -> Tensor:
    """``[n, heads, head_dim]`` by rotary positions."""
    half = HEAD_DIM // 2
    angles = torch.arange(len(x))[:, None, None] * 10000.0 ** (-torch.arange(half) / half)
    a, b = x[..., :half], x[..., half:]
    return torch.cat([a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()], -1)
