"""Lean layers: known shapes of work done in fewer steps, in the place of what Transformers' modules do step by step.

A module is known by its code: its ``forward`` must be, to the instruction, that of one of the classes listed here, and so must
what it calls. So a model that changes a little is left as it is. Whether the lean form says the same is tried with the rest of
the path when a model is loaded, see `cascade.engine.model.Model`.

What the steps are made of is a `Kit`: our own kernels for float32 on a CPU, and PyTorch's operations elsewhere, which become
kernels of Triton on a GPU.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from inspect import unwrap
from types import CodeType, FunctionType
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.activations import ACT2FN
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
from transformers.models.glm.modeling_glm import GlmMLP
from transformers.models.llama import modeling_llama
from transformers.models.llama.modeling_llama import (
    LlamaAttention,
    LlamaDecoderLayer,
    LlamaForCausalLM,
    LlamaMLP,
    LlamaModel,
    LlamaRMSNorm,
)
from transformers.models.mistral.modeling_mistral import MistralAttention, MistralForCausalLM, MistralModel
from transformers.models.olmo2.modeling_olmo2 import Olmo2RMSNorm
from transformers.models.qwen2.modeling_qwen2 import Qwen2Attention, Qwen2ForCausalLM, Qwen2Model
from transformers.models.qwen3.modeling_qwen3 import Qwen3Attention, Qwen3ForCausalLM, Qwen3Model

from cascade.engine.packed_linear import InBlocks, Product, product_of
from cascade.engine.whole_layer import Norm, WholeLayer
from cascade.engine.whole_layer import Parts as WholeParts
from cascade.engine.whole_network import WholeNetwork
from cascade.native import layers
from cascade.native.attention import Sizes
from cascade.native.layers import GELU_TANH, SILU

Forward: TypeAlias = partial[Any]
Parts: TypeAlias = tuple[Any, ...]  # what a lean form is made of, besides the kit


@dataclass(frozen=True, slots=True)
class Kit:
    """Steps of a layer on rows ``[tokens, ...]`` whose last dimension is dense."""

    norm: Callable[[Tensor, Tensor, float, float], Tensor]  # rows, weight, epsilon, offset: see `layers.rms_norm`
    gated: Callable[[Tensor, int], Tensor]  # gate and up behind each other, activation: see `layers.gated`
    rotate: Callable[[Tensor, int, Tensor, Tensor], Tensor]  # heads behind each other, size of one, cos, sin; may be in place
    whole: bool = False  # what our own kernels do step by step they do in one call, where all of a layer is known


def norm(x: Tensor, weight: Tensor, epsilon: float, offset: float) -> Tensor:
    """Of parts of rows as long as ``weight``."""
    size = weight.shape[0]
    scale = weight + offset if offset else weight
    return F.rms_norm(x.unflatten(-1, (-1, size)), (size,), scale, epsilon).flatten(-2)


def gated(x: Tensor, activation: int) -> Tensor:
    """``activation(gate) * up``."""
    gate, up = x.chunk(2, dim=-1)
    return (F.silu(gate) if activation == SILU else F.gelu(gate, approximate="tanh")) * up


def rotate(x: Tensor, size: int, cos: Tensor, sin: Tensor) -> Tensor:
    """Heads turned by the angles of their token: queries and keys at once."""
    heads = x.unflatten(-1, (-1, size))
    turned, rest = heads.split((cos.shape[-1], size - cos.shape[-1]), dim=-1)
    swapped = torch.cat((-turned[..., cos.shape[-1] // 2 :], turned[..., : cos.shape[-1] // 2]), dim=-1)
    out = turned * cos[:, None] + swapped * sin[:, None]
    return (torch.cat((out, rest), dim=-1) if rest.shape[-1] else out).flatten(-2)


PLAIN = Kit(norm, gated, rotate)
NATIVE = Kit(layers.rms_norm, layers.gated, layers.rotate, whole=True)


@lru_cache
def compiled() -> Kit:
    """The plain kit, each step one kernel."""
    norm_, gated_, rotate_ = (torch.compile(step, dynamic=True) for step in (norm, gated, rotate))
    return Kit(norm_, gated_, rotate_)


def choose_kit(device: torch.device, dtype: torch.dtype) -> Kit:
    """The best for a network on ``device`` whose hidden states are of ``dtype``."""
    if device.type == "cuda":
        return compiled()
    return NATIVE if device.type == "cpu" and dtype is torch.float32 else PLAIN


def slim(network: nn.Module, kit: Kit) -> int:
    """Give known modules of a packed network their lean forms; how many there are."""
    forms = [(module, form) for module in network.modules() if (form := _form(module, kit)) is not None]
    for module, form in forms:
        module.forward = form
    for module in network.modules() if kit.whole else ():
        if (parts := _whole_parts(module)) is not None:
            module.forward = WholeLayer(module, *parts)
    return len(forms)


def fatten(network: nn.Module) -> None:
    """Take the lean forms back."""
    for module in network.modules():
        form = vars(module).get("forward")
        if isinstance(form, WholeLayer) or getattr(form, "func", None) in (_norm, _mlp, _attention):
            del module.forward


def _form(module: Any, kit: Kit) -> Forward | None:
    if "forward" in vars(module):
        return None
    for find, lean in ((_norm_parts, _norm), (_mlp_parts, _mlp), (_attention_parts, _attention)):
        if (parts := find(module)) is not None:
            return partial(lean, kit, *parts)
    return None


def _same(function: object, *others: object) -> bool:
    """Whether the code of a function is that of one of the others, whatever their names are."""
    return any(_code(function) == _code(other) for other in others)


def _code(function: object) -> tuple[Any, ...]:
    function = unwrap(function) if callable(function) else function
    if not isinstance(function, FunctionType):
        return (function,)
    return _instructions(function.__code__, function.__doc__)


def _instructions(code: CodeType, doc: str | None = None) -> tuple[Any, ...]:
    """Of a function and of those within it, without where it stands."""
    constants = (one for one in code.co_consts if one is None or one != doc)
    inner = tuple(_instructions(one) if isinstance(one, CodeType) else one for one in constants)
    return code.co_code, code.co_names, code.co_varnames, inner


def _calls(module: Any, name: str, expected: object) -> bool:
    """Whether what a module's code calls by a global name is what is expected."""
    return _same(_called(type(module).forward, name), expected)


def _called(function: Callable[..., Any], name: str) -> object:
    """What a function's code, below its decorators, finds under a global name; None if nothing."""
    return getattr(unwrap(function), "__globals__", {}).get(name)


# norms


def _norm_parts(module: Any) -> Parts | None:
    forward = type(module).forward
    weight = getattr(module, "weight", None)
    if not isinstance(weight, Tensor) or weight.dim() != 1 or weight.device.type == "meta":
        return None
    if _same(forward, LlamaRMSNorm.forward, Olmo2RMSNorm.forward):  # which differ in 16 bits alone
        return weight.data, module.variance_epsilon, 0.0
    if _same(forward, GemmaRMSNorm.forward) and _same(type(module)._norm, GemmaRMSNorm._norm):
        return weight.data, module.eps, 1.0
    return None


def _norm(kit: Kit, weight: Tensor, epsilon: float, offset: float, x: Tensor) -> Tensor:
    if x.shape[-1] != weight.shape[0]:  # weights that are spread
        raise ValueError(f"a norm of {weight.shape[0]} numbers was given {x.shape[-1]}")
    return kit.norm(x.reshape(-1, x.shape[-1]), weight, epsilon, offset).view(x.shape)


# gated networks


def _mlp_parts(module: Any) -> Parts | None:
    if _same(type(module).forward, LlamaMLP.forward):
        activation, layers = module.act_fn, [module.gate_proj, module.up_proj]
    elif _same(type(module).forward, GlmMLP.forward):
        activation, layers = module.activation_fn, [module.gate_up_proj]
    else:
        return None
    number = next((number for number, kind in _ACTIVATIONS.items() if type(activation) is kind), None)
    product = product_of(layers)
    if number is None or product is None:
        return None
    return product, number, module.down_proj


_ACTIVATIONS = {SILU: type(ACT2FN["silu"]), GELU_TANH: type(ACT2FN["gelu_pytorch_tanh"])}


def _mlp(kit: Kit, product: Product, activation: int, down: nn.Module, x: Tensor) -> Tensor:
    wide = product.whole(x)
    out: Tensor = down(kit.gated(wide.view(-1, wide.shape[-1]), activation).view(*x.shape[:-1], -1))
    return out


# attention with rotary positions


def _attention_parts(module: Any) -> Parts | None:
    plain = _same(type(module).forward, *(kind.forward for kind in (LlamaAttention, MistralAttention, Qwen2Attention)))
    normed = _same(type(module).forward, Qwen3Attention.forward)
    if not (plain or normed) or not _rotates_halves(module):
        return None
    product = product_of((module.q_proj, module.k_proj, module.v_proj))
    norms = [_norm_parts(norm) for norm in (module.q_norm, module.k_norm)] if normed else []
    if product is None or None in norms:
        return None
    heads = (product.sizes[0] // module.head_dim, product.sizes[1] // module.head_dim)
    return product, norms, heads, module.head_dim, module


def _rotates_halves(module: Any) -> bool:
    rotation = modeling_llama.apply_rotary_pos_emb
    if not _calls(module, "apply_rotary_pos_emb", rotation):
        return False
    its = _called(type(module).forward, "apply_rotary_pos_emb")
    return callable(its) and _same(_called(its, "rotate_half"), modeling_llama.rotate_half)


def _attention(
    kit: Kit,
    product: Product,
    norms: Sequence[tuple[Tensor, float, float]],
    heads: tuple[int, int],
    size: int,
    module: Any,
    hidden_states: Tensor,
    position_embeddings: tuple[Tensor, Tensor],
    attention_mask: Tensor | None = None,
    cache: object = None,
    past_key_values: object = None,  # the name of ``cache`` before Transformers 5.24
    **options: Any,
) -> tuple[Tensor, None]:
    """Queries, keys and values are one product ``[tokens, heads * size]``; queries and keys are turned at once."""
    whole = product.whole(hidden_states)[0]
    tokens, asked, told = whole.shape[0], heads[0] * size, sum(heads) * size
    turned = whole[:, :told]
    if norms:
        parts = (whole[:, :asked], whole[:, asked:told])
        turned = torch.cat([kit.norm(part, *norm) for part, norm in zip(parts, norms, strict=True)], dim=-1)
    cos, sin = position_embeddings
    turned = kit.rotate(turned, size, cos[0], sin[0]).view(1, tokens, -1, size).transpose(1, 2)
    query, key = turned[:, : heads[0]], turned[:, heads[0] :]
    value = whole[None, :, told:].view(1, tokens, -1, size).transpose(1, 2)
    attend = _INTERFACE[module.config._attn_implementation]
    out, _ = attend(module, query, key, value, None, scaling=module.scaling, **options)
    return module.o_proj(out.reshape(1, tokens, -1)), None


_INTERFACE = AttentionInterface()


# whole layers


def _whole_parts(module: Any) -> tuple[nn.Module, WholeParts] | None:
    """The attention of a layer, and what the layer is made of, where all of it is lean and nobody listens in between."""
    if not _same(type(module).forward, LlamaDecoderLayer.forward):
        return None
    inner = (module.input_layernorm, module.self_attn, module.post_attention_layernorm, module.mlp)
    forms = [vars(one).get("forward") for one in inner]
    if [getattr(form, "func", None) for form in forms] != [_norm, _attention, _norm, _mlp] or _heard(module):
        return None
    (_, *before), (_, asked, norms, (heads, kv_heads), size, attention), (_, *then), (_, wide, activation, down) = (
        form.args for form in forms
    )
    products = [asked, product_of((attention.o_proj,)), wide, product_of((down,))]
    times = [one.whole for one in products if one is not None and isinstance(one.whole, InBlocks)]
    if len(times) < len(products):
        return None
    sizes = Sizes(heads, kv_heads, size, asked.sizes[2] // kv_heads)
    of_heads = tuple(Norm(*norm) for norm in norms)
    attended = (sizes, attention.scaling, times[1])
    return attention, WholeParts(Norm(*before), times[0], of_heads, *attended, Norm(*then), times[2], activation, times[3])


def whole_network(network: Any) -> WholeNetwork | None:
    """A network in one call, if all its layers are whole and nothing is known to lie between them."""
    backbone: Any = getattr(network, "model", None)
    if not _same(type(network).forward, *_MODELS) or not _same(type(backbone).forward, *_BACKBONES):
        return None
    if any("forward" in vars(one) for one in (network, backbone)) or network._forward_hooks or network._forward_pre_hooks:
        return None
    layers = [vars(layer).get("forward") for layer in backbone.layers[: backbone.config.num_hidden_layers]]
    norm, product = vars(backbone.norm).get("forward"), product_of((network.lm_head,))
    if getattr(norm, "func", None) is not _norm or not all(isinstance(layer, WholeLayer) for layer in layers):
        return None
    if product is None or type(backbone.embed_tokens) is not nn.Embedding:
        return None
    return WholeNetwork(backbone, layers, Norm(*norm.args[1:]), network.lm_head, product.whole)


_MODELS = (LlamaForCausalLM.forward, MistralForCausalLM.forward, Qwen2ForCausalLM.forward, Qwen3ForCausalLM.forward)
_BACKBONES = (LlamaModel.forward, MistralModel.forward, Qwen2Model.forward, Qwen3Model.forward)


def _heard(layer: nn.Module) -> bool:
    """Whether there are hooks on the modules within."""
    return any(one._forward_hooks or one._forward_pre_hooks for one in layer.modules() if one is not layer)
