"""The files of heads as they are published. What a file holds is told from its tensors: configurations are often wrong."""

import json
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import get_safetensors_metadata, snapshot_download
from huggingface_hub.errors import NotASafetensorsRepoError
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor, nn

from cascade.engine.checkpoint import SINGLE, check_files, shards
from cascade.engine.tokenizer import check_source, is_local
from cascade.errors import ModelError, reason

TORCH, SUFFIX = "pytorch_model.bin", ".safetensors"
PATTERNS = ["config.json", "*.safetensors", "*.safetensors.index.json", TORCH]
MAPS = ("d2t", "t2d")  # tensors that are no weights
SHARED = ("embed_tokens.weight", "lm_head.weight")  # some files hold copies of the verifier's


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """The files of a drafter, read."""

    source: str
    config: Mapping[str, Any]
    weights: Mapping[str, Tensor]

    def error(self, problem: str) -> ModelError:
        return ModelError(f"The drafter {self.source!r} cannot be used: {problem}")

    def size(self, name: str, axis: int = 0) -> int:
        """Size of a tensor along an axis; raises `ModelError` if it has none."""
        if name not in self.weights:
            raise self.error(f"it lacks the tensor {name}")
        if axis >= self.weights[name].dim():
            raise self.error(f"its tensor {name} has {self.weights[name].dim()} dimensions")
        return self.weights[name].shape[axis]

    def fill(self, module: nn.Module) -> None:
        """Load the weights into a module on the meta device; raises `ModelError` if their names or shapes differ."""
        wanted = module.state_dict()
        given = {name: self.weights[name] for name in self.weights if name in wanted or name not in (*MAPS, *SHARED)}
        if missing := sorted(wanted.keys() - given.keys()):
            raise self.error(f"it lacks the tensor {missing[0]}")
        if unknown := sorted(given.keys() - wanted.keys()):
            raise self.error(f"it has the tensor {unknown[0]}, which a drafter of this kind does not have")
        for name, tensor in given.items():
            if tensor.shape != wanted[name].shape:
                raise self.error(f"its tensor {name} is {list(tensor.shape)}, and has to be {list(wanted[name].shape)}")
        module.load_state_dict(given, assign=True)
        module.requires_grad_(False)


@contextmanager
def model_errors(problem: str) -> Iterator[None]:
    """Turn errors of any library into a `ModelError` that begins with ``problem``; a `ModelError` stays as it is."""
    try:
        yield
    except ModelError:
        raise
    except Exception as error:
        raise ModelError(f"{problem}: {reason(error)}") from error


def read(source: str) -> Checkpoint:
    """The files of a path or hub id; raises `ModelError`."""
    with model_errors(problem := f"No drafter can be loaded from {source!r}"):
        folder = _fetched(source)
        weights: dict[str, Tensor] = {}
        config = json.loads(file.read_text(encoding="utf-8")) if (file := folder / "config.json").is_file() else {}
        for file in _files(folder):
            weights |= load_file(file) if file.suffix == SUFFIX else torch.load(file, map_location="cpu", weights_only=True)
    if not weights or not all(isinstance(tensor, Tensor) for tensor in weights.values()) or not isinstance(config, dict):
        raise ModelError(f"{problem}: it holds no weights")
    return Checkpoint(source, config, weights)


def shapes(source: str) -> dict[str, tuple[int, ...]]:
    """Shapes of all tensors of a path or hub id by name, from the headers of its files; raises `ModelError`."""
    with model_errors(f"The weights of {source!r} cannot be read"):
        found = {name: shape for file in _files(_fetched(source)) for name, shape in _shapes_in(file).items()}
    return found


def num_weights(source: str) -> int | None:
    """Numbers in the files of a path or hub id, told from their headers; None where a hub cannot tell. Raises `ModelError`."""
    check_source(source)
    if is_local(source):
        return sum(math.prod(shape) for name, shape in shapes(source).items() if name not in MAPS)
    with model_errors(f"No drafter can be loaded from {source!r}"), suppress(NotASafetensorsRepoError):
        return sum(get_safetensors_metadata(source).parameter_count.values())
    return None


def _shapes_in(file: Path) -> dict[str, tuple[int, ...]]:
    """Shapes of all tensors of a file by name; of a safetensors file from its header."""
    if file.suffix != SUFFIX:
        loaded: dict[str, Tensor] = torch.load(file, map_location="meta", weights_only=True)
        return {name: tuple(tensor.shape) for name, tensor in loaded.items()}
    with safe_open(file, framework="pt") as opened:
        return {name: tuple(opened.get_slice(name).get_shape()) for name in opened.keys()}  # noqa: SIM118  # no mapping


def _fetched(source: str) -> Path:
    """The folder of a path, or of a hub id's files, which are fetched; raises `ModelError` if one is damaged."""
    check_source(source)
    local = Path(source if is_local(source) else snapshot_download(source, allow_patterns=PATTERNS))
    check_files(local)
    return local


def _files(folder: Path) -> list[Path]:
    """Those that hold the weights; raises `ModelError` if there are none."""
    if found := [*shards(folder)] or [file for file in [folder / TORCH] if file.is_file()]:
        return found
    raise ModelError(f"No drafter can be loaded from {str(folder)!r}: it has none of the files {SINGLE}, {TORCH}")
