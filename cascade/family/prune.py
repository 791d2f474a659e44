"""Pruning of Llama-architecture models to some layers and the strongest neurons of each: where a student begins.

A student cut out of its teacher keeps what is hardest to learn anew, such as heads that copy from far back (DistilBERT, Sanh
et al., arXiv 1910.01108; Minitron, Muralidharan et al., arXiv 2407.14679).
"""

from collections.abc import Sequence

import torch
from transformers import LlamaConfig, LlamaForCausalLM


def prune(model: LlamaForCausalLM, *, layers: Sequence[int], intermediate_size: int) -> LlamaForCausalLM:
    """A copy of ``model`` that has only ``layers``, by index from the bottom, with ``intermediate_size`` neurons in each.

    Embeddings, norms and heads stay as they are. Raises ``ValueError`` if a layer does not exist, or has fewer
    neurons.
    """
    old = model.config
    if not layers or not all(0 <= layer < old.num_hidden_layers for layer in layers):
        raise ValueError(f"layers {list(layers)}: the model has layers 0 to {old.num_hidden_layers - 1}")
    if intermediate_size > old.intermediate_size:
        raise ValueError(f"intermediate_size {intermediate_size}: the model has {old.intermediate_size} neurons in a layer")
    sizes = {"num_hidden_layers": len(layers), "intermediate_size": intermediate_size, "layer_types": None}
    pruned = LlamaForCausalLM(LlamaConfig(**{**old.to_dict(), **sizes})).to(model.dtype)
    pruned.model.embed_tokens.load_state_dict(model.model.embed_tokens.state_dict())
    pruned.model.norm.load_state_dict(model.model.norm.state_dict())
    pruned.lm_head.load_state_dict(model.lm_head.state_dict())
    for new, index in zip(pruned.model.layers, layers, strict=True):
        new.load_state_dict(_strongest(model.model.layers[index].state_dict(), intermediate_size))
    pruned.tie_weights()
    return pruned.eval()


def _strongest(layer: dict[str, torch.Tensor], num_neurons: int) -> dict[str, torch.Tensor]:
    """The weights of a layer with the ``num_neurons`` whose weights have the largest norms, in their old order."""
    gate, up, down = (layer[f"mlp.{name}_proj.weight"] for name in ("gate", "up", "down"))
    strength = gate.norm(dim=1) * up.norm(dim=1) * down.norm(dim=0)
    kept = strength.topk(num_neurons).indices.sort().values
    rest = {"mlp.gate_proj.weight": gate[kept], "mlp.up_proj.weight": up[kept], "mlp.down_proj.weight": down[:, kept]}
    return {**layer, **rest}
