"""Function-preserving growth of Llama-architecture models: wider, deeper, same logits.

New residual channels start at zero; new heads, neurons and layers write zero. So the grown model computes what the old one
did (Net2Net, Chen, Goodfellow, Shlens, arXiv 1511.05641) at the cost of its new size. This has two uses: the full model is
trained from a smaller one, and benchmarks get models of any cost that behave like a trained family.

New weights that read are as large as the old ones. Muon makes the update of a matrix equally large in all directions, so the
small gradient of a neuron that reads little is lost beside those of the others, and it never learns.
"""

import torch
from transformers import LlamaConfig, LlamaForCausalLM


def grow(
    model: LlamaForCausalLM,
    *,
    hidden_size: int,
    intermediate_size: int,
    num_layers: int,
    num_heads: int,
    num_kv_heads: int,
    seed: int = 0,
) -> LlamaForCausalLM:
    """A larger model with the same function (exact up to floating point) and the dtype of ``model``.

    Head size and the number of query heads per key/value head must stay as they are, since rotary embeddings and the
    grouping of heads are part of the function. Raises ``ValueError`` if a dimension would shrink or a head would change.
    """
    old = model.config
    new = LlamaConfig(
        **{
            **old.to_dict(),
            "hidden_size": hidden_size,
            "intermediate_size": intermediate_size,
            "num_hidden_layers": num_layers,
            "num_attention_heads": num_heads,
            "num_key_value_heads": num_kv_heads,
            "head_dim": old.head_dim,
            # mean(x^2) falls by old/new when zero channels join, and epsilon is added to that mean
            "rms_norm_eps": old.rms_norm_eps * old.hidden_size / hidden_size,
        }
    )
    _check_growth(old, new)
    grown = LlamaForCausalLM(new).to(model.dtype)
    generator = torch.Generator().manual_seed(seed)
    source = model.state_dict()
    norm_scale = (old.hidden_size / hidden_size) ** 0.5
    with torch.no_grad():
        for name, weight in grown.state_dict().items():
            _fill(name, weight, source.get(name), norm_scale, generator)
    grown.tie_weights()
    return grown


def _fill(name: str, weight: torch.Tensor, source: torch.Tensor | None, norm_scale: float, generator: torch.Generator) -> None:
    """Fill one weight of the grown model in place; ``source`` is the old weight, ``None`` in a new layer."""
    if "norm" in name:
        weight.fill_(1.0)
        if source is not None:
            weight.fill_(norm_scale)
            weight[: source.shape[0]] = source * norm_scale
        return
    writes_residual = name.endswith(("o_proj.weight", "down_proj.weight", "embed_tokens.weight", "lm_head.weight"))
    if writes_residual:
        weight.zero_()
    else:
        scale = source.std() if source is not None else weight.shape[1] ** -0.5
        weight.copy_(torch.randn(weight.shape, generator=generator) * scale)
    if source is None:
        return
    rows, columns = source.shape
    weight[:rows, :columns] = source


def _check_growth(old: LlamaConfig, new: LlamaConfig) -> None:
    """Raise ``ValueError`` if a dimension would shrink, or query heads would share key/value heads in another way."""
    for field in ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"):
        if getattr(new, field) < getattr(old, field):
            raise ValueError(f"{field} cannot shrink from {getattr(old, field)} to {getattr(new, field)}")
    group = old.num_attention_heads // old.num_key_value_heads
    if new.num_attention_heads != group * new.num_key_value_heads:
        raise ValueError(
            f"num_heads {new.num_attention_heads} with num_kv_heads {new.num_key_value_heads}: "
            f"{group} query heads share a key/value head in the old model and must in the new one"
        )
