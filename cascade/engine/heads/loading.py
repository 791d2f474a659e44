"""From a path or hub id to a head for a loaded model."""

import torch
from transformers import PreTrainedModel

from cascade.drafters.registry import AUTO, HEADS, load
from cascade.engine.heads.checkpoint import Checkpoint, read
from cascade.engine.heads.head import Head, Verifier
from cascade.engine.heads.mtp import Mtp, holds_mtp, load_mtp
from cascade.engine.network.llama import between
from cascade.errors import ModelError, reason

PUBLISHED = tuple(kind for kind in HEADS if kind != Mtp.kind)  # in files of their own, a module for each head


def load_head(source: str, network: PreTrainedModel, *, kind: str = AUTO, revision: str | None = None) -> Head:
    """The head of a path or hub id, in the dtype and on the device of ``network``; raises `ModelError` if it does not fit.

    Of the kind "mtp" the ``source`` "" is the checkpoint of ``network``.
    """
    if kind not in (AUTO, *HEADS):
        raise ModelError(f"drafter_kind is {kind!r}: it must be one of {', '.join((AUTO, *HEADS))}")
    if kind == Mtp.kind:
        return load_mtp(source, network, revision=revision)
    if not source:
        raise ModelError(
            f"drafter is '': give a path or hub id, or drafter_kind {Mtp.kind!r} for layers of the model's checkpoint"
        )
    checkpoint = read(source, revision=revision)
    if kind == AUTO and holds_mtp(checkpoint.weights):
        return load_mtp(source, network, revision=revision)
    head = published(checkpoint, network, kind)
    head.match_model(between(network))
    return head


def published(checkpoint: Checkpoint, network: PreTrainedModel, kind: str = AUTO) -> Head:
    """The head of a checkpoint as PyTorch runs it, in the dtype and on the device of ``network``; raises `ModelError`."""
    for name in PUBLISHED:
        found: type[Head] = load(name)
        if found.fits(named := checkpoint.named(found.names)):
            break
    else:
        raise checkpoint.wrong(f"its tensors are of none of the kinds {', '.join(PUBLISHED[:-1])} and {PUBLISHED[-1]}")
    checkpoint = named
    if kind not in (AUTO, found.kind):
        raise checkpoint.wrong(f"drafter_kind is {kind!r}, and its tensors are those of the kind {found.kind!r}")
    try:
        with torch.device("meta"):
            head = found.of(checkpoint, Verifier.of(network))
    except ModelError:
        raise
    except Exception as error:  # of Transformers
        raise checkpoint.wrong(f"its config.json is wrong ({reason(error)})") from error
    checkpoint.fill(head)
    return head.to(device=network.device, dtype=network.dtype).eval()
