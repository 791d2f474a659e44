"""Models that ship in half the space: matrices in 8 bits with a scale for each row, unpacked to a cache folder on first use."""

import hashlib
import os
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from cascade.engine.draft_vocab import FILE
from cascade.engine.gguf import cache_folder

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

    It is made once for each user and content below `cascade.engine.gguf.cache_folder`, whole or not at all.
    """
    digest = hashlib.sha256()
    for file in (*sorted(packed.iterdir()), *beside):
        digest.update(file.name.encode() + hashlib.sha256(file.read_bytes()).digest())
    place = cache_folder() / "family" / f"{packed.name}-{digest.hexdigest()[:16]}"
    if place.is_dir():
        return place
    place.parent.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(prefix=f"{place.name}-", dir=place.parent))
    try:
        for file in (*(file for file in packed.iterdir() if file.name != WEIGHTS), *beside):
            shutil.copy(file, partial)
        save_file(widened(load_file(packed / WEIGHTS)), partial / WEIGHTS, metadata={"format": "pt"})
        os.rename(partial, place)
    except OSError:
        if not place.is_dir():  # else another process was faster
            raise
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return place


def widened(packed: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Matrices in bfloat16, from 8-bit numbers and their scales; other tensors are unchanged."""
    scales = {name.removesuffix(SCALE): tensor for name, tensor in packed.items() if name.endswith(SCALE)}
    return {
        name: (tensor.float() * scales[name]).to(torch.bfloat16) if name in scales else tensor
        for name, tensor in packed.items()
        if not name.endswith(SCALE)
    }
