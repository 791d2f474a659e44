"""From a path or hub id to a head for a loaded model."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import LlamaConfig, PreTrainedModel

from cascade.engine.checkpoint import reason
from cascade.engine.heads.block import DFlash
from cascade.engine.heads.block_formats import Layout, layout_of, reads_of
from cascade.engine.heads.eagle import Eagle, Eagle3, Shared
from cascade.engine.heads.formats import Checkpoint, kind_of, layers_of, read, token_ids
from cascade.engine.heads.head import Head
from cascade.engine.heads.markov import KINDS, Confidence, DSpark, Markov
from cascade.engine.heads.medusa import Block, Medusa
from cascade.engine.heads.mtp import Mtp
from cascade.engine.heads.mtp_formats import holds_mtp
from cascade.engine.heads.mtp_loading import load_mtp
from cascade.engine.heads.peagle import Peagle
from cascade.engine.llama import between
from cascade.errors import ModelError
from cascade.scorer import MAX_FORKED

ROPE = ("rope_theta", "rope_scaling", "rope_parameters")
ATTENTION = "layers.0.self_attn."
MTP = Mtp.kind
PARALLEL = 8  # guesses of P-EAGLE


class Verifier(NamedTuple):
    """What a head must fit."""

    hidden_size: int
    vocab_size: int
    num_layers: int
    context_len: int
    shared: Shared

    @classmethod
    def of(cls, network: PreTrainedModel) -> "Verifier":
        text, embed = network.config.get_text_config(), network.get_input_embeddings()
        shared = Shared(embed, network.get_output_embeddings())
        limit = getattr(text, "max_position_embeddings", None) or 2048
        return cls(int(text.hidden_size), int(embed.weight.shape[0]), int(text.num_hidden_layers), int(limit), shared)


def load_head(source: str, network: PreTrainedModel, *, kind: str = "auto", revision: str | None = None) -> Head:
    """The head of a path or hub id, in the dtype and on the device of ``network``; raises `ModelError` if it does not fit.

    Of the kind "mtp" the ``source`` "" is the checkpoint of ``network``.
    """
    if kind not in ("auto", *MAKERS, MTP):
        raise ModelError(f"drafter_kind is {kind!r}: it must be one of auto, {', '.join((*MAKERS, MTP))}")
    if kind == MTP:
        return load_mtp(source, network, revision=revision)
    if not source:
        raise ModelError(f"drafter is '': give a path or hub id, or drafter_kind {MTP!r} for layers of the model's checkpoint")
    checkpoint = read(source, revision=revision)
    if kind == "auto" and holds_mtp(checkpoint.weights):
        return load_mtp(source, network, revision=revision)
    found = kind_of(checkpoint)
    if kind not in ("auto", found):
        raise checkpoint.wrong(f"drafter_kind is {kind!r}, and its tensors are those of the kind {found!r}")
    try:
        with torch.device("meta"):
            head = MAKERS[found](checkpoint, Verifier.of(network))
    except ModelError:
        raise
    except Exception as error:  # of Transformers
        raise checkpoint.wrong(f"its config.json is wrong ({reason(error)})") from error
    checkpoint.fill(head)
    head = head.to(device=network.device, dtype=network.dtype).eval()
    head.hasten(between(network))
    return head


def _medusa(checkpoint: Checkpoint, verifier: Verifier) -> Head:
    size, blocks = verifier.hidden_size, []
    for number in range(checkpoint.count("blocks.{}.")):
        block, logits = f"blocks.{number}.", checkpoint.size(f"blocks.{number}.lm_head.weight")
        _check_hidden(checkpoint, checkpoint.size(f"{block}lm_head.weight", 1), verifier)
        biased = f"{block}layers.0.bias" in checkpoint.weights
        layers = [nn.Linear(size, size, bias=biased) for _ in range(checkpoint.count(block + "layers.{}."))]
        blocks.append(Block(layers, nn.Linear(size, logits, bias=False)))
    ids = token_ids(checkpoint, "token_map", blocks[0].lm_head.out_features, verifier.vocab_size, offsets=False)
    sizes = {"num_layers": verifier.num_layers, "hidden_size": size, "vocab_size": verifier.vocab_size}
    return Medusa(blocks, ids=ids, **sizes)


def _eagle(checkpoint: Checkpoint, verifier: Verifier) -> Head:
    size = checkpoint.size("fc.weight")
    _check_hidden(checkpoint, size, verifier)
    _check_vocab(checkpoint, verifier)
    options = _options(checkpoint, verifier)
    return Eagle(_config(checkpoint, verifier), verifier.shared, reads=(verifier.num_layers,), fc_inputs=2 * size, **options)


def _eagle3(checkpoint: Checkpoint, verifier: Verifier) -> Head:
    return Eagle3(_config(checkpoint, verifier), verifier.shared, **_eagle3_options(checkpoint, verifier))


def _peagle(checkpoint: Checkpoint, verifier: Verifier) -> Head:
    options, names = _eagle3_options(checkpoint, verifier), ("mask_token_id", "ptd_token_id", "pard_token")
    mask = next((checkpoint.config[name] for name in names if checkpoint.config.get(name) is not None), None)
    if not isinstance(mask, int):
        raise checkpoint.wrong("its config.json does not name mask_token_id")
    if not 0 <= mask < verifier.vocab_size:
        raise checkpoint.wrong(f"its masks are token {mask}, and the model has {verifier.vocab_size}")
    most = _trained_for(checkpoint)
    return Peagle(_config(checkpoint, verifier), verifier.shared, mask=mask, most=most, **options)


def _trained_for(checkpoint: Checkpoint) -> int:
    """Guesses behind a text, as ``speculators`` says it, or the usual number."""
    methods = (checkpoint.config.get("speculators_config") or {}).get("proposal_methods") or [{}]
    return min(MAX_FORKED, int(methods[0].get("speculative_tokens") or PARALLEL))


def _eagle3_options(checkpoint: Checkpoint, verifier: Verifier) -> dict[str, Any]:
    """What both kinds are told."""
    size, inputs = checkpoint.size("fc.weight"), checkpoint.size("fc.weight", 1)
    number, rest = divmod(inputs, verifier.hidden_size)
    told = checkpoint.config.get("target_hidden_size")
    if rest or told not in (None, verifier.hidden_size):
        _check_hidden(checkpoint, told or inputs // 3, verifier)
    _check_vocab(checkpoint, verifier)
    own_embed = "embed_tokens.weight" in checkpoint.weights
    if not own_embed and size != verifier.hidden_size:
        raise checkpoint.wrong(f"it lacks the tensor embed_tokens.weight, for its hidden size {size} is not the model's")
    logits = checkpoint.size("lm_head.weight")
    norms = "whole" if "input_norm.weight" in checkpoint.weights else "each" if "fc_norm.0.weight" in checkpoint.weights else ""
    return _options(checkpoint, verifier) | {
        "own_embed": own_embed,
        "draft_vocab_size": logits,
        "norms": norms,
        "norm_before_residual": bool(checkpoint.config.get("norm_before_residual", False)),
        "norm_output": bool(checkpoint.config.get("norm_output", False)),
        "fc_inputs": inputs,
        "reads": layers_of(checkpoint, number, verifier.num_layers),
        "ids": token_ids(checkpoint, "d2t", logits, verifier.vocab_size, offsets=True),
    }


def _dflash(checkpoint: Checkpoint, verifier: Verifier) -> Head:
    architectures = checkpoint.config.get("architectures") or [""]
    return DFlash(
        _config(checkpoint, verifier),
        verifier.shared,
        _layout(checkpoint, verifier, shifted="DSpark" in str(architectures[0])),
        **_block_options(checkpoint, verifier),
    )


def _dspark(checkpoint: Checkpoint, verifier: Verifier) -> Head:
    size, weights = checkpoint.size("fc.weight"), checkpoint.weights
    options = _block_options(checkpoint, verifier)
    markov, confidence, rank = None, None, 0
    if "markov_head.markov_w1.weight" in weights:
        rank, tokens = checkpoint.size("markov_head.markov_w1.weight", 1), options["draft_vocab_size"] or verifier.vocab_size
        kind = next((kind for kind, layer in KINDS.items() if layer and f"markov_head.{layer}.weight" in weights), "plain")
        markov = Markov(kind, rank=rank, vocab_size=verifier.vocab_size, tokens=tokens, hidden_size=size)
    if "confidence_head.proj.weight" in weights:
        confidence = Confidence(size + rank if checkpoint.size("confidence_head.proj.weight", 1) > size else size)
    layout = _layout(checkpoint, verifier, shifted=True)
    return DSpark(_config(checkpoint, verifier), verifier.shared, layout, markov=markov, confidence=confidence, **options)


def _layout(checkpoint: Checkpoint, verifier: Verifier, *, shifted: bool) -> Layout:
    layout = layout_of(checkpoint, checkpoint.count("layers.{}."), shifted=shifted)
    if "mask_embedding" not in checkpoint.weights and not 0 <= layout.mask < verifier.vocab_size:
        raise checkpoint.wrong(f"its masks are token {layout.mask}, and the model has {verifier.vocab_size}")
    return layout


def _block_options(checkpoint: Checkpoint, verifier: Verifier) -> dict[str, Any]:
    """What both kinds of drafters of blocks are told."""
    _check_vocab(checkpoint, verifier)
    size, inputs = checkpoint.size("fc.weight"), checkpoint.size("fc.weight", 1)
    options = _options(checkpoint, verifier)
    reads = reads_of(checkpoint, options.pop("num_layers"), verifier.num_layers)
    if inputs != len(reads) * verifier.hidden_size:
        if inputs % len(reads):
            raise checkpoint.wrong(
                f"its tensor fc.weight takes {inputs} numbers, and its config names {len(reads)} hidden states"
            )
        _check_hidden(checkpoint, inputs // len(reads), verifier)
    own_embed, own_head = (
        _differs(checkpoint, name, layer)
        for name, layer in zip(("embed_tokens.weight", "lm_head.weight"), verifier.shared, strict=True)
    )
    for name, own in (("embed_tokens.weight", own_embed), ("lm_head.weight", own_head)):
        if not own and size != verifier.hidden_size:
            raise checkpoint.wrong(f"it lacks the tensor {name}, for its hidden size {size} is not the model's")
    tokens = checkpoint.size("lm_head.weight") if own_head else verifier.vocab_size
    return options | {
        "reads": reads,
        "fc_inputs": inputs,
        "ids": token_ids(checkpoint, "d2t", tokens, verifier.vocab_size, offsets=True) if own_head else None,
        "own_embed": own_embed,
        "own_mask": "mask_embedding" in checkpoint.weights,
        "draft_vocab_size": tokens if own_head else 0,
    }


def _differs(checkpoint: Checkpoint, name: str, layer: nn.Module) -> bool:
    """Whether a tensor is there that does something else than the verifier's, which may scale embeddings."""
    given, held = checkpoint.weights.get(name), layer.weight
    assert isinstance(held, Tensor)
    if given is None:
        return False
    if type(layer) not in (nn.Embedding, nn.Linear) or given.shape != held.shape:
        return True
    return not torch.equal(given.to(device=held.device, dtype=held.dtype), held)


MAKERS: dict[str, Callable[[Checkpoint, Verifier], Head]] = {
    "medusa": _medusa,
    "eagle": _eagle,
    "eagle3": _eagle3,
    "peagle": _peagle,
    "dflash": _dflash,
    "dspark": _dspark,
}


def _options(checkpoint: Checkpoint, verifier: Verifier) -> dict[str, Any]:
    """What is told from the tensors of all kinds with layers."""
    return {
        "num_layers": checkpoint.count("layers.{}."),
        "vocab_size": verifier.vocab_size,
        "fc_biased": "fc.bias" in checkpoint.weights,
        "biased": ATTENTION + "q_proj.bias" in checkpoint.weights,
        "normed": ATTENTION + "q_norm.weight" in checkpoint.weights,
    }


def _config(checkpoint: Checkpoint, verifier: Verifier) -> LlamaConfig:
    """Of a head's layers, sizes by their tensors; positions go as far as the verifier's."""
    config = dict(checkpoint.config.get("transformer_layer_config") or checkpoint.config)
    queries, keys = (checkpoint.size(f"{ATTENTION}{name}_proj.weight") for name in ("q", "k"))
    heads = config.get("num_attention_heads")
    if not isinstance(heads, int):
        raise checkpoint.wrong("its config.json does not name num_attention_heads")
    head_dim = int(config.get("head_dim") or queries // heads)
    if queries != heads * head_dim or keys % head_dim or heads % max(1, keys // head_dim):
        raise checkpoint.wrong(f"{heads} heads of {head_dim} do not fit its queries of {queries} and keys of {keys}")
    return LlamaConfig(
        hidden_size=checkpoint.size("fc.weight"),
        intermediate_size=checkpoint.size("layers.0.mlp.gate_proj.weight"),
        num_attention_heads=heads,
        num_key_value_heads=keys // head_dim,
        head_dim=head_dim,
        hidden_act=config.get("hidden_act") or "silu",
        rms_norm_eps=config.get("rms_norm_eps") or 1e-6,
        max_position_embeddings=verifier.context_len,
        attention_bias=f"{ATTENTION}o_proj.bias" in checkpoint.weights,
        mlp_bias="layers.0.mlp.gate_proj.bias" in checkpoint.weights,
        **{name: config[name] for name in ROPE if config.get(name) is not None},
    )


def _check_hidden(checkpoint: Checkpoint, size: int, verifier: Verifier) -> None:
    if size != verifier.hidden_size:
        raise checkpoint.wrong(f"it was made for a hidden size of {size}, and the model's is {verifier.hidden_size}")


def _check_vocab(checkpoint: Checkpoint, verifier: Verifier) -> None:
    """By what is about all tokens of the verifier: the tensors, or else the configuration."""
    config = checkpoint.config.get("transformer_layer_config") or checkpoint.config
    sizes: list[Any] = [
        checkpoint.weights[name].shape[0] for name in ("embed_tokens.weight", "t2d") if name in checkpoint.weights
    ]
    for size in sizes or [config.get("vocab_size")]:
        if size not in (None, verifier.vocab_size):
            raise checkpoint.wrong(f"it was made for a vocabulary of {size} tokens, and the model has {verifier.vocab_size}")
