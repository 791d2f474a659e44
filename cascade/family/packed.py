"""Draft models that ship in a third of the space, unpacked to a cache folder on first use.

Matrices have 8 bits with a scale for each row. Embeddings of tokens outside a draft vocabulary began as a linear map of the
full model's and have hardly changed. So they are left out, and computed from the full model's by the best-fitting map.
"""

import hashlib
import json
import shutil
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from cascade.engine.draft_vocab import FILE
from cascade.engine.kept import cache_folder, kept
from cascade.engine.weights import unread
from cascade.errors import ModelError

WEIGHTS = "model.safetensors"
EMBEDDING = "model.embed_tokens.weight"  # [tokens, width]; packed, only rows of the draft vocabulary
MAP = "embedding_map"  # [full model's width, width], for all other rows; only with a draft vocabulary
SCALE = ".scale"
LARGEST = 127
TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")  # files of the full model, copied to each tier


def pack(folder: Path, full: Path, out: Path) -> None:
    """Write the draft model in ``folder``, whose full model is in ``full``, to ``out``, without its tokenizer.

    The error of each number is at most half a scale, except for embeddings outside the draft vocabulary.
    """
    out.mkdir(parents=True, exist_ok=True)
    weights = load_file(folder / WEIGHTS)
    if (folder / FILE).exists():
        rows, ids = weights[EMBEDDING], _draft_ids(folder)
        others = torch.ones(len(rows), dtype=torch.bool).index_fill(0, ids, False)
        fitted = torch.linalg.lstsq(_embedding(full)[others], rows[others].float()).solution
        weights |= {EMBEDDING: rows[ids], MAP: fitted.bfloat16()}
    packed: dict[str, Tensor] = {}
    for name, weight in weights.items():
        if weight.ndim != 2 or name == MAP:
            packed[name] = weight.contiguous()
            continue
        scale = (weight.float().abs().amax(1, keepdim=True) / LARGEST).clamp_min(1e-12)
        packed[name] = (weight.float() / scale).round().to(torch.int8)
        packed[name + SCALE] = scale
    save_file(packed, out / WEIGHTS, metadata={"format": "pt"})
    for file in ("config.json", "generation_config.json", FILE, "README.md"):
        if (folder / file).exists():
            shutil.copy(folder / file, out)


def unpacked(packed: Path, full: Path) -> Path:
    """The folder of a packed model in Transformers' format, in bfloat16, with the tokenizer of the full model in ``full``.

    It is made once for each user and content, see `kept`. Raises `ModelError` if it cannot be written, or drafts for another
    model.
    """
    tokenizer = [file for file in map(full.joinpath, TOKENIZER) if file.exists()]
    digest = hashlib.sha256()
    for file in (*sorted(packed.iterdir()), *tokenizer):
        digest.update(file.name.encode() + hashlib.sha256(file.read_bytes()).digest())
    place = cache_folder() / "family" / f"{packed.name}-{digest.hexdigest()[:16]}"

    def unpack(folder: Path) -> None:
        for file in (*(file for file in packed.iterdir() if file.name != WEIGHTS), *tokenizer):
            shutil.copy(file, folder)
        weights = widened(load_file(packed / WEIGHTS))
        if MAP in weights:
            wide, to_narrow = _embedding(full), weights.pop(MAP)
            if wide.shape[1] != len(to_narrow):
                raise ModelError(
                    f"{str(full)!r} has embeddings of {wide.shape[1]} numbers, and the drafters that ship are for a model of "
                    f"{len(to_narrow)}: give a model with --draft or in a configuration"
                )
            rows = (wide @ to_narrow.float()).to(torch.bfloat16)
            rows[_draft_ids(packed)] = weights[EMBEDDING]
            weights[EMBEDDING] = rows
        save_file(weights, folder / WEIGHTS, metadata={"format": "pt"})

    return kept(place, unpack)


def widened(packed: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Matrices in bfloat16, from 8-bit numbers and their scales; other tensors are unchanged."""
    scales = {name.removesuffix(SCALE): tensor for name, tensor in packed.items() if name.endswith(SCALE)}
    return {
        name: (tensor.float() * scales[name]).to(torch.bfloat16) if name in scales else tensor
        for name, tensor in packed.items()
        if not name.endswith(SCALE)
    }


def _embedding(folder: Path) -> Tensor:
    with unread(str(folder)) as weights:
        return weights[EMBEDDING][:].float()


def _draft_ids(folder: Path) -> Tensor:
    return torch.tensor(json.loads((folder / FILE).read_text(encoding="utf-8")))
