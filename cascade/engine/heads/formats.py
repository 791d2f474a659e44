"""Heads from published checkpoints: what a file holds is told from its tensors, for configurations are often wrong.

- Medusa: ``medusa_lm_head.pt`` or ``.safetensors`` with ``{h}.{l}.linear.*`` and ``{h}.{num_layers}.weight``, or, as vLLM has
  it, ``blocks.{h}.layers.{l}.*``, ``lm_heads.{h}.weight`` and ``token_map``.
- EAGLE-1, 2: ``fc`` over embedding and hidden state, ``layers.{l}.*`` of which the first has no norm before attention.
- EAGLE-3: ``fc`` over several hidden states, ``midlayer.*`` or ``layers.{l}.*``, ``norm``, ``lm_head``, ``d2t``; the
  ``speculators`` library puts the layer's sizes into ``transformer_layer_config``. P-EAGLE: the same, ``mask_hidden``.
- DFlash: ``fc`` over several hidden states, ``hidden_norm``, ``layers.{l}.*`` as of Qwen 3, ``norm``; maybe a file with what
  masks are embedded as. DSpark: the same, ``markov_head`` and ``confidence_head``. See `cascade.engine.heads.block_formats`.

Which hidden states an EAGLE-3 head reads: ids of ``eagle_config`` are of layers whose outputs are meant; those at the top
level, of ``speculators``, count as Transformers does. Without any they are the inputs of layers 2, n // 2 and n - 3.
"""

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import get_safetensors_metadata, snapshot_download
from huggingface_hub.errors import NotASafetensorsRepoError
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor

from cascade.engine.checkpoint import INDEX, SINGLE, check_files, reason
from cascade.engine.tokenizer import check_source, is_local
from cascade.errors import ModelError

MEDUSA_FILES = ("medusa_lm_head.safetensors", "medusa_lm_head.pt")
TORCH = "pytorch_model.bin"
MASK = "mask_embedding.pt"
MASK_HIDDEN = "mask_hidden"  # a tensor that has one dimension, or some of size 1 before it
PATTERNS = ["config.json", "*.safetensors", "*.safetensors.index.json", TORCH, MEDUSA_FILES[1], MASK]
MAPS = ("d2t", "t2d", "token_map")  # tensors that are no weights
SHARED = ("embed_tokens.weight", "lm_head.weight")  # some files hold the verifier's
IGNORED = re.compile(r"^verifier_|rotary_emb\.")  # tensors that are the verifier's, or can be computed
RENAMED = (
    (re.compile(r"^(model|medusa_head)\."), ""),
    (re.compile(r"^midlayer\."), "layers.0."),
    (re.compile(r"^(\d+)\.(\d+)\.linear\."), r"blocks.\1.layers.\2."),
    (re.compile(r"^(\d+)\.\d+\.weight$"), r"blocks.\1.lm_head.weight"),
    (re.compile(r"^lm_heads\.(\d+)\."), r"blocks.\1.lm_head."),
)


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A drafter's files."""

    source: str
    config: Mapping[str, Any]
    weights: Mapping[str, Tensor]

    def wrong(self, problem: str) -> ModelError:
        return ModelError(f"The drafter {self.source!r} cannot be used: {problem}")

    def size(self, name: str, axis: int = 0) -> int:
        """Of a tensor that must be there."""
        if name not in self.weights:
            raise self.wrong(f"it lacks the tensor {name}")
        if axis >= self.weights[name].dim():
            raise self.wrong(f"its tensor {name} has {self.weights[name].dim()} dimensions")
        return self.weights[name].shape[axis]

    def count(self, pattern: str) -> int:
        """How many numbers there are, from 0 on, for which a tensor's name begins with ``pattern``."""
        number = 0
        while any(name.startswith(pattern.format(number)) for name in self.weights):
            number += 1
        return number

    def fill(self, module: torch.nn.Module) -> None:
        """Put the weights into a module that has none; all must have their place."""
        wanted = module.state_dict()
        given = {name: self.weights[name] for name in self.weights if name in wanted or name not in (*MAPS, *SHARED)}
        if missing := sorted(wanted.keys() - given.keys()):
            raise self.wrong(f"it lacks the tensor {missing[0]}")
        if unknown := sorted(given.keys() - wanted.keys()):
            raise self.wrong(f"it has the tensor {unknown[0]}, which a drafter of this kind does not have")
        for name, tensor in given.items():
            if tensor.shape != wanted[name].shape:
                raise self.wrong(f"its tensor {name} is {list(tensor.shape)}, and has to be {list(wanted[name].shape)}")
        module.load_state_dict(given, assign=True)
        module.requires_grad_(False)


def read(source: str, *, revision: str | None = None) -> Checkpoint:
    """The files of a path or hub id; raises `ModelError`."""
    check_source(source)
    try:
        local = source if is_local(source) else snapshot_download(source, revision=revision, allow_patterns=PATTERNS)
        check_files(Path(local))
        config, weights = _config(Path(local) / "config.json"), _weights(Path(local)) | _mask(Path(local) / MASK)
    except ModelError:
        raise
    except Exception as error:  # of any library
        raise ModelError(f"No drafter can be loaded from {source!r}: {reason(error)}") from error
    if not weights or not all(isinstance(tensor, Tensor) for tensor in weights.values()) or not isinstance(config, dict):
        raise ModelError(f"No drafter can be loaded from {source!r}: it holds no weights")
    return Checkpoint(source, config, _named(weights))


def num_weights(source: str, *, revision: str | None = None) -> int | None:
    """Numbers in the files of a path or hub id, told from their headers; None where a hub cannot tell. Raises `ModelError`."""
    check_source(source)
    try:
        if not is_local(source):
            return sum(get_safetensors_metadata(source, revision=revision).parameter_count.values())
        check_files(Path(source))
        return sum(_numel(file) for file in _files(Path(source)))
    except ModelError:
        raise
    except NotASafetensorsRepoError:
        return None
    except Exception as error:  # of any library
        raise ModelError(f"No drafter can be loaded from {source!r}: {reason(error)}") from error


def _numel(file: Path) -> int:
    if file.suffix == ".safetensors":
        return sum(size for name, size in numels(file) if name not in MAPS)
    loaded: dict[str, Tensor] = torch.load(file, map_location="meta", weights_only=True)
    return sum(tensor.numel() for name, tensor in loaded.items() if name not in MAPS)


def numels(file: Path) -> list[tuple[str, int]]:
    """Tensors of a safetensors file, and how many numbers each has, by its header."""
    with safe_open(file, framework="pt") as opened:
        return [(name, math.prod(opened.get_slice(name).get_shape())) for name in opened.keys()]  # noqa: SIM118  # no mapping


def _config(file: Path) -> Any:
    return json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}


def _weights(folder: Path) -> dict[str, Tensor]:
    return {name: tensor for file in _files(folder) for name, tensor in _tensors(file).items()}


def _tensors(file: Path) -> dict[str, Tensor]:
    if file.suffix == ".safetensors":
        return load_file(file)
    loaded: dict[str, Tensor] = torch.load(file, map_location="cpu", weights_only=True)
    return loaded


def _files(folder: Path) -> list[Path]:
    """Those that hold the weights; raises `ModelError` if there are none."""
    if (folder / INDEX).is_file():
        names = set(json.loads((folder / INDEX).read_text(encoding="utf-8"))["weight_map"].values())
        return [folder / name for name in sorted(names)]
    for name in (MEDUSA_FILES[0], SINGLE, MEDUSA_FILES[1], TORCH):
        if (folder / name).is_file():
            return [folder / name]
    raise ModelError(
        f"No drafter can be loaded from {str(folder)!r}: it has none of the files {SINGLE}, {TORCH}, {MEDUSA_FILES[1]}"
    )


def _mask(file: Path) -> dict[str, Tensor]:
    """What masks are embedded as: the tensor alone, or beside the token that it is for."""
    if not file.is_file():
        return {}
    loaded = torch.load(file, map_location="cpu", weights_only=True)
    return {"mask_embedding": (loaded["embedding"] if isinstance(loaded, dict) else loaded).flatten()}


def _named(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The same under the names that heads give to their tensors."""
    named: dict[str, Tensor] = {}
    for name, tensor in weights.items():
        for pattern, new in RENAMED:
            name = pattern.sub(new, name)
        if not IGNORED.search(name):
            named[name] = tensor.flatten() if name == MASK_HIDDEN else tensor
    return named


def token_ids(checkpoint: Checkpoint, name: str, size: int, vocab_size: int, *, offsets: bool) -> Tensor | None:
    """Tokens that ``size`` logits stand for, by a tensor of their ids, or of what is added to their places; None for all.

    Raises `ModelError` if they are no tokens of a vocabulary of ``vocab_size``, or if without such a tensor they are not all.
    """
    if name not in checkpoint.weights:
        if size != vocab_size:
            raise checkpoint.wrong(f"it guesses among {size} tokens, and the model has {vocab_size}")
        return None
    ids = checkpoint.weights[name].long()
    if ids.shape != (size,):
        raise checkpoint.wrong(f"its tensor {name} is {list(ids.shape)}, and it guesses among {size} tokens")
    if offsets:
        ids = ids + torch.arange(size, device=ids.device)
    if int(ids.min()) < 0 or int(ids.max()) >= vocab_size:
        raise checkpoint.wrong(
            f"by its tensor {name} it guesses tokens {int(ids.min())} to {int(ids.max())}, and the model has {vocab_size}"
        )
    return ids


def kind_of(checkpoint: Checkpoint) -> str:
    """Which kind of head the tensors are of; raises `ModelError` if they are of none."""
    weights = checkpoint.weights
    if any(name.startswith("blocks.0.") for name in weights):
        return "medusa"
    query = "layers.0.self_attn.q_proj.weight"
    if "fc.weight" in weights and query in weights:
        inputs, size = checkpoint.size(query, 1), checkpoint.size("fc.weight")
        if inputs == size and weights.keys() & {"hidden_norm.weight", "layers.0.input_layernorm.weight"}:
            return "dspark" if any(name.startswith(("markov_head.", "confidence_head.")) for name in weights) else "dflash"
        if inputs == size:
            return "eagle"
        if inputs == 2 * size:
            return "peagle" if MASK_HIDDEN in weights else "eagle3"
    raise checkpoint.wrong("its tensors are of none of the kinds medusa, eagle, eagle3, peagle, dflash and dspark")


def layers_of(checkpoint: Checkpoint, number: int, num_layers: int) -> tuple[int, ...]:
    """The ``number`` hidden states that an EAGLE-3 head reads of a model with ``num_layers``, as Transformers counts them."""
    inner = checkpoint.config.get("eagle_config") or {}
    if number == 1 and not inner.get("use_aux_hidden_state", True):
        return (num_layers,)
    outputs, counted = inner.get("eagle_aux_hidden_state_layer_ids"), _counted(checkpoint.config)
    ids: Sequence[int] = counted or [layer + 1 for layer in outputs or ()] or [2, num_layers // 2, num_layers - 3]
    if len(ids) != number:
        raise checkpoint.wrong(f"its tensor fc.weight is for {number} hidden states, and its config names {len(ids)}")
    if not all(isinstance(layer, int) and 0 <= layer <= num_layers for layer in ids):
        raise checkpoint.wrong(f"it reads hidden states {', '.join(map(str, ids))}, and the model has {num_layers} layers")
    return tuple(ids)


def _counted(config: Mapping[str, Any]) -> Sequence[int] | None:
    found: Sequence[int] | None = config.get("eagle_aux_hidden_state_layer_ids") or config.get("aux_hidden_state_layer_ids")
    return found
