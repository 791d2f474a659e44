"""EAGLE: a Llama layer that goes on with a model's hidden states by itself. The networks alone, which know nothing of files.

    EAGLE-1, 2:  x = fc(embedding, h);  out = layer(x), without the norm before attention;  logits = model's head(out)
    EAGLE-3:     h = fc(three hidden states);  out = layer over norm(embedding), norm(h), added to h;  logits = head(norm(out))

Position i combines the token at i + 1 with h, the model's state at i, and predicts the token at i + 2. After the text the
head's own output takes the place of h.

Li et al., arXiv 2401.15077, 2406.16858, 2503.01840.
"""

from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import LlamaConfig, PreTrainedModel
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm, LlamaRotaryEmbedding, apply_rotary_pos_emb

ATTENTION = "layers.0.self_attn."

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]  # query, key, value `[1, heads, n, head_dim]` to `[1, n, heads, head_dim]`


class Verifier(NamedTuple):
    """The model that a head drafts for; a tuple, so that PyTorch does not count it among the head's modules."""

    embed: nn.Module
    lm_head: nn.Module
    hidden_size: int
    vocab_size: int
    num_layers: int
    context_len: int

    @classmethod
    def of(cls, network: PreTrainedModel) -> "Verifier":
        text, embed = network.config.get_text_config(), network.get_input_embeddings()
        limit = getattr(text, "max_position_embeddings", None) or 2048
        sizes = (text.hidden_size, embed.weight.shape[0], text.num_hidden_layers, limit)
        return cls(embed, network.get_output_embeddings(), *map(int, sizes))


class Attention(nn.Module):
    """Attention of a Llama layer, over any number of inputs."""

    def __init__(self, config: LlamaConfig, inputs: int, names: Collection[str]) -> None:
        """Has those biases and norms whose tensors are in ``names``."""
        super().__init__()
        biased, out_biased, normed = (f"{ATTENTION}{name}" in names for name in ("q_proj.bias", "o_proj.bias", "q_norm.weight"))
        self.head_dim: int = config.head_dim
        queries, keys = (heads * self.head_dim for heads in (config.num_attention_heads, config.num_key_value_heads))
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(inputs, size, bias=biased) for size in (queries, keys, keys))
        self.o_proj = nn.Linear(queries, config.hidden_size, bias=out_biased)
        self.q_norm, self.k_norm = (LlamaRMSNorm(self.head_dim, config.rms_norm_eps) if normed else None for _ in range(2))

    def forward(self, x: Tensor, angles: tuple[Tensor, Tensor], attend: Attend) -> Tensor:
        """``[n, inputs]`` to ``[n, hidden_size]``."""
        query, key = self._heads_of(x, self.q_proj, self.q_norm), self._heads_of(x, self.k_proj, self.k_norm)
        query, key = apply_rotary_pos_emb(query, key, *angles)
        return self.o_proj(attend(query, key, self._heads_of(x, self.v_proj)).reshape(len(x), -1))

    def _heads_of(self, x: Tensor, projection: nn.Linear, norm: nn.Module | None = None) -> Tensor:
        """``[1, heads, n, head_dim]`` of ``[n, inputs]``."""
        heads: Tensor = projection(x).view(1, len(x), -1, self.head_dim)
        return (heads if norm is None else norm(heads)).transpose(1, 2)


class Layer(nn.Module):
    """A Llama layer whose input `Eagle` makes; that of EAGLE-3 is normed."""

    def __init__(self, config: LlamaConfig, inputs: int, names: Collection[str]) -> None:
        super().__init__()
        size, epsilon = config.hidden_size, config.rms_norm_eps
        self.self_attn = Attention(config, inputs, names)
        self.mlp = LlamaMLP(config)
        self.post_attention_layernorm = LlamaRMSNorm(size, epsilon)
        if inputs > size:
            self.input_layernorm, self.hidden_norm = LlamaRMSNorm(size, epsilon), LlamaRMSNorm(size, epsilon)

    def forward(self, x: Tensor, residual: Tensor, angles: tuple[Tensor, Tensor], attend: Attend) -> Tensor:
        residual = residual + self.self_attn(x, angles, attend)
        return residual + self.mlp(self.post_attention_layernorm(residual))


class Eagle(nn.Module):
    """EAGLE-1 and EAGLE-2, which differ in the trees that their authors make. Both embeddings are the model's."""

    kind = "eagle"
    inputs = 1  # of its attention, in hidden sizes
    _ids: Tensor | None

    def __init__(
        self,
        config: LlamaConfig,
        verifier: Verifier,
        names: Collection[str] = (),
        *,
        reads: Sequence[int],
        ids: Tensor | None = None,
    ) -> None:
        """A head that reads the hidden states ``reads``, as Transformers counts them: 0 are embeddings, the last is normed.

        ``names`` are those tensors that not every such head has, ``ids`` the tokens that it knows, if these are not all.
        """
        super().__init__()
        self.config, self.reads, self.vocab_size = config, tuple(reads), verifier.vocab_size
        self._verifier = verifier
        self.register_buffer("_ids", ids, persistent=False)
        size = config.hidden_size
        fc_inputs = len(reads) * verifier.hidden_size if self.inputs > 1 else 2 * size
        self.fc = nn.Linear(fc_inputs, size, bias="fc.bias" in names)
        self.layers: Any = nn.ModuleList([Layer(config, self.inputs * size, names)])
        with torch.device("cpu"):  # frequencies are never in 16 bits
            self._rotary = (LlamaRotaryEmbedding(config).to(verifier.embed.weight.device),)

    @property
    def known(self) -> list[int]:
        """The tokens that it may guess."""
        return list(range(self.vocab_size)) if self._ids is None else list(self._ids.tolist())

    def state(self, hidden: Sequence[Tensor]) -> Tensor:
        """What is kept of each token ``[n, hidden_size]``, of the model's hidden states that it ``reads``."""
        return hidden[0]

    def embed(self, tokens: Tensor) -> Tensor:
        return self._verifier.embed(tokens)

    def enter(self, embedded: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        """What the layer attends with, and what its output is added to."""
        x = self.fc(torch.cat([embedded, state], dim=-1))
        return x, x

    def forward(self, tokens: Tensor, states: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """``[n, hidden_size]`` of ``tokens`` ``[n]`` and ``states`` ``[n, hidden_size]`` at ``positions`` ``[1, n]``."""
        x, residual = self.enter(self.embed(tokens), states)
        return self.layers[0](x, residual, self._rotary[0](x, positions), attend)

    def logits(self, out: Tensor) -> Tensor:
        """``[n, tokens that it knows]`` of what `forward` gives."""
        return self._verifier.lm_head(out)

    def all_logits(self, out: Tensor) -> Tensor:
        """``[n, vocab_size]`` of what `forward` gives; tokens that it does not know are impossible."""
        logits = self.logits(out)
        if self._ids is None:
            return logits
        scattered = logits.new_full((len(logits), self.vocab_size), -torch.inf)
        scattered[:, self._ids] = logits
        return scattered

    def next_state(self, out: Tensor) -> Tensor:
        """What takes the place of `state` after the text."""
        return out


class Eagle3(Eagle):
    """EAGLE-3: reads several hidden states, has an output embedding of its own, and may know a part of the vocabulary only."""

    kind = "eagle3"
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
        if "embed_tokens.weight" in names:
            self.embed_tokens = nn.Embedding(verifier.vocab_size, size)
        self.lm_head = nn.Linear(size, len(self.known), bias=False)
        self.norm = LlamaRMSNorm(size, epsilon)
        self.input_norm = LlamaRMSNorm(self.fc.in_features, epsilon) if "input_norm.weight" in names else None
        self._norm_before_residual, self._norm_output = norm_before_residual, norm_output

    def state(self, hidden: Sequence[Tensor]) -> Tensor:
        whole = torch.cat(list(hidden), dim=-1)
        return self.fc(whole if self.input_norm is None else self.input_norm(whole))

    def embed(self, tokens: Tensor) -> Tensor:
        return self.embed_tokens(tokens) if hasattr(self, "embed_tokens") else super().embed(tokens)

    def enter(self, embedded: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        layer = self.layers[0]
        normed = layer.hidden_norm(state)
        x = torch.cat([layer.input_layernorm(embedded), normed], dim=-1)
        return x, normed if self._norm_before_residual else state

    def logits(self, out: Tensor) -> Tensor:
        return self.lm_head(self.norm(out))

    def next_state(self, out: Tensor) -> Tensor:
        return self.norm(out) if self._norm_output else out
