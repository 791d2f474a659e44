"""Files of a checkpoint and the weights in them: lazy slices, or shapes from the headers."""

import json
import math
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import get_safetensors_metadata, snapshot_download
from huggingface_hub.errors import NotASafetensorsRepoError
from safetensors import safe_open
from torch import Tensor

from cascade.engine.generation import CONFIG
from cascade.engine.tokenizer import check_source
from cascade.errors import ModelError, model_errors, reason

HEAD = "lm_head.weight"  # the output embedding; absent from a checkpoint if it is the input embedding
SINGLE, INDEX, TORCH = "model.safetensors", "model.safetensors.index.json", "pytorch_model.bin"
MAPS = ("d2t", "t2d")  # tensors of heads that are not weights


@contextmanager
def unread(source: str, revision: str | None = None) -> Iterator[dict[str, Any]]:
    """All tensors at a path or hub id by name, lazy slices if in safetensors files; raises `ModelError`."""
    weights: dict[str, Any] = {}
    with ExitStack() as opened:
        with model_errors(f"No weights can be loaded from {source!r}"):
            folder = _fetched(source, revision)
            for file in shards(folder):
                parts = opened.enter_context(_opened(file))
                weights |= {name: parts.get_slice(name) for name in parts.keys()}  # noqa: SIM118  # no mapping
            if not weights and (folder / TORCH).is_file():
                weights = torch.load(folder / TORCH, map_location="cpu", weights_only=True, mmap=True)
            if not weights:
                raise ModelError(f"No weights can be loaded from {str(folder)!r}: it has none of the files {SINGLE}, {TORCH}")
        yield weights


def shape_of(part: Any) -> list[int]:
    """The shape of a tensor or of a lazy slice."""
    return [*part.shape] if isinstance(part, Tensor) else [*part.get_shape()]


def shapes(source: str) -> dict[str, list[int]]:
    """Shapes of all tensors of a path or hub id by name; raises `ModelError`."""
    with unread(source) as weights:
        return {name: shape_of(part) for name, part in weights.items()}


def check_replaces(source: str, here: Mapping[str, list[int]], there: Mapping[str, list[int]], spare: Collection[str]) -> None:
    """Raise `ModelError` unless weights of ``source``, with the shapes ``there``, can replace those with the shapes ``here``.

    Weights with names in ``spare`` may be absent.
    """
    if wrong := next((name for name in sorted({*here, *there} - {*spare}) if here.get(name) != there.get(name)), None):
        raise ModelError(f"The weights of {source!r} cannot replace others: {wrong} differs")


def num_weights(source: str, counted: Callable[[str], bool] = lambda name: True) -> int | None:
    """Number of weights at a path or hub id, from the headers of files; None if a hub cannot tell. Raises `ModelError`.

    Only tensors whose names are ``counted`` count.
    """
    check_source(source)
    if Path(source).is_dir():
        sizes = {name: math.prod(shape) for name, shape in shapes(source).items()}
    else:
        with model_errors(f"No weights can be loaded from {source!r}"):
            try:
                files = get_safetensors_metadata(source).files_metadata.values()
            except NotASafetensorsRepoError:
                return None
        sizes = {name: tensor.parameter_count for file in files for name, tensor in file.tensors.items()}
    return sum(size for name, size in sizes.items() if name not in MAPS and counted(name))


def check_files(folder: Path) -> None:
    """Check by their headers that the safetensors files of a checkpoint exist and are complete; raises `ModelError`."""
    for file in shards(folder):
        _opened(file)


def _opened(file: Path) -> Any:
    """Open a safetensors file, after checking by its header that it is complete; raises `ModelError`."""
    if not file.is_file():
        raise ModelError(f"The checkpoint {str(file.parent)!r} lacks its file {file.name}: download it again")
    try:
        return safe_open(file, framework="pt")
    except Exception as error:  # safetensors may raise anything
        raise ModelError(
            f"The file {file.name} of the checkpoint {str(file.parent)!r} is damaged ({reason(error)}): download it again"
        ) from error


def shards(folder: Path) -> Iterator[Path]:
    """The safetensors files of a checkpoint, by its index if it has one; raises `ModelError` if that is damaged."""
    if (folder / INDEX).is_file():
        try:
            names = set(json.loads((folder / INDEX).read_text(encoding="utf-8"))["weight_map"].values())
        except (ValueError, KeyError, TypeError, AttributeError):
            raise ModelError(f"The index {INDEX} of the checkpoint {str(folder)!r} is damaged: download it again") from None
        yield from (folder / name for name in sorted(names))
    elif (folder / SINGLE).is_file():
        yield folder / SINGLE


def _fetched(source: str, revision: str | None) -> Path:
    """The folder at a path, or with the downloaded files of a hub id; raises `ModelError`."""
    check_source(source)
    if Path(source).is_dir():
        return Path(source)
    folder = Path(snapshot_download(source, revision=revision, allow_patterns=[CONFIG, INDEX, SINGLE]))
    others = [file.name for file in shards(folder) if file.name != SINGLE]
    if others or not (folder / SINGLE).is_file():  # the hub may also have the same weights in other formats
        snapshot_download(source, revision=revision, allow_patterns=others or [TORCH])
    return folder
