"""The Llama family in plain PyTorch, without the code of Transformers' models, which takes seconds to import.

It holds the weights of a tier until `cascade.engine.network.llama` has put them into the order of our kernels, and it is what
the probe at load compares those kernels with: whole texts, one matrix after another, no packed rows, no store of keys and
values. Modules and weights have the names of Transformers' networks, so checkpoints and `Llama` fit either, and a test compares
its logits with theirs for every member of the family.
"""

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cascade.cpu.attention import Sizes
from cascade.engine.network.survey import Survey
from cascade.engine.weights import shape_of

UNUSED = "rotary_emb.inv_freq"  # ends the name of what old checkpoints hold beside weights


class Linear(nn.Linear):
    """A linear layer whose weights come from a checkpoint: to make some up would import PyTorch's compiler."""

    def reset_parameters(self) -> None:
        """Leave them as they are."""


class Embedding(nn.Embedding):
    """The same of an embedding."""

    def reset_parameters(self) -> None:
        """Leave it as it is."""


class Norm(nn.Module):
    """``x / rms(x) * weight``, the root of the mean square in float32."""

    def __init__(self, size: int, epsilon: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size))
        self.variance_epsilon = epsilon

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * F.rms_norm(x.float(), (x.shape[-1],), None, self.variance_epsilon).to(x.dtype)


class Rotary(nn.Module):
    """Cosines and sines by which queries and keys are turned."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self._config = config

    def forward(self, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        """``[..., n, head_dim]`` each in the dtype of ``x``, of positions ``[..., n]``."""
        config, scaling = self._config, 1.0
        kind = config.rope_parameters["rope_type"]
        if kind == "default":
            size = head_size(config)
            frequencies = 1.0 / (config.rope_parameters["rope_theta"] ** (torch.arange(0, size, 2, dtype=torch.float) / size))
        else:
            from transformers import PreTrainedConfig  # takes most of a second
            from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

            frequencies, scaling = ROPE_INIT_FUNCTIONS[kind](PreTrainedConfig(**config.to_dict()))
        angles = position_ids[..., None].float() * frequencies
        angles = torch.cat([angles, angles], -1)
        return (angles.cos() * scaling).to(x.dtype), (angles.sin() * scaling).to(x.dtype)


class Attention(nn.Module):
    """Grouped-query attention of whole texts."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.head_dim = size = head_size(config)
        self.scaling = size**-0.5
        queries, keys = config.num_attention_heads * size, config.num_key_value_heads * size
        biased = config.model_type in ("llama", "qwen3") and bool(getattr(config, "attention_bias", False))
        given = biased or config.model_type == "qwen2"
        self.q_proj = Linear(config.hidden_size, queries, bias=given)
        self.k_proj = Linear(config.hidden_size, keys, bias=given)
        self.v_proj = Linear(config.hidden_size, keys, bias=given)
        self.o_proj = Linear(queries, config.hidden_size, bias=biased)
        if config.model_type == "qwen3":
            self.q_norm, self.k_norm = Norm(size, config.rms_norm_eps), Norm(size, config.rms_norm_eps)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor) -> Tensor:
        q, k, v = (part(x).unflatten(-1, (-1, self.head_dim)) for part in (self.q_proj, self.k_proj, self.v_proj))
        if hasattr(self, "q_norm"):
            q, k = self.q_norm(q), self.k_norm(k)
        q, k, v = (part.transpose(1, 2) for part in (q, k, v))
        q, k = (part * cos + torch.cat([-part.chunk(2, -1)[1], part.chunk(2, -1)[0]], -1) * sin for part in (q, k))
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=self.scaling, enable_gqa=True)
        attended: Tensor = self.o_proj(out.transpose(1, 2).flatten(2))
        return attended


class GatedUnits(nn.Module):
    """``down(silu(gate(x)) * up(x))``."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        bias = config.model_type == "llama" and bool(getattr(config, "mlp_bias", False))
        self.gate_proj, self.up_proj = (Linear(config.hidden_size, config.intermediate_size, bias=bias) for _ in range(2))
        self.down_proj = Linear(config.intermediate_size, config.hidden_size, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class Layer(nn.Module):
    """Attention and gated units, each added to what it reads."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.self_attn, self.mlp = Attention(config), GatedUnits(config)
        self.input_layernorm, self.post_attention_layernorm = (Norm(config.hidden_size, config.rms_norm_eps) for _ in range(2))

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), cos, sin, mask)
        out: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return out


class Backbone(nn.Module):
    """Everything before the output embedding."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.embed_tokens = Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.num_hidden_layers))
        self.norm = Norm(config.hidden_size, config.rms_norm_eps)
        self.rotary_emb = Rotary(config)


class Plain(nn.Module):
    """A model of the family, see `cascade.engine.model_config.is_of_family`."""

    def __init__(self, config: Any) -> None:
        """Without memory for weights, see `fill`."""
        super().__init__()
        self.config = config
        with torch.device("meta"):
            self.model = Backbone(config)
            self.lm_head: nn.Module = Linear(config.hidden_size, config.vocab_size, bias=False)
        self.to(torch.bfloat16).requires_grad_(False)
        self.tie_weights()

    def fill(self, weights: Mapping[str, Any], dtype: torch.dtype) -> bool:
        """Take ``weights`` by name, tensors or slices of files, in ``dtype``; False if they are not exactly those that it has.

        An output embedding that stands beside the input embedding, though both are one, must be the same.
        """
        given = {name: part for name, part in weights.items() if not name.endswith(UNUSED)}
        head = given.pop("lm_head.weight", None) if self.config.tie_word_embeddings else None
        wanted = {name: [*part.shape] for name, part in self.state_dict().items()}
        if self.config.tie_word_embeddings:
            del wanted["lm_head.weight"]
        if wanted != {name: shape_of(part) for name, part in given.items()}:
            return False
        if head is not None and not torch.equal(head[:], given["model.embed_tokens.weight"][:]):
            return False
        self.load_state_dict({name: part[:].to(dtype) for name, part in given.items()}, strict=False, assign=True)
        self.requires_grad_(False)
        self.tie_weights()
        return True

    @torch.inference_mode()
    def forward(self, input_ids: Tensor) -> Tensor:
        """Logits ``[texts, n, vocab_size]`` of whole texts ``[texts, n]``."""
        positions = torch.arange(input_ids.shape[1])
        x: Tensor = self.model.embed_tokens(input_ids)
        cos, sin = self.model.rotary_emb(x, positions)
        back = positions[:, None] - positions  # how far a key lies before a query
        for layer, window in zip(self.model.layers, self.windows.values(), strict=True):
            mask = (back >= 0) if window is None else (back >= 0) & (back < window)
            x = layer(x, cos, sin, mask)
        logits: Tensor = self.lm_head(self.model.norm(x))
        return logits

    @property
    def windows(self) -> dict[int, int | None]:
        """Positions that a query of each layer sees, itself included; all those before it if None."""
        config, layers = self.config, range(self.config.num_hidden_layers)
        if config.model_type == "llama":
            return dict.fromkeys(layers)
        if config.model_type == "mistral":
            return dict.fromkeys(layers, config.sliding_window)
        kinds = getattr(config, "layer_types", None) or ["full_attention"] * len(layers)
        return {layer: config.sliding_window if kinds[layer] == "sliding_attention" else None for layer in layers}

    @property
    def survey(self) -> Survey:
        """What its layers attend to."""
        size = head_size(self.config)
        heads = Sizes(self.config.num_attention_heads, self.config.num_key_value_heads, size, size)
        return Survey(self.windows, heads=dict.fromkeys(range(self.config.num_hidden_layers), heads))

    # as Transformers' networks

    @property
    def device(self) -> torch.device:
        return self.model.embed_tokens.weight.device

    @property
    def dtype(self) -> torch.dtype:
        return self.model.embed_tokens.weight.dtype

    def num_parameters(self) -> int:
        return sum(part.numel() for part in self.parameters())

    def get_input_embeddings(self) -> nn.Embedding:
        return self.model.embed_tokens

    def get_output_embeddings(self) -> Any:
        return self.lm_head

    def set_output_embeddings(self, head: nn.Module) -> None:
        self.lm_head = head

    def tie_weights(self) -> None:
        if self.config.tie_word_embeddings and isinstance(self.lm_head, nn.Linear):
            self.lm_head.weight = self.model.embed_tokens.weight


def kind_of(network: Any) -> str:
    """What a network is called in messages."""
    return f"A {network.config.model_type} model" if isinstance(network, Plain) else type(network).__name__


def head_size(config: Any) -> int:
    """Numbers of a query, a key or a value of one head."""
    return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)
