"""EAGLE: a layer or two that go on with a model's hidden states by themselves, token after token.

Position i of its text is the token at i + 1 together with what is kept of the hidden states at i, so that it guesses the token
at i + 2. After the text its own output takes the place of hidden states.

    EAGLE-1, 2:  x = fc(embedding, h);  out = layer(x), without the norm before attention;  logits = verifier's head(out)
    EAGLE-3:     h = fc(three hidden states);  out = layer over norm(embedding), norm(h), added to h;  logits = head(norm(out))

As published: ``layers.{l}.*``, or ``midlayer.*`` of EAGLE-3, which also has ``norm``, ``lm_head`` and ``d2t``. Which hidden
states it reads: ids of ``eagle_config`` are of layers whose outputs are meant; those at the top level, of the ``speculators``
library, count as Transformers does. Without any they are the inputs of layers 2, n // 2 and n - 3.

Li et al., arXiv 2401.15077, 2406.16858, 2503.01840.
"""

from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm, LlamaRotaryEmbedding, apply_rotary_pos_emb

from cascade.engine.heads.chain import Chain
from cascade.engine.heads.checkpoint import ATTENTION, Checkpoint
from cascade.engine.heads.head import Verifier
from cascade.engine.heads.reader import Reader

Angles = tuple[Tensor, Tensor]


class Attention(nn.Module):
    """Of a Llama layer, over any number of inputs."""

    def __init__(self, config: LlamaConfig, inputs: int, names: Collection[str]) -> None:
        """With the biases and norms that are in ``names``, of the first layer's tensors."""
        super().__init__()
        biased, out_biased, normed = (f"{ATTENTION}{name}" in names for name in ("q_proj.bias", "o_proj.bias", "q_norm.weight"))
        self.layer_idx = 0
        self.head_dim: int = config.head_dim
        self.heads = (config.num_attention_heads, config.num_key_value_heads)
        queries, keys = (heads * self.head_dim for heads in self.heads)
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(inputs, size, bias=biased) for size in (queries, keys, keys))
        self.o_proj = nn.Linear(queries, config.hidden_size, bias=out_biased)
        self.q_norm, self.k_norm = (LlamaRMSNorm(self.head_dim, config.rms_norm_eps) if normed else None for _ in range(2))

    def forward(self, x: Tensor, angles: Angles, reader: Reader, planned: Any) -> Tensor:
        """``[n, inputs]`` to ``[n, hidden_size]``."""
        query, key = (self.heads_of(x, *part) for part in ((self.q_proj, self.q_norm), (self.k_proj, self.k_norm)))
        query, key = apply_rotary_pos_emb(query, key, *angles)
        return self.o_proj(self.attend(query, key, self.heads_of(x, self.v_proj), reader, planned).reshape(len(x), -1))

    def heads_of(self, x: Tensor, projection: nn.Linear, norm: nn.Module | None = None) -> Tensor:
        """``[1, heads, n, head_dim]`` of ``[n, inputs]``."""
        heads: Tensor = projection(x).view(1, len(x), -1, self.head_dim)
        return (heads if norm is None else norm(heads)).transpose(1, 2)

    def attend(self, query: Tensor, key: Tensor, value: Tensor, reader: Reader, planned: Any) -> Tensor:
        """``[1, n, heads, head_dim]``, see `Reader.attend`."""
        return reader.attend(self, query, key, value, planned)


class Layer(nn.Module):
    """A Llama layer; the ``first`` one's input is made by `Eagle`, that of others is normed."""

    def __init__(self, config: LlamaConfig, attention: Attention, *, first: bool = False) -> None:
        super().__init__()
        size, epsilon, inputs = config.hidden_size, config.rms_norm_eps, attention.q_proj.in_features
        self.self_attn = attention
        self.mlp = LlamaMLP(config)
        self.post_attention_layernorm = LlamaRMSNorm(size, epsilon)
        if not first or inputs > size:
            self.input_layernorm = LlamaRMSNorm(size, epsilon)
        if inputs > size:
            self.hidden_norm = LlamaRMSNorm(size, epsilon)

    def forward(self, x: Tensor, residual: Tensor, *attention: Any) -> Tensor:
        residual = residual + self.self_attn(x, *attention)
        return residual + self.mlp(self.post_attention_layernorm(residual))


class Eagle(Chain):
    """EAGLE-1 and EAGLE-2, which differ in the trees that their authors make."""

    kind = "eagle"
    inputs = 1  # of the first layer, in hidden sizes

    def __init__(
        self,
        config: LlamaConfig,
        verifier: Verifier,
        names: Collection[str] = (),
        *,
        reads: Sequence[int] = (),
        ids: Tensor | None = None,
    ) -> None:
        """``reads`` are hidden states, and ``names`` those tensors that not every such head has."""
        super().__init__(verifier.vocab_size, ids)
        size, heads = config.hidden_size, (config.num_attention_heads, config.num_key_value_heads)
        self.config, self.reads, self.width = config, tuple(reads), size
        wide, fc_inputs = self.inputs * size, len(reads) * verifier.hidden_size if self.inputs > 1 else 2 * size
        self.fc = nn.Linear(fc_inputs, size, bias="fc.bias" in names)
        inputs = [wide, *[size] * (config.num_hidden_layers - 1)]
        made = [Layer(config, Attention(config, each, names), first=not at) for at, each in enumerate(inputs)]
        self.layers = nn.ModuleList(made)
        self.attends = ((*heads, config.head_dim, config.head_dim),) * len(made)
        self.embed_with(verifier, (), size)
        with torch.device("cpu"):  # frequencies are never in 16 bits
            self._rotary = (LlamaRotaryEmbedding(config).to(verifier.embed.weight.device),)

    @classmethod
    def fits(cls, checkpoint: Checkpoint) -> bool:
        norms = {"hidden_norm.weight", "layers.0.input_layernorm.weight"}  # of drafters of blocks
        return checkpoint.query_width == 1 and not checkpoint.weights.keys() & norms

    @classmethod
    def of(cls, checkpoint: Checkpoint, verifier: Verifier) -> "Eagle":
        checkpoint.check_hidden(checkpoint.size("fc.weight"), verifier)
        checkpoint.check_vocab(verifier)
        return cls(checkpoint.llama(verifier), verifier, {*checkpoint.weights}, reads=(verifier.num_layers,))

    def state(self, hidden: Sequence[Tensor]) -> Tensor:
        return hidden[0]

    def enter(self, embedded: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        """What the first layer attends with, and what it is added to."""
        x = self.fc(torch.cat([embedded, state], dim=-1))
        return x, x

    def logits(self, out: Tensor) -> Tensor:
        return self.project(out)

    def forward(self, tokens: Tensor, states: Tensor, positions: Tensor, reader: Any, planned: Any) -> Tensor:
        x, out = self.enter(self.embed(tokens), states)
        angles = self._rotary[0](x, positions)
        for number, layer in enumerate(self.own_layers):
            out = layer(layer.input_layernorm(out) if number else x, out, angles, reader, planned)
        return out


class Eagle3(Eagle):
    """EAGLE-3: reads several hidden states, has a head of its own, and may know a part of the vocabulary only."""

    kind = "eagle3"
    names = ((r"^midlayer\.", "layers.0."),)
    inputs = 2

    def __init__(
        self,
        config: LlamaConfig,
        verifier: Verifier,
        names: Collection[str] = (),
        *,
        norm_before_residual: bool = False,
        norm_output: bool = False,
        **options: Any,
    ) -> None:
        super().__init__(config, verifier, names, **options)
        size, epsilon = config.hidden_size, config.rms_norm_eps
        self.norm = LlamaRMSNorm(size, epsilon)
        self.embed_with(verifier, {"lm_head.weight", *names}, size)
        self._norms = "whole" if "input_norm.weight" in names else "each" if "fc_norm.0.weight" in names else ""
        if self._norms == "whole":
            self.input_norm = LlamaRMSNorm(self.fc.in_features, epsilon)
        if self._norms == "each":
            self.fc_norm = nn.ModuleList(LlamaRMSNorm(verifier.hidden_size, epsilon) for _ in self.reads)
        self._norm_before_residual, self._norm_output = norm_before_residual, norm_output

    @classmethod
    def fits(cls, checkpoint: Checkpoint) -> bool:
        return checkpoint.query_width == 2 and "mask_hidden" not in checkpoint.weights

    @classmethod
    def of(cls, checkpoint: Checkpoint, verifier: Verifier, **options: Any) -> "Eagle3":
        config, inputs = checkpoint.config, checkpoint.size("fc.weight", 1)
        number, rest = divmod(inputs, verifier.hidden_size)
        made_for = config.get("target_hidden_size")
        if rest or made_for is not None:
            checkpoint.check_hidden(made_for or inputs // 3, verifier)
        checkpoint.check_vocab(verifier)
        names = {*checkpoint.weights}
        checkpoint.check_embedded(["embed_tokens.weight"], names, verifier)
        return cls(
            checkpoint.llama(verifier),
            verifier,
            names,
            reads=reads_of(checkpoint, number, verifier),
            ids=checkpoint.token_ids("d2t", checkpoint.size("lm_head.weight"), verifier, offsets=True),
            norm_before_residual=bool(config.get("norm_before_residual")),
            norm_output=bool(config.get("norm_output")),
            **options,
        )

    def state(self, hidden: Sequence[Tensor]) -> Tensor:
        if self._norms == "each":
            hidden = [norm(part) for norm, part in zip(self.fc_norm, hidden, strict=True)]
        whole = torch.cat(list(hidden), dim=-1)
        return self.fc(self.input_norm(whole) if self._norms == "whole" else whole)

    def enter(self, embedded: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        layer = self.own_layers[0]
        normed = layer.hidden_norm(state)
        x = torch.cat([layer.input_layernorm(embedded), normed], dim=-1)
        return x, normed if self._norm_before_residual else state

    def logits(self, out: Tensor) -> Tensor:
        return self.project(self.norm(out))

    def next_state(self, out: Tensor) -> Tensor:
        return self.norm(out) if self._norm_output else out


def reads_of(checkpoint: Checkpoint, number: int, verifier: Verifier) -> tuple[int, ...]:
    """The ``number`` hidden states that an EAGLE-3 head reads, as Transformers counts them."""
    config, inner = checkpoint.config, checkpoint.config.get("eagle_config") or {}
    if number == 1 and not inner.get("use_aux_hidden_state", True):
        return (verifier.num_layers,)
    layers = config.get("eagle_aux_hidden_state_layer_ids") or config.get("aux_hidden_state_layer_ids")
    layers = layers or [layer + 1 for layer in inner.get("eagle_aux_hidden_state_layer_ids") or ()]
    layers = layers or [2, verifier.num_layers // 2, verifier.num_layers - 3]
    if len(layers) != number:
        raise checkpoint.wrong(f"its tensor fc.weight is for {number} hidden states, and its config names {len(layers)}")
    return checkpoint.check_reads(layers, verifier)
