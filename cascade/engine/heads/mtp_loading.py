"""From MTP layers of a checkpoint to a head for its model.

The layer is made by the class of the model's own layers, as the last of them with the same tensors, so that it is dense or a
mixture as these say. Copies of the model's embeddings are not held twice.
"""

import logging
import math
import re
from collections.abc import Iterator, Mapping, Set
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from cascade.engine.checkpoint import reason
from cascade.engine.heads.eagle import Shared
from cascade.engine.heads.formats import Checkpoint
from cascade.engine.heads.mtp import Mtp
from cascade.engine.heads.mtp_formats import read_mtp
from cascade.engine.heads.reader import decoder
from cascade.engine.llama import between
from cascade.engine.survey import SURVEY, Survey
from cascade.engine.tokenizer import is_local
from cascade.errors import ModelError

log = logging.getLogger(__name__)

FULL = "full_attention"
BLOCK = "block."
COPIES = ("embed_tokens.weight", "lm_head.weight")  # of the verifier's, in the order of `Shared`
EXPERT = re.compile(r"(.*\.experts)\.(\d+)\.(gate|up|down)_proj\.weight$")


def load_mtp(source: str, network: PreTrainedModel, *, revision: str | None = None) -> Mtp:
    """The first MTP layer of a folder, file or hub id, or of the checkpoint of ``network`` if ``source`` is "".

    In the dtype and on the device of ``network``; raises `ModelError` if there is none or if it does not fit.
    """
    text, own = network.config.get_text_config(), network.name_or_path
    if not source and not own:
        raise ModelError("The drafter 'mtp' cannot be used: its model was not loaded from a checkpoint, so give it a source")
    if not source and not is_local(own):
        revision = getattr(network.config, "_commit_hash", None)
    checkpoint, naming = read_mtp(source or own, int(text.num_hidden_layers), revision=revision)
    if not all(hasattr(decoder(network)[0], name) for name in ("norm", "rotary_emb")):
        raise checkpoint.wrong(f"{type(network).__name__} has no rotary positions or final norm, and such a layer needs both")
    checkpoint = _without_copies(checkpoint, network)
    try:
        with torch.device("meta"):
            block, checkpoint = _block(checkpoint, network)
            head = _head(checkpoint, network, block, hidden_first=naming.hidden_first)
        checkpoint.fill(head)
        _settle(head, network)
        found = _survey(head, network)
    except ModelError:
        raise
    except Exception as error:  # of Transformers
        raise checkpoint.wrong(f"{type(network).__name__} has no layers that can be used so ({reason(error)})") from error
    if (told := getattr(text, "num_nextn_predict_layers", None) or 1) > 1:
        log.info("Of the %d MTP layers of %s the first one makes all guesses", told, checkpoint.source)
    if len(found.heads) != 1:
        raise checkpoint.wrong("its layer does not use the attention interface of Transformers")
    head.hasten(between(network))
    return head


def _head(checkpoint: Checkpoint, network: PreTrainedModel, block: nn.Module, *, hidden_first: bool) -> Mtp:
    owner, text, embed = decoder(network)[0], network.config.get_text_config(), network.get_input_embeddings()
    norm, rotary = getattr(owner, "norm", None), getattr(owner, "rotary_emb", None)
    if norm is None or rotary is None:
        raise checkpoint.wrong(
            f"{type(network).__name__} has no final norm or no rotary positions, and its MTP layer needs both"
        )
    kind: Any = type(norm)
    return Mtp(
        block,
        partial(kind, text.hidden_size, eps=text.rms_norm_eps),
        Shared(embed, network.get_output_embeddings()),
        rotary,
        num_layers=int(text.num_hidden_layers),
        hidden_size=int(text.hidden_size),
        vocab_size=int(embed.weight.shape[0]),
        hidden_first=hidden_first,
        own_embed=COPIES[0] in checkpoint.weights,
        own_head=COPIES[1] in checkpoint.weights,
    )


def _without_copies(checkpoint: Checkpoint, network: PreTrainedModel) -> Checkpoint:
    """The same without embeddings that are the verifier's; raises `ModelError` if they are of another vocabulary."""
    weights = dict(checkpoint.weights)
    for name, module in zip(COPIES, (network.get_input_embeddings(), network.get_output_embeddings()), strict=True):
        if name not in weights:
            continue
        theirs = module.weight.data
        if len(weights[name]) != len(theirs):
            raise checkpoint.wrong(
                f"it was made for a vocabulary of {len(weights[name])} tokens, and the model has {len(theirs)}"
            )
        if torch.equal(weights[name].to(theirs.device, theirs.dtype), theirs):
            del weights[name]
    return replace(checkpoint, weights=weights)


def _block(checkpoint: Checkpoint, network: PreTrainedModel) -> tuple[nn.Module, Checkpoint]:
    """A layer like the last one of the model's that sees the whole text and has the same tensors, and these as it has them."""
    owner, layers = decoder(network)
    types = getattr(owner.config, "layer_types", None) or [FULL] * len(layers)
    given = {name: tensor for name, tensor in checkpoint.weights.items() if name.startswith(BLOCK)}
    rest = {name: tensor for name, tensor in checkpoint.weights.items() if name not in given}
    odd: list[str] = []  # tensors in which it differs from the layer that is most like it
    for number in (number for number in reversed(range(len(layers))) if types[number] == FULL):
        block = type(layers[number])(owner.config, number)
        wanted = {BLOCK + name for name in block.state_dict()}
        fitted = _fused(given, wanted)
        if fitted.keys() == wanted:
            return block, replace(checkpoint, weights=rest | fitted)
        odd = min([sorted(fitted.keys() ^ wanted), odd], key=lambda names: len(names) or math.inf)
    if not odd:
        raise checkpoint.wrong("the model has no layer with full attention")
    verb = "has" if odd[0] in given else "lacks"
    raise checkpoint.wrong(f"its layer {verb} the tensor {odd[0]}, unlike those of {type(network).__name__}")


def _fused(weights: Mapping[str, Tensor], wanted: Set[str]) -> dict[str, Tensor]:
    """With the experts of a layer in one tensor, where that is wanted: ``gate_up_proj`` and ``down_proj``."""
    fused = {name: tensor for name, tensor in weights.items() if not EXPERT.match(name)}
    experts = {match[1] for name in weights if (match := EXPERT.match(name))}
    for base in sorted(experts):
        if f"{base}.gate_up_proj" not in wanted:
            fused |= {name: weights[name] for name in weights if name.startswith(f"{base}.")}
            continue
        count = len({match[2] for name in weights if (match := EXPERT.match(name)) and match[1] == base})
        gate, up, down = (
            torch.stack([weights[f"{base}.{number}.{part}_proj.weight"] for number in range(count)])
            for part in ("gate", "up", "down")
        )
        fused |= {f"{base}.gate_up_proj": torch.cat([gate, up], dim=1), f"{base}.down_proj": down}
    return fused


def _settle(head: Mtp, network: PreTrainedModel) -> None:
    """Move it to the device and dtype of the network, which keeps some parts in 32 bits."""
    exact = tuple(getattr(network, "_keep_in_fp32_modules_strict", None) or ())
    for name, tensor in (*head.named_parameters(), *head.named_buffers()):
        dtype = torch.float32 if any(part in name for part in exact) else network.dtype
        tensor.data = tensor.data.to(network.device, dtype if tensor.is_floating_point() else tensor.dtype)
    head.eval()


@torch.inference_mode()
def _survey(head: Mtp, network: PreTrainedModel) -> Survey:
    """What it attends with."""
    found = Survey()
    with _attention(network, SURVEY):
        head.survey(found)
    return found


@contextmanager
def _attention(network: PreTrainedModel, name: str) -> Iterator[None]:
    """Another attention function for a moment."""
    before = network.config._attn_implementation
    network.set_attn_implementation(name)
    try:
        yield
    finally:
        network.set_attn_implementation(before)
