"""The weights in the files of a checkpoint: whole, or their shapes from the headers."""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import get_safetensors_metadata, snapshot_download
from huggingface_hub.errors import NotASafetensorsRepoError
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor

from cascade.engine.checkpoint import INDEX, SINGLE, check_files, shards
from cascade.engine.generation import CONFIG
from cascade.engine.tokenizer import check_source, is_local
from cascade.errors import ModelError, reason

TORCH, SUFFIX = "pytorch_model.bin", ".safetensors"
MAPS = ("d2t", "t2d")  # tensors of heads that are no weights


@contextmanager
def model_errors(problem: str) -> Iterator[None]:
    """Turn errors of any library into a `ModelError` that begins with ``problem``; a `ModelError` stays as it is."""
    try:
        yield
    except ModelError:
        raise
    except Exception as error:
        raise ModelError(f"{problem}: {reason(error)}") from error


def read(source: str) -> dict[str, Tensor]:
    """All tensors of a path or hub id by name; raises `ModelError`."""
    with model_errors(problem := f"No weights can be loaded from {source!r}"):
        weights: dict[str, Tensor] = {}
        for file in _files(fetched(source)):
            weights |= load_file(file) if file.suffix == SUFFIX else torch.load(file, map_location="cpu", weights_only=True)
    if not weights or not all(isinstance(tensor, Tensor) for tensor in weights.values()):
        raise ModelError(f"{problem}: it holds none")
    return weights


@contextmanager
def unread(source: str, revision: str | None = None) -> Iterator[dict[str, Any]]:
    """All tensors of a path or hub id by name, of safetensors files as slices that are not read yet; raises `ModelError`."""
    weights: dict[str, Any] = {}
    with ExitStack() as opened:
        with model_errors(f"No weights can be loaded from {source!r}"):
            for file in _files(fetched(source, revision)):
                if file.suffix == SUFFIX:
                    parts = opened.enter_context(safe_open(file, framework="pt"))
                    weights |= {name: parts.get_slice(name) for name in parts.keys()}  # noqa: SIM118  # no mapping
                else:
                    weights |= torch.load(file, map_location="cpu", weights_only=True, mmap=True)
        yield weights


def shapes(source: str) -> dict[str, tuple[int, ...]]:
    """Shapes of all tensors of a path or hub id by name, from the headers of its files; raises `ModelError`."""
    with model_errors(f"The weights of {source!r} cannot be read"):
        found = {name: shape for file in _files(fetched(source)) for name, shape in _shapes_in(file).items()}
    return found


def num_weights(source: str, counted: Callable[[str], bool] = lambda name: True) -> int | None:
    """Numbers in the files of a path or hub id, told from their headers; None where a hub cannot tell. Raises `ModelError`.

    Of tensors whose names are ``counted``.
    """
    check_source(source)
    if is_local(source):
        sizes = {name: math.prod(shape) for name, shape in shapes(source).items()}
    else:
        with model_errors(f"No weights can be loaded from {source!r}"):
            try:
                files = get_safetensors_metadata(source).files_metadata.values()
            except NotASafetensorsRepoError:
                return None
        sizes = {name: tensor.parameter_count for file in files for name, tensor in file.tensors.items()}
    return sum(size for name, size in sizes.items() if name not in MAPS and counted(name))


def _shapes_in(file: Path) -> dict[str, tuple[int, ...]]:
    """Shapes of all tensors of a file by name; of a safetensors file from its header."""
    if file.suffix != SUFFIX:
        loaded: dict[str, Tensor] = torch.load(file, map_location="meta", weights_only=True)
        return {name: tuple(tensor.shape) for name, tensor in loaded.items()}
    with safe_open(file, framework="pt") as opened:
        return {name: tuple(opened.get_slice(name).get_shape()) for name in opened.keys()}  # noqa: SIM118  # no mapping


def fetched(source: str, revision: str | None = None) -> Path:
    """The folder of a path, or of a hub id's files, which are fetched; raises `ModelError` if one is damaged."""
    check_source(source)
    folder = Path(source) if is_local(source) else _downloaded(source, revision, [CONFIG, INDEX, SINGLE])
    if not is_local(source):
        others = [file.name for file in shards(folder) if file.name != SINGLE]
        if others or not (folder / SINGLE).is_file():  # weights may lie in the hub in other forms, too, as large as these
            folder = _downloaded(source, revision, others or [TORCH])
    check_files(folder)
    return folder


def _downloaded(source: str, revision: str | None, names: Sequence[str]) -> Path:
    """The folder in the hub's cache after those of these files that are there have been downloaded."""
    return Path(snapshot_download(source, revision=revision, allow_patterns=[*names]))


def _files(folder: Path) -> list[Path]:
    """Those that hold the weights; raises `ModelError` if there are none."""
    if found := [*shards(folder)] or [file for file in [folder / TORCH] if file.is_file()]:
        return found
    raise ModelError(f"No weights can be loaded from {str(folder)!r}: it has none of the files {SINGLE}, {TORCH}")
