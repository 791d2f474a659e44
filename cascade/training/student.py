"""A student cut out of its teacher: fewer layers, a narrower residual stream, fewer neurons, fewer tokens to predict.

Once the weights of its norms are folded into the projections after them, a model of the Llama architecture computes the same
with a rotated residual stream (SliceGPT, Ashkboos et al., arXiv 2401.15024). So the stream is rotated to its principal
components, and the weak ones are cut off. Of each layer the neurons that contribute most are kept. Such a student keeps what is
hardest to learn again, such as heads that copy from far back (Minitron, Muralidharan et al., arXiv 2407.14679).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedConfig, PreTrainedModel

from cascade.errors import ConfigError

ALIGNED = 8  # widths are multiples of this
STEP = 64  # numbers of neurons are multiples of this, whole tiles of matrix units
LEAST_LAYERS = 2
VOCAB_SHARE = 4  # the student predicts one token in this many
OWN = ("architectures", "model_type", "_name_or_path", "sliding_window")  # keys that a student does not inherit
WIDER = 1.5  # factor on the square root of the share: few wide layers take less time than many narrow ones


@dataclass(frozen=True, slots=True)
class Shape:
    """Size of a student; its heads and tokens are its teacher's."""

    hidden_size: int
    intermediate_size: int
    layers: tuple[int, ...]  # layers of the teacher that are kept, increasing
    vocab_size: int  # tokens that it predicts

    @classmethod
    def whole(cls, teacher: PreTrainedConfig) -> "Shape":
        """The shape of the teacher."""
        return cls(teacher.hidden_size, teacher.intermediate_size, tuple(range(teacher.num_hidden_layers)), teacher.vocab_size)

    @classmethod
    def costing(cls, teacher: PreTrainedConfig, cost: float) -> "Shape":
        """The shape whose pass reads at most the share ``cost`` of the teacher's weights.

        It predicts a quarter of the tokens, as EAGLE-3 heads do: the output embedding is most of a small model's pass.
        Width and neurons shrink with about the square root of the share; layers use up the rest. Raises `ConfigError`
        if no shape costs so little, and for an architecture other than Llama's.
        """
        biased = getattr(teacher, "attention_bias", False) or getattr(teacher, "mlp_bias", False)
        if teacher.model_type not in ("llama", "mistral") or biased:
            raise ConfigError(
                f"Students are cut out of models of the Llama architecture without biases, not of {teacher.model_type}"
            )
        total = weights_read(teacher, Shape.whole(teacher))
        predicted = -(-teacher.vocab_size // VOCAB_SHARE)
        unit = math.lcm(teacher.num_attention_heads, ALIGNED)  # Transformers needs widths that are multiples of the heads
        wanted, neurons = WIDER * teacher.hidden_size * cost**0.5, teacher.intermediate_size * cost**0.5
        neurons = min(teacher.intermediate_size, max(1, round(neurons / STEP)) * STEP)
        for width in sorted(range(unit, teacher.hidden_size + 1, unit), key=lambda width: abs(width - wanted)):
            none, single = (weights_read(teacher, Shape(width, neurons, layers, predicted)) for layers in ((), (0,)))
            layers = int((cost * total - none) / (single - none))
            if layers >= LEAST_LAYERS:
                return cls(width, neurons, spread(teacher.num_hidden_layers, min(layers, teacher.num_hidden_layers)), predicted)
        raise ConfigError(f"cost is {cost:g}: no student of this model costs so little, its output embedding alone costs more")


def spread(num_layers: int, kept: int) -> tuple[int, ...]:
    """``kept`` layers of ``num_layers``, evenly spread; the first two and the last are among them where that is possible.

    The other layers depend on the first ones, which transform the embeddings.
    """
    if kept >= num_layers:
        return tuple(range(num_layers))
    if kept < 3:
        return (0, num_layers - 1)[:kept]
    inner = [1 + round(i * (num_layers - 3) / max(1, kept - 3)) for i in range(kept - 2)]
    return (0, *inner, num_layers - 1)


def cut(teacher: PreTrainedModel, shape: Shape, ids: Tensor) -> LlamaForCausalLM:
    """The student before its training, in float32 on the teacher's device.

    ``ids`` ``[rows, n]`` is text for choosing principal components and neurons; some 10,000 tokens are enough.
    """
    basis, strength = _observe(teacher, shape, ids)
    with torch.no_grad():
        return _build(teacher, shape, basis, strength)


@torch.inference_mode()
def _observe(teacher: PreTrainedModel, shape: Shape, ids: Tensor) -> tuple[Tensor, list[Tensor]]:
    """The strongest principal components of the teacher's residual stream, as orthonormal columns ``[hidden_size, width]``.

    Also, for each kept layer, how much each neuron adds to the stream, ``[intermediate_size]``.
    """
    strength = [torch.zeros(teacher.config.intermediate_size) for _ in shape.layers]
    hooks = []
    for place, index in enumerate(shape.layers):
        down = teacher.model.layers[index].mlp.down_proj

        def note(module: nn.Module, inputs: tuple[Tensor, ...], place: int = place, down: Any = down) -> None:
            strength[place] += (inputs[0].float().abs().flatten(0, -2).mean(0) * down.weight.float().norm(dim=0)).cpu()

        hooks.append(down.register_forward_pre_hook(note))
    moment = torch.zeros(teacher.config.hidden_size, teacher.config.hidden_size, dtype=torch.float64)
    try:
        for part in ids.split(4):
            states = teacher(part, use_cache=False, output_hidden_states=True).hidden_states
            # the last state, after the final norm, counts most: the student predicts from it
            for state, weight in ((states[0], 2.0), *((s, 1.0) for s in states[1:-1]), (states[-1], len(states))):
                x = state.flatten(0, 1).float()
                x = x / x.norm(dim=-1, keepdim=True).clamp_min(1e-6)
                moment += weight * (x.T @ x).double().cpu()
    finally:
        for hook in hooks:
            hook.remove()
    vectors = torch.linalg.eigh(moment).eigenvectors.flip(1)
    return vectors[:, : shape.hidden_size].float().to(teacher.device), strength


def _build(teacher: PreTrainedModel, shape: Shape, q: Tensor, strength: Sequence[Tensor]) -> LlamaForCausalLM:
    """The student, from the results ``q`` and ``strength`` of `_observe`."""
    old = teacher.config
    same = {name: value for name, value in old.to_dict().items() if name not in OWN}
    changed = {
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.intermediate_size,
        "num_hidden_layers": len(shape.layers),
        "head_dim": getattr(old, "head_dim", None) or old.hidden_size // old.num_attention_heads,
        "layer_types": None,
        "tie_word_embeddings": True,
        "dtype": torch.float32,
    }
    student = LlamaForCausalLM(LlamaConfig(**same | changed)).to(teacher.device)
    gain = math.sqrt(old.hidden_size / shape.hidden_size)  # the norm divides by the root of the mean over fewer channels
    body = teacher.model
    final = body.norm.weight.float()
    # Tied embeddings: rows have the final norm folded in for the output. The first layer undoes that where it reads, and its
    # attention writes likewise; what its neurons write is far larger than the embedding, and is as in the other layers.
    student.model.embed_tokens.weight.copy_(teacher.get_output_embeddings().weight.float() * final @ q)
    student.model.norm.weight.fill_(gain)
    rows = teacher.get_input_embeddings().weight.float()
    stretch = float(((rows * final).norm(dim=1) / rows.norm(dim=1).clamp_min(1e-6)).mean())  # the first norms undo it
    undo = q / torch.where(final.abs() < 0.05, 0.05, final)[:, None]
    for place, (new, index) in enumerate(zip(student.model.layers, shape.layers, strict=True)):
        layer = body.layers[index]
        read = undo if place == 0 else q
        kept = strength[place].topk(shape.intermediate_size).indices.sort().values.to(q.device)
        before, after = layer.input_layernorm.weight.float(), layer.post_attention_layernorm.weight.float()
        for name in ("q_proj", "k_proj", "v_proj"):
            weight = getattr(layer.self_attn, name).weight.float()
            getattr(new.self_attn, name).weight.copy_((weight * before) @ read)
        write = (final[:, None] * q if place == 0 else q).T
        new.self_attn.o_proj.weight.copy_(write @ layer.self_attn.o_proj.weight.float())
        for name in ("gate_proj", "up_proj"):
            getattr(new.mlp, name).weight.copy_((getattr(layer.mlp, name).weight.float() * after)[kept] @ read)
        new.mlp.down_proj.weight.copy_(q.T @ layer.mlp.down_proj.weight.float()[:, kept])
        for norm in (new.input_layernorm, new.post_attention_layernorm):
            norm.weight.fill_(gain * stretch if place == 0 else gain)
    student.tie_weights()
    return student


def weights_read(config: PreTrainedConfig, shape: Shape) -> int:
    """Weights that a pass reads for a token: all but the input embedding."""
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    attention: int = 2 * (config.num_attention_heads + config.num_key_value_heads) * head_dim
    return shape.hidden_size * (shape.vocab_size + len(shape.layers) * (attention + 3 * shape.intermediate_size))
