"""Lean layers: known shapes of work done in fewer steps, in the place of what Transformers' modules do step by step.

A module is known by its code: its ``forward`` must be, to the instruction, that of one of the classes listed here, and so must
what it calls. So a model that changes a little is left as it is. Whether the lean form says the same is tried with the rest of
the path when a model is loaded, see `cascade.engine.model.Model`.

The forms are for float32 on a CPU, whose kernels are `cascade.native`.
"""

from collections.abc import Sequence
from functools import partial
from types import CodeType, FunctionType
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from transformers.activations import ACT2FN
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
from transformers.models.glm.modeling_glm import GlmMLP
from transformers.models.llama import modeling_llama
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaMLP, LlamaRMSNorm
from transformers.models.mistral.modeling_mistral import MistralAttention
from transformers.models.olmo2.modeling_olmo2 import Olmo2RMSNorm
from transformers.models.qwen2.modeling_qwen2 import Qwen2Attention
from transformers.models.qwen3.modeling_qwen3 import Qwen3Attention

from cascade.engine.attention import NativePass
from cascade.engine.packed_linear import Product, product_of
from cascade.native.attention import Kind, attend
from cascade.native.layers import GELU_TANH, SILU, gated, rms_norm, rotate

Forward: TypeAlias = partial[Any]


def slim(network: nn.Module) -> int:
    """Give known modules of a packed network in float32 on a CPU their lean forms; how many there are."""
    forms = [(module, form) for module in network.modules() if (form := _form(module)) is not None]
    for module, form in forms:
        module.forward = form
    return len(forms)


def fatten(network: nn.Module) -> None:
    """Take the lean forms back."""
    for module in network.modules():
        if getattr(vars(module).get("forward"), "func", None) in (_norm, _mlp, _attention):
            del module.forward


def _form(module: Any) -> Forward | None:
    if "forward" in vars(module):
        return None
    return _norm_form(module) or _mlp_form(module) or _attention_form(module)


def _same(function: object, *others: object) -> bool:
    """Whether the code of a function is that of one of the others, whatever their names are."""
    return any(_code(function) == _code(other) for other in others)


def _code(function: object) -> tuple[Any, ...]:
    while hasattr(function, "__wrapped__"):
        function = function.__wrapped__
    if not isinstance(function, FunctionType):
        return (function,)
    code = function.__code__
    constants = tuple(one for one in code.co_consts if not isinstance(one, CodeType) and one != function.__doc__)
    return code.co_code, code.co_names, code.co_varnames, constants


def _calls(module: Any, name: str, expected: object) -> bool:
    """Whether what a module's code calls by a global name is what is expected."""
    forward = type(module).forward
    while hasattr(forward, "__wrapped__"):
        forward = forward.__wrapped__
    return _same(getattr(forward, "__globals__", {}).get(name), expected)


# norms


def _norm_form(module: Any) -> Forward | None:
    forward = type(module).forward
    weight = getattr(module, "weight", None)
    if not isinstance(weight, Tensor) or weight.dim() != 1 or weight.dtype is not torch.float32:
        return None
    if _same(forward, LlamaRMSNorm.forward, Olmo2RMSNorm.forward):  # which differ in 16 bits alone
        return partial(_norm, weight.data, module.variance_epsilon, 0.0)
    if _same(forward, GemmaRMSNorm.forward) and _same(type(module)._norm, GemmaRMSNorm._norm):
        return partial(_norm, weight.data, module.eps, 1.0)
    return None


def _norm(weight: Tensor, epsilon: float, offset: float, x: Tensor) -> Tensor:
    if x.shape[-1] != len(weight):  # weights that are spread
        raise ValueError(f"a norm of {len(weight)} numbers was given {x.shape[-1]}")
    rows = x.reshape(-1, x.shape[-1])
    return rms_norm(rows, weight, epsilon, offset).view(x.shape)


# gated networks


def _mlp_form(module: Any) -> Forward | None:
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
    return partial(_mlp, product, number, module.down_proj)


_ACTIVATIONS = {SILU: type(ACT2FN["silu"]), GELU_TANH: type(ACT2FN["gelu_pytorch_tanh"])}


def _mlp(product: Product, activation: int, down: nn.Module, x: Tensor) -> Tensor:
    wide = product.whole(x)
    out: Tensor = down(gated(wide.view(-1, wide.shape[-1]), activation).view(*x.shape[:-1], -1))
    return out


# attention with rotary positions


def _attention_form(module: Any) -> Forward | None:
    plain = _same(type(module).forward, *(kind.forward for kind in (LlamaAttention, MistralAttention, Qwen2Attention)))
    normed = _same(type(module).forward, Qwen3Attention.forward)
    if not (plain or normed) or not _rotates_halves(module):
        return None
    product = product_of((module.q_proj, module.k_proj, module.v_proj))
    norms = [_norm_form(norm) for norm in (module.q_norm, module.k_norm)] if normed else []
    known = [norm.args for norm in norms if norm is not None]
    if product is None or len(known) < len(norms):
        return None
    heads = (module.q_proj.out_features // module.head_dim, module.k_proj.out_features // module.head_dim)
    return partial(_attention, product, known, heads, module.head_dim, module)


def _rotates_halves(module: Any) -> bool:
    rotation = modeling_llama.apply_rotary_pos_emb
    if not _calls(module, "apply_rotary_pos_emb", rotation):
        return False
    its = type(module).forward.__globals__["apply_rotary_pos_emb"]
    while hasattr(its, "__wrapped__"):
        its = its.__wrapped__
    return _same(its.__globals__["rotate_half"], modeling_llama.rotate_half)


def _attention(
    product: Product,
    norms: Sequence[tuple[Tensor, float, float]],
    heads: tuple[int, int],
    size: int,
    module: Any,
    hidden_states: Tensor,
    position_embeddings: tuple[Tensor, Tensor],
    attention_mask: Tensor | None = None,
    past_key_values: object = None,
    cascade_pass: NativePass | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Queries, keys and values of one product, ``[tokens, heads, size]``, are normed and turned where they lie."""
    assert cascade_pass is not None
    whole = product.whole(hidden_states)[0]
    turned = sum(heads) * size
    begin = 0
    for count, norm in zip(heads, norms, strict=False):
        part = whole[:, begin : begin + count * size]
        rms_norm(part, *norm, out=part)
        begin += count * size
    cos, sin = position_embeddings
    rotate(whole[:, :turned], size, cos[0], sin[0])
    query, key, value = whole.unflatten(1, (-1, size)).transpose(0, 1).split((*heads, heads[1]))
    layer = module.layer_idx
    out = attend(query, key, value, cascade_pass.spans[layer], Kind(module.scaling, cascade_pass.windows[layer]))
    return module.o_proj(out[None]), None
