"""The files of heads, as published: what they hold is told from tensors, for configurations are often wrong.

Names and formulas of one kind of head are in its own file; what several share is here.
"""

import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import get_safetensors_metadata, snapshot_download
from huggingface_hub.errors import NotASafetensorsRepoError
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import LlamaConfig

from cascade.engine.checkpoint import SINGLE, check_files, shards
from cascade.engine.heads.head import Verifier
from cascade.engine.tokenizer import check_source, is_local
from cascade.errors import ModelError, reason

MEDUSA_FILES = ("medusa_lm_head.safetensors", "medusa_lm_head.pt")
TORCH = "pytorch_model.bin"
MASK = "mask_embedding.pt"  # beside the weights of a drafter of blocks: what masks are embedded as
PATTERNS = ["config.json", "*.safetensors", "*.safetensors.index.json", TORCH, MEDUSA_FILES[1], MASK]
MASK_HIDDEN = "mask_hidden"  # a tensor that has one dimension, or some of size 1 before it
MAPS = ("d2t", "t2d", "token_map")  # tensors that are no weights
SHARED = ("embed_tokens.weight", "lm_head.weight")  # some files hold the verifier's
IGNORED = re.compile(r"^verifier_|rotary_emb\.")  # tensors that are the verifier's, or can be computed
ATTENTION = "layers.0.self_attn."
ROPE = ("rope_theta", "rope_scaling", "rope_parameters")

Names = Sequence[tuple[str, str]]  # patterns of tensors' names, and what heads call them


@dataclass(frozen=True, slots=True)
class Checkpoint:
    source: str
    config: Mapping[str, Any]
    weights: Mapping[str, Tensor]

    def wrong(self, problem: str) -> ModelError:
        return ModelError(f"The drafter {self.source!r} cannot be used: {problem}")

    def named(self, names: Names) -> "Checkpoint":
        """The same under the names that a kind of heads gives to its tensors."""
        weights: dict[str, Tensor] = {}
        for name, tensor in self.weights.items():
            for pattern, new in ((r"^(model|medusa_head)\.", ""), *names):
                name = re.sub(pattern, new, name)
            if not IGNORED.search(name):
                weights[name] = tensor.flatten() if name == MASK_HIDDEN else tensor
        return replace(self, weights=weights)

    @property
    def layer_config(self) -> Mapping[str, Any]:
        """The configuration of its layers, which the ``speculators`` library puts into one of its own."""
        return self.config.get("transformer_layer_config") or self.config

    @property
    def query_width(self) -> float:
        """Inputs of the first layer's queries, in hidden sizes; 0 without ``fc`` or layers."""
        query = f"{ATTENTION}q_proj.weight"
        if not {"fc.weight", query} <= self.weights.keys():
            return 0
        return self.size(query, 1) / self.size("fc.weight")

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

    def own_names(self, verifier: Verifier) -> set[str]:
        """Its tensors but for embeddings that do what the verifier's do."""
        return {*self.weights} - {
            name
            for name, layer in zip(SHARED, (verifier.embed, verifier.lm_head), strict=True)
            if name in self.weights and _same(self.weights[name], layer)
        }

    def check_hidden(self, size: int, verifier: Verifier) -> None:
        if size != verifier.hidden_size:
            raise self.wrong(f"it was made for a hidden size of {size}, and the model's is {verifier.hidden_size}")

    def check_vocab(self, verifier: Verifier) -> None:
        """By what is about all tokens of the verifier: the tensors, or else the configuration."""
        sizes: list[Any] = [len(self.weights[name]) for name in ("embed_tokens.weight", "t2d") if name in self.weights]
        for size in sizes or [self.layer_config.get("vocab_size")]:
            if size not in (None, verifier.vocab_size):
                raise self.wrong(f"it was made for a vocabulary of {size} tokens, and the model has {verifier.vocab_size}")

    def check_embedded(self, names: Sequence[str], own: set[str], verifier: Verifier) -> None:
        """Embeddings that are not its ``own`` are the verifier's, so that these must be as wide as its layers."""
        size = self.size("fc.weight")
        for name in names:
            if name not in own and size != verifier.hidden_size:
                raise self.wrong(f"it lacks the tensor {name}, for its hidden size {size} is not the model's")

    def check_reads(self, layers: Sequence[int], verifier: Verifier) -> tuple[int, ...]:
        """Hidden states ``layers``, as Transformers counts them, that the verifier must have."""
        if not layers or not all(isinstance(layer, int) and 0 <= layer <= verifier.num_layers for layer in layers):
            read = ", ".join(map(str, layers))
            raise self.wrong(f"it reads hidden states {read}, and the model has {verifier.num_layers} layers")
        return tuple(layers)

    def check_mask(self, mask: Any, verifier: Verifier) -> int:
        if not isinstance(mask, int):
            raise self.wrong("its config.json does not name mask_token_id")
        if not 0 <= mask < verifier.vocab_size:
            raise self.wrong(f"its masks are token {mask}, and the model has {verifier.vocab_size}")
        return mask

    def token_ids(self, name: str, size: int, verifier: Verifier, *, offsets: bool) -> Tensor | None:
        """Tokens that ``size`` logits stand for, by a tensor of their ids, or of what is added to their places; None for all.

        Raises `ModelError` if they are no tokens of the verifier, or if without such a tensor they are not all.
        """
        vocab_size = verifier.vocab_size
        if name not in self.weights:
            if size != vocab_size:
                raise self.wrong(f"it guesses among {size} tokens, and the model has {vocab_size}")
            return None
        ids = self.weights[name].long()
        if ids.shape != (size,):
            raise self.wrong(f"its tensor {name} is {list(ids.shape)}, and it guesses among {size} tokens")
        if offsets:
            ids = ids + torch.arange(size, device=ids.device)
        least, most = int(ids.min()), int(ids.max())
        if least < 0 or most >= vocab_size:
            raise self.wrong(f"by its tensor {name} it guesses tokens {least} to {most}, and the model has {vocab_size}")
        return ids

    def llama(self, verifier: Verifier) -> LlamaConfig:
        """Of its layers, sizes by their tensors; positions go as far as the verifier's."""
        config = self.layer_config
        queries, keys = (self.size(f"{ATTENTION}{name}_proj.weight") for name in ("q", "k"))
        heads = config.get("num_attention_heads")
        if not isinstance(heads, int):
            raise self.wrong("its config.json does not name num_attention_heads")
        head_dim = int(config.get("head_dim") or queries // heads)
        if queries != heads * head_dim or keys % head_dim or heads % max(1, keys // head_dim):
            raise self.wrong(f"{heads} heads of {head_dim} do not fit its queries of {queries} and keys of {keys}")
        return LlamaConfig(
            hidden_size=self.size("fc.weight"),
            intermediate_size=self.size("layers.0.mlp.gate_proj.weight"),
            num_hidden_layers=self.count("layers.{}."),
            num_attention_heads=heads,
            num_key_value_heads=keys // head_dim,
            head_dim=head_dim,
            hidden_act=config.get("hidden_act") or "silu",
            rms_norm_eps=config.get("rms_norm_eps") or 1e-6,
            max_position_embeddings=verifier.context_len,
            mlp_bias="layers.0.mlp.gate_proj.bias" in self.weights,
            **{name: config[name] for name in ROPE if config.get(name) is not None},
        )

    def fill(self, module: nn.Module) -> None:
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


def _same(given: Tensor, layer: nn.Module) -> bool:
    """Whether a layer with this weight does what ``layer`` does, which may scale embeddings."""
    held = layer.weight
    assert isinstance(held, Tensor)
    if type(layer) not in (nn.Embedding, nn.Linear) or given.shape != held.shape:
        return False
    return torch.equal(given.to(device=held.device, dtype=held.dtype), held)


@contextmanager
def model_errors(problem: str) -> Iterator[None]:
    """Turn errors of any library into a `ModelError` that begins with ``problem``; a `ModelError` stays as it is."""
    try:
        yield
    except ModelError:
        raise
    except Exception as error:
        raise ModelError(f"{problem}: {reason(error)}") from error


def read(source: str, *, revision: str | None = None) -> Checkpoint:
    """The files of a path or hub id; raises `ModelError`."""
    with model_errors(problem := f"No drafter can be loaded from {source!r}"):
        local = _local(source, revision)
        config = json.loads(file.read_text(encoding="utf-8")) if (file := local / "config.json").is_file() else {}
        weights = {name: tensor for file in _files(local) for name, tensor in _tensors(file).items()} | _mask(local / MASK)
    if not weights or not all(isinstance(tensor, Tensor) for tensor in weights.values()) or not isinstance(config, dict):
        raise ModelError(f"{problem}: it holds no weights")
    return Checkpoint(source, config, weights)


def shapes(source: str, *, revision: str | None = None) -> dict[str, tuple[int, ...]]:
    """Shapes of all tensors of a path or hub id by name, from the headers of its files; raises `ModelError`."""
    with model_errors(f"The weights of {source!r} cannot be read"):
        found = {name: shape for file in _files(_local(source, revision)) for name, shape in file_shapes(file).items()}
    return found


def _local(source: str, revision: str | None) -> Path:
    """The folder of a path, or of a hub id's files, which are fetched; raises `ModelError` if one is damaged."""
    check_source(source)
    local = Path(source if is_local(source) else snapshot_download(source, revision=revision, allow_patterns=PATTERNS))
    check_files(local)
    return local


def num_weights(source: str, *, revision: str | None = None) -> int | None:
    """Numbers in the files of a path or hub id, told from their headers; None where a hub cannot tell. Raises `ModelError`."""
    check_source(source)
    found: int | None = None
    with model_errors(f"No drafter can be loaded from {source!r}"):
        if is_local(source):
            found = sum(math.prod(shape) for name, shape in shapes(source).items() if name not in MAPS)
        else:
            with suppress(NotASafetensorsRepoError):
                found = sum(get_safetensors_metadata(source, revision=revision).parameter_count.values())
    return found


def file_shapes(file: Path) -> dict[str, tuple[int, ...]]:
    """Shapes of all tensors of a file by name; of a safetensors file from its header."""
    if file.suffix != ".safetensors":
        loaded: dict[str, Tensor] = torch.load(file, map_location="meta", weights_only=True)
        return {name: tuple(tensor.shape) for name, tensor in loaded.items()}
    with safe_open(file, framework="pt") as opened:
        return {name: tuple(opened.get_slice(name).get_shape()) for name in opened.keys()}  # noqa: SIM118  # no mapping


def _tensors(file: Path) -> dict[str, Tensor]:
    if file.suffix == ".safetensors":
        return load_file(file)
    return torch.load(file, map_location="cpu", weights_only=True)


def _files(folder: Path) -> list[Path]:
    """Those that hold the weights; raises `ModelError` if there are none."""
    medusa, *others = (folder / name for name in (*MEDUSA_FILES, TORCH))
    if found := [medusa] if medusa.is_file() else [*shards(folder)] or [file for file in others if file.is_file()][:1]:
        return found
    raise ModelError(
        f"No drafter can be loaded from {str(folder)!r}: it has none of the files {SINGLE}, {TORCH}, {MEDUSA_FILES[1]}"
    )


def _mask(file: Path) -> dict[str, Tensor]:
    """The tensor alone, or beside the token that it is for."""
    if not file.is_file():
        return {}
    loaded = torch.load(file, map_location="cpu", weights_only=True)
    return {"mask_embedding": (loaded["embedding"] if isinstance(loaded, dict) else loaded).flatten()}
