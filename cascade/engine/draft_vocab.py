"""Draft models that predict only some tokens, since the output embedding of all is most of a small model's pass.

The ids are in `FILE` beside the weights, and their number is in the config as ``draft_vocab_size``. Other programs ignore them
and run the whole model. Zhao et al., FR-Spec, arXiv 2502.14856.
"""

import json
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import hf_hub_download
from torch import Tensor

from cascade.errors import ModelError, model_errors

FILE = "draft_vocab.json"


def spread(logits: Tensor, ids: Tensor, vocab_size: int) -> Tensor:
    """Logits ``[n, vocab_size]`` from logits of ``ids``; tokens that are not predicted get the least number of the dtype."""
    out = logits.new_full((len(logits), vocab_size), torch.finfo(logits.dtype).min)
    out[:, ids] = logits
    return out


def tokens(config: Any, source: str, *, revision: str | None = None) -> Tensor | None:
    """The draft vocabulary ``[n]`` int64 of a model; None if the model predicts all tokens.

    Raises `ModelError` if the ids are missing or wrong.
    """
    size, vocab_size = getattr(config, "draft_vocab_size", None), config.get_text_config().vocab_size
    if size is None:
        return None
    ids = _read(source, revision)
    if len(ids) != size or len({*ids}) != size or not all(0 <= token < vocab_size for token in ids):
        raise ModelError(f"{FILE} of {source!r} must hold {size} different token ids below {vocab_size}: export it anew")
    return torch.tensor(ids)


def write(ids: Tensor, folder: Path) -> None:
    """Write the file beside a model's weights."""
    (folder / FILE).write_text(json.dumps(ids.tolist(), separators=(",", ":")), encoding="utf-8")


def check_same(source: str, ids: Tensor | None) -> None:
    """Raise `ModelError` unless the weights of ``source`` are for the draft vocabulary ``ids``; None means all tokens."""
    if ids is not None and _read(source) != ids.tolist():
        raise ModelError(f"The weights of {source!r} cannot replace others: they predict other tokens")


def _read(source: str, revision: str | None = None) -> list[int]:
    """The token ids in `FILE`; raises `ModelError` if it is missing or is not a list of ids."""
    with model_errors(f"{source!r} has a draft vocabulary by its config, but no readable file {FILE}"):
        path = Path(source, FILE) if Path(source).is_dir() else Path(hf_hub_download(source, FILE, revision=revision))
        ids = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(ids, list) or not all(type(token) is int for token in ids):
        raise ModelError(f"{FILE} of {source!r} must be a list of token ids: export it anew")
    return ids
