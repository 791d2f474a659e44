"""Models that ship in half the space: matrices in 8 bits with a scale for each row, unpacked to a cache folder on first use."""

import hashlib
import shutil
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from cascade.engine.draft_vocab import FILE
from cascade.engine.kept import cache_folder, kept

WEIGHTS = "model.safetensors"
SCALE = ".scale"
LARGEST = 127


def pack(folder: Path, out: Path) -> None:
    """Write the model in ``folder`` to ``out``, without its tokenizer. Each number is off by half a scale at most."""
    out.mkdir(parents=True, exist_ok=True)
    packed: dict[str, torch.Tensor] = {}
    for name, weight in load_file(folder / WEIGHTS).items():
        if weight.ndim != 2 or not weight.is_floating_point():
            packed[name] = weight
            continue
        scale = (weight.float().abs().amax(1, keepdim=True) / LARGEST).clamp_min(1e-12)
        packed[name] = (weight.float() / scale).round().to(torch.int8)
        packed[name + SCALE] = scale
    save_file(packed, out / WEIGHTS, metadata={"format": "pt"})
    for file in ("config.json", "generation_config.json", FILE, "README.md"):
        if (folder / file).exists():
            shutil.copy(folder / file, out)


def unpacked(packed: Path, beside: Sequence[Path] = ()) -> Path:
    """The folder of a packed model as Transformers reads it, in bfloat16, with copies of the files ``beside``.

    It is made once for each user and content, see `kept`, which raises `ModelError` if it cannot be written.
    """
    digest = hashlib.sha256()
    for file in (*sorted(packed.iterdir()), *beside):
        digest.update(file.name.encode() + hashlib.sha256(file.read_bytes()).digest())
    place = cache_folder() / "family" / f"{packed.name}-{digest.hexdigest()[:16]}"
    return kept(place, partial(_unpack, packed, beside))


def _unpack(packed: Path, beside: Sequence[Path], folder: Path) -> None:
    for file in (*(file for file in packed.iterdir() if file.name != WEIGHTS), *beside):
        shutil.copy(file, folder)
    save_file(widened(load_file(packed / WEIGHTS)), folder / WEIGHTS, metadata={"format": "pt"})


def widened(packed: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Matrices in bfloat16, from 8-bit numbers and their scales; other tensors are unchanged."""
    scales = {name.removesuffix(SCALE): tensor for name, tensor in packed.items() if name.endswith(SCALE)}
    return {
        name: (tensor.float() * scales[name]).to(torch.bfloat16) if name in scales else tensor
        for name, tensor in packed.items()
        if not name.endswith(SCALE)
    }
