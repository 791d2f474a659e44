"""EAGLE: a layer or two that go on with a model's hidden states by themselves, token after token.

Position i of its text is the token at i + 1 together with what is kept of the hidden states at i, so that it guesses the token
at i + 2. Behind the text its own output takes the place of hidden states.

    EAGLE-1, 2:  x = fc(embedding, h);  out = layer(x), without the norm before attention;  logits = verifier's head(out)
    EAGLE-3:     h = fc(three hidden states);  out = layer over norm(embedding), norm(h), added to h;  logits = head(norm(out))

Li et al., arXiv 2401.15077, 2406.16858, 2503.01840.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm, LlamaRotaryEmbedding, apply_rotary_pos_emb

from cascade.engine.heads.chain import Chain
from cascade.engine.heads.head import Place
from cascade.engine.kv import Span

Angles = tuple[Tensor, Tensor]


class Shared(NamedTuple):
    """What a head may have of its verifier; not parts of it."""

    embed: nn.Module
    lm_head: nn.Module


class Attention(nn.Module):
    """Of a Llama layer, over any number of inputs."""

    def __init__(self, config: LlamaConfig, inputs: int, *, biased: bool, normed: bool) -> None:
        super().__init__()
        self.layer_idx = 0
        self.head_dim: int = config.head_dim
        self.heads = (config.num_attention_heads, config.num_key_value_heads)
        queries, keys = (heads * self.head_dim for heads in self.heads)
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(inputs, size, bias=biased) for size in (queries, keys, keys))
        self.o_proj = nn.Linear(queries, config.hidden_size, bias=config.attention_bias)
        self.q_norm, self.k_norm = (LlamaRMSNorm(self.head_dim, config.rms_norm_eps) if normed else None for _ in range(2))

    def forward(self, x: Tensor, angles: Angles, place: Place, planned: Any) -> Tensor:
        """``[n, inputs]`` to ``[n, hidden_size]``."""
        query, key, value = (part(x).view(1, len(x), -1, self.head_dim) for part in (self.q_proj, self.k_proj, self.v_proj))
        if self.q_norm is not None and self.k_norm is not None:
            query, key = self.q_norm(query), self.k_norm(key)
        query, key = apply_rotary_pos_emb(query.transpose(1, 2), key.transpose(1, 2), *angles)
        out: Tensor = self.o_proj(place.attend(self, query, key, value.transpose(1, 2), planned).reshape(len(x), -1))
        return out


class Layer(nn.Module):
    """A Llama layer; the first one's input is made by `Eagle`, that of others is normed."""

    def __init__(self, config: LlamaConfig, inputs: int, *, first: bool, biased: bool, normed: bool) -> None:
        super().__init__()
        size, epsilon = config.hidden_size, config.rms_norm_eps
        self.self_attn = Attention(config, inputs, biased=biased, normed=normed)
        self.mlp = LlamaMLP(config)
        self.post_attention_layernorm = LlamaRMSNorm(size, epsilon)
        if not first or inputs > size:
            self.input_layernorm = LlamaRMSNorm(size, epsilon)
        if inputs > size:
            self.hidden_norm = LlamaRMSNorm(size, epsilon)

    def forward(self, x: Tensor, residual: Tensor, *attention: Any) -> Tensor:
        residual = residual + self.self_attn(x, *attention)
        out: Tensor = residual + self.mlp(self.post_attention_layernorm(residual))
        return out


class Eagle(Chain):
    """EAGLE-1 and EAGLE-2, which differ in the trees that their authors make."""

    kind = "eagle"

    def __init__(
        self,
        config: LlamaConfig,
        shared: Shared,
        *,
        reads: Sequence[int],
        num_layers: int,
        vocab_size: int,
        fc_inputs: int,
        ids: Tensor | None = None,
        biased: bool = False,
        normed: bool = False,
        fc_biased: bool = False,
    ) -> None:
        """``reads`` are hidden states and ``num_layers`` how many it has itself; ``biased`` and ``normed`` say
        what its attention has."""
        super().__init__(vocab_size, ids)
        size = config.hidden_size
        self.config, self.reads, self.width = config, tuple(reads), size
        self.fc = nn.Linear(fc_inputs, size, bias=fc_biased)
        wide = self._inputs(size)
        kinds = {"biased": biased, "normed": normed}
        made = [Layer(config, size if number else wide, first=not number, **kinds) for number in range(num_layers)]
        self.layers = nn.ModuleList(made)
        self.attends = (
            (config.num_attention_heads, config.num_key_value_heads, config.head_dim, config.head_dim),
        ) * num_layers
        self._shared = shared  # a tuple: its modules stay the verifier's
        with torch.device("cpu"):  # frequencies are never in 16 bits
            self._rotary = (LlamaRotaryEmbedding(config).to(shared.embed.weight.device),)

    @staticmethod
    def _inputs(size: int) -> int:
        """Of the first layer."""
        return size

    def number(self, first: int) -> None:
        for place, layer in enumerate(self.own_layers):
            layer.self_attn.layer_idx = first + place

    @property
    def own_layers(self) -> list[Layer]:
        return [layer for layer in self.layers if isinstance(layer, Layer)]

    @property
    def _embed(self) -> nn.Module:
        return self._shared.embed

    def state(self, hidden: Sequence[Tensor]) -> Tensor:
        return hidden[0]

    def enter(self, embedded: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        """What the first layer attends with, and what it is added to."""
        x = self.fc(torch.cat([embedded, state], dim=-1))
        return x, x

    def logits(self, out: Tensor) -> Tensor:
        found: Tensor = self._shared.lm_head(out)
        return found

    def _pass(self, tokens: Tensor, states: Tensor, positions: Sequence[int], place: Place, spans: Sequence[Span]) -> Tensor:
        """``[n, width]`` of the last layer."""
        where = torch.tensor(positions).to(tokens.device, non_blocking=True)[None]
        planned = place.plan(spans)
        return self.forward(tokens, states, where, lambda x, out, layer, angles: layer(x, out, angles, place, planned))

    def forward(
        self, tokens: Tensor, states: Tensor, positions: Tensor, apply: Callable[[Tensor, Tensor, Layer, Angles], Tensor]
    ) -> Tensor:
        """The same, with layers that ``apply`` calls; ``positions`` ``[1, n]``."""
        embedded = self._embed(tokens)
        x, out = self.enter(embedded, states)
        angles = self._rotary[0](x, positions)
        for number, layer in enumerate(self.own_layers):
            out = apply(layer.input_layernorm(out) if number else x, out, layer, angles)
        return out


class Eagle3(Eagle):
    """EAGLE-3: reads several hidden states, has a head of its own, and may know a part of the vocabulary only."""

    kind = "eagle3"

    def __init__(
        self,
        config: LlamaConfig,
        shared: Shared,
        *,
        own_embed: bool = False,
        draft_vocab_size: int,
        norms: str = "",
        norm_before_residual: bool = False,
        norm_output: bool = False,
        **sizes: Any,
    ) -> None:
        """``norms`` of what it reads: "each" hidden state by itself, "whole", or ""."""
        super().__init__(config, shared, **sizes)
        size, epsilon = config.hidden_size, config.rms_norm_eps
        self.norm = LlamaRMSNorm(size, epsilon)
        self.lm_head = nn.Linear(size, draft_vocab_size, bias=False)
        if own_embed:
            self.embed_tokens = nn.Embedding(self.vocab_size, size)
        if norms == "whole":
            self.input_norm = LlamaRMSNorm(self.fc.in_features, epsilon)
        if norms == "each":
            width = self.fc.in_features // len(self.reads)
            self.fc_norm = nn.ModuleList(LlamaRMSNorm(width, epsilon) for _ in self.reads)
        self._own_embed, self._norms = own_embed, norms
        self._norm_before_residual, self._norm_output = norm_before_residual, norm_output

    @staticmethod
    def _inputs(size: int) -> int:
        return 2 * size

    @property
    def _embed(self) -> nn.Module:
        return self.embed_tokens if self._own_embed else self._shared.embed

    def state(self, hidden: Sequence[Tensor]) -> Tensor:
        if self._norms == "each":
            hidden = [norm(part) for norm, part in zip(self.fc_norm, hidden, strict=True)]
        whole = torch.cat(list(hidden), dim=-1)
        out: Tensor = self.fc(self.input_norm(whole) if self._norms == "whole" else whole)
        return out

    def enter(self, embedded: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        layer = self.own_layers[0]
        normed = layer.hidden_norm(state)
        x = torch.cat([layer.input_layernorm(embedded), normed], dim=-1)
        return x, normed if self._norm_before_residual else state

    def logits(self, out: Tensor) -> Tensor:
        found: Tensor = self.lm_head(self.norm(out))
        return found

    def fed(self, out: Tensor) -> Tensor:
        normed: Tensor = self.norm(out) if self._norm_output else out
        return normed
