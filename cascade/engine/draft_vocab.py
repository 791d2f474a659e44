"""A draft model that predicts only a part of its tokens: the product for all others is most of a small model's pass.

The ids stand in `FILE` beside the weights, and their number in the config as ``draft_vocab_size``. What does not know of them
runs the whole model. Zhao et al., FR-Spec, arXiv 2502.14856.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from huggingface_hub import hf_hub_download
from torch import Tensor, nn

from cascade.engine.network.plain import Linear
from cascade.errors import ModelError

if TYPE_CHECKING:  # the code of models takes seconds to import, and who reads configurations does without
    from transformers import PreTrainedConfig, PreTrainedModel

FILE = "draft_vocab.json"


class DraftHead(nn.Module):
    """The rows ``ids`` of an output embedding."""

    ids: Tensor

    def __init__(self, whole: Tensor, ids: Tensor) -> None:
        """``whole`` ``[vocab_size, width]``."""
        super().__init__()
        self.vocab_size = len(whole)
        weight = whole.detach()[ids]
        self.linear = Linear(weight.shape[1], len(ids), bias=False, device="meta")
        self.linear.weight = nn.Parameter(weight, requires_grad=False)
        self.register_buffer("ids", ids, persistent=False)

    def forward(self, states: Tensor) -> Tensor:
        """Logits ``[..., vocab_size]``: those of tokens that are not predicted are the least number of their dtype."""
        logits: Tensor = self.linear(states)
        out = logits.new_full((*logits.shape[:-1], self.vocab_size), torch.finfo(logits.dtype).min)
        out[..., self.ids] = logits
        return out


def restrict(network: PreTrainedModel, source: str, *, revision: str | None = None) -> None:
    """Let ``network``, loaded from ``source``, predict only its draft vocabulary, if it has one.

    Raises `ModelError` if the ids are not there or do not fit.
    """
    ids = tokens(network.config, source, revision=revision)
    if ids is not None:
        whole: Tensor = network.get_output_embeddings().weight
        network.set_output_embeddings(DraftHead(whole, ids.to(whole.device)))


def tokens(config: PreTrainedConfig, source: str, *, revision: str | None = None) -> Tensor | None:
    """The draft vocabulary ``[n]`` int64 of a model, None if it predicts all tokens; raises as `restrict` does."""
    size, vocab_size = getattr(config, "draft_vocab_size", None), config.get_text_config().vocab_size
    if size is None:
        return None
    ids = draft_ids(source, revision)
    if len(ids) != size or len({*ids}) != size or not all(0 <= token < vocab_size for token in ids):
        raise ModelError(f"{FILE} of {source!r} must hold {size} different token ids below {vocab_size}: export it anew")
    return torch.tensor(ids)


def write(ids: Tensor, folder: Path) -> None:
    """The file beside a model's weights."""
    (folder / FILE).write_text(json.dumps(ids.tolist(), separators=(",", ":")), encoding="utf-8")


def draft_ids(source: str, revision: str | None = None) -> list[int]:
    """The token ids in `FILE`; raises `ModelError` if it is not there or is no list of them."""
    try:
        path = Path(source, FILE) if Path(source).is_dir() else Path(hf_hub_download(source, FILE, revision=revision))
        ids = json.loads(path.read_text(encoding="utf-8"))
    except Exception as error:  # network, hub, disk, or what lies there
        raise ModelError(f"{source!r} has a draft vocabulary by its config, but no readable file {FILE}: {error}") from error
    if not isinstance(ids, list) or not all(type(token) is int for token in ids):
        raise ModelError(f"{FILE} of {source!r} must be a list of token ids: export it anew")
    return ids
