"""From the files of an EAGLE head to a network beside a loaded model.

As published: ``layers.0.*``, or ``midlayer.*`` of EAGLE-3, which also has ``norm``, ``lm_head`` and ``d2t``. Which hidden
states it reads: ids of ``eagle_config`` are of layers whose outputs are meant; those at the top level, of the ``speculators``
library, count as Transformers does. Without any they are the inputs of layers 2, n // 2 and n - 3.
"""

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from transformers import LlamaConfig, PreTrainedModel

from cascade.drafters import HEAD, DrafterSpec
from cascade.engine.heads.checkpoint import Checkpoint, model_errors, read
from cascade.engine.heads.eagle import ATTENTION, Eagle, Eagle3, Verifier
from cascade.engine.network.llama import is_written_out
from cascade.engine.network.products import multiply_row_by_row

FIRST_NAMES = ((r"^model\.", ""), (r"^midlayer\.", "layers.0."))  # patterns in names of tensors, and what replaces them
IGNORED = re.compile(r"^verifier_|rotary_emb\.")  # tensors that are the verifier's, or can be computed
ROPE = ("rope_theta", "rope_scaling", "rope_parameters")


def load_head(drafter: DrafterSpec, network: PreTrainedModel) -> Eagle:
    """The head for passes of ``network``, in its dtype and on its device; raises `ModelError` if it does not fit."""
    checkpoint = read_head(drafter.source)
    head = build(checkpoint, network)
    if drafter.kind not in (HEAD, head.kind):
        raise checkpoint.error(f"drafter.kind is {drafter.kind!r}, and its tensors are those of the kind {head.kind!r}")
    if is_written_out(network):  # whose hidden states are in float32, whatever its weights are in
        head.float()
    multiply_row_by_row(head)
    return head


def read_head(source: str) -> Checkpoint:
    """The files of a head under the names of `Eagle`, without tensors that are not read; raises `ModelError`."""
    checkpoint = read(source)
    weights: dict[str, Tensor] = {}
    for name, tensor in checkpoint.weights.items():
        for pattern, new in FIRST_NAMES:
            name = re.sub(pattern, new, name)
        if not IGNORED.search(name):
            weights[name] = tensor
    return replace(checkpoint, weights=weights)


def build(checkpoint: Checkpoint, network: PreTrainedModel) -> Eagle:
    """The head of a checkpoint as PyTorch runs it, in the dtype and on the device of ``network``; raises `ModelError`."""
    with model_errors(str(checkpoint.error("its config.json is wrong"))), torch.device("meta"):
        head = _without_weights(checkpoint, Verifier.of(network))
    checkpoint.fill(head)
    return head.to(device=network.device, dtype=network.dtype).eval()


def _without_weights(checkpoint: Checkpoint, verifier: Verifier) -> Eagle:
    """A head that fits a checkpoint; which kind is told from the inputs of its attention."""
    config, names = checkpoint.config, {*checkpoint.weights}
    if not {"fc.weight", f"{ATTENTION}q_proj.weight"} <= names:
        raise checkpoint.error("its tensors are of neither of the kinds eagle and eagle3")
    size, inputs = checkpoint.size("fc.weight"), checkpoint.size("fc.weight", 1)
    _check_vocab(checkpoint, verifier)
    if checkpoint.size(f"{ATTENTION}q_proj.weight", 1) == size:
        _check_hidden(checkpoint, size, verifier)
        return Eagle(_layer(checkpoint, verifier), verifier, names, reads=(verifier.num_layers,))
    number, rest = divmod(inputs, verifier.hidden_size)
    made_for = config.get("target_hidden_size")
    if rest or made_for is not None:
        _check_hidden(checkpoint, made_for or inputs // 3, verifier)
    if "embed_tokens.weight" not in names and size != verifier.hidden_size:  # the verifier's are too wide or too narrow
        raise checkpoint.error(f"it lacks the tensor embed_tokens.weight, for its hidden size {size} is not the model's")
    return Eagle3(
        _layer(checkpoint, verifier),
        verifier,
        names,
        reads=_reads(checkpoint, number, verifier),
        ids=_ids(checkpoint, checkpoint.size("lm_head.weight"), verifier),
        norm_before_residual=bool(config.get("norm_before_residual")),
        norm_output=bool(config.get("norm_output")),
    )


def _layer_config(checkpoint: Checkpoint) -> Mapping[str, Any]:
    """The configuration of its layer, which the ``speculators`` library puts into one of its own."""
    return checkpoint.config.get("transformer_layer_config") or checkpoint.config


def _check_hidden(checkpoint: Checkpoint, size: int, verifier: Verifier) -> None:
    if size != verifier.hidden_size:
        raise checkpoint.error(f"it was made for a hidden size of {size}, and the model's is {verifier.hidden_size}")


def _check_vocab(checkpoint: Checkpoint, verifier: Verifier) -> None:
    """Compare vocabularies, by the tensors that have a row for each token, or else by the configuration."""
    sizes: list[Any] = [len(checkpoint.weights[name]) for name in ("embed_tokens.weight", "t2d") if name in checkpoint.weights]
    for size in sizes or [_layer_config(checkpoint).get("vocab_size")]:
        if size not in (None, verifier.vocab_size):
            raise checkpoint.error(f"it was made for a vocabulary of {size} tokens, and the model has {verifier.vocab_size}")


def _reads(checkpoint: Checkpoint, number: int, verifier: Verifier) -> tuple[int, ...]:
    """The ``number`` hidden states that an EAGLE-3 head reads, as Transformers counts them."""
    config, inner = checkpoint.config, checkpoint.config.get("eagle_config") or {}
    if number == 1 and not inner.get("use_aux_hidden_state", True):
        return (verifier.num_layers,)
    layers = config.get("eagle_aux_hidden_state_layer_ids") or config.get("aux_hidden_state_layer_ids")
    layers = layers or [layer + 1 for layer in inner.get("eagle_aux_hidden_state_layer_ids") or ()]
    layers = layers or [2, verifier.num_layers // 2, verifier.num_layers - 3]
    if len(layers) != number:
        raise checkpoint.error(f"its tensor fc.weight is for {number} hidden states, and its config names {len(layers)}")
    if not all(isinstance(layer, int) and 0 <= layer <= verifier.num_layers for layer in layers):
        read = ", ".join(map(str, layers))
        raise checkpoint.error(f"it reads hidden states {read}, and the model has {verifier.num_layers} layers")
    return tuple(layers)


def _ids(checkpoint: Checkpoint, size: int, verifier: Verifier) -> Tensor | None:
    """Tokens that ``size`` logits stand for: ``d2t`` is what is added to their places. None for the whole vocabulary.

    Raises `ModelError` if they are no tokens of the verifier, or if without such a tensor they are not all.
    """
    vocab_size = verifier.vocab_size
    if "d2t" not in checkpoint.weights:
        if size != vocab_size:
            raise checkpoint.error(f"it guesses among {size} tokens, and the model has {vocab_size}")
        return None
    offsets = checkpoint.weights["d2t"].long()
    if offsets.shape != (size,):
        raise checkpoint.error(f"its tensor d2t is {list(offsets.shape)}, and it guesses among {size} tokens")
    ids = offsets + torch.arange(size, device=offsets.device)
    least, most = int(ids.min()), int(ids.max())
    if least < 0 or most >= vocab_size:
        raise checkpoint.error(f"by its tensor d2t it guesses tokens {least} to {most}, and the model has {vocab_size}")
    return ids


def _layer(checkpoint: Checkpoint, verifier: Verifier) -> LlamaConfig:
    """The configuration of its layer, sizes by its tensors; positions go as far as the verifier's."""
    config = _layer_config(checkpoint)
    queries, keys = (checkpoint.size(f"{ATTENTION}{name}_proj.weight") for name in ("q", "k"))
    heads = config.get("num_attention_heads")
    if not isinstance(heads, int):
        raise checkpoint.error("its config.json does not name num_attention_heads")
    head_dim = int(config.get("head_dim") or queries // heads)
    if queries != heads * head_dim or keys % head_dim or heads % max(1, keys // head_dim):
        raise checkpoint.error(f"{heads} heads of {head_dim} do not fit its queries of {queries} and keys of {keys}")
    return LlamaConfig(
        hidden_size=checkpoint.size("fc.weight"),
        intermediate_size=checkpoint.size("layers.0.mlp.gate_proj.weight"),
        num_hidden_layers=1,
        num_attention_heads=heads,
        num_key_value_heads=keys // head_dim,
        head_dim=head_dim,
        hidden_act=config.get("hidden_act") or "silu",
        rms_norm_eps=config.get("rms_norm_eps") or 1e-6,
        max_position_embeddings=verifier.context_len,
        mlp_bias="layers.0.mlp.gate_proj.bias" in checkpoint.weights,
        **{name: config[name] for name in ROPE if config.get(name) is not None},
    )
