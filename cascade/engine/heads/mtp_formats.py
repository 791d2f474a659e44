"""MTP layers as they are published: beside the weights of the model that Transformers loads, or in a file of their own.

| models | names of the first layer | concatenation |
|---|---|---|
| DeepSeek-V3, GLM-4.5, GLM-4.6 | ``model.layers.{layers of the model}.{enorm, hnorm, eh_proj, ...}`` | embedding, hidden |
| Qwen3-Next, Qwen3.5 | ``mtp.{pre_fc_norm_embedding, pre_fc_norm_hidden, fc, norm, layers.0}`` | embedding, hidden |
| MiMo | ``model.mtp_layers.0.{token_layernorm, hidden_layernorm, input_proj, final_layernorm, ...}`` | hidden, embedding |

All take the hidden state behind the model's final norm.
"""

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from huggingface_hub import snapshot_download
from safetensors import safe_open
from torch import Tensor

from cascade.engine.checkpoint import INDEX, SINGLE, check_files, read_config, reason
from cascade.engine.gguf import described
from cascade.engine.heads.formats import Checkpoint, numels
from cascade.engine.tokenizer import check_source, is_local
from cascade.errors import ModelError

PROJECTION = "eh_proj.weight"  # which every layer has
SUFFIX = ".safetensors"


class Naming(NamedTuple):
    """How the tensors of the first layer are called."""

    prefix: str  # a pattern, for a model with {} layers of its own
    modules: Mapping[str, str]  # theirs behind the prefix, and those of `Mtp`; all others are its block's
    hidden_first: bool = False

    def named(self, name: str, num_layers: int | str) -> str | None:
        """What a tensor is called in `Mtp`, None if it is not of this layer; ``num_layers`` may be a pattern."""
        prefix = re.match(self.prefix.format(num_layers), name)
        if prefix is None:
            return None
        rest = name[prefix.end() :]
        module = next((module for module in self.modules if rest.startswith(f"{module}.")), None)
        return f"block.{rest}" if module is None else self.modules[module] + rest.removeprefix(module)


NAMINGS = (
    Naming(
        r"(model\.)?(language_model\.)?layers\.{}\.",
        {
            "enorm": "enorm",
            "hnorm": "hnorm",
            "eh_proj": "eh_proj",
            "embed_tokens": "embed_tokens",
            "shared_head.norm": "norm",
            "shared_head.head": "lm_head",
        },
    ),
    Naming(
        r"mtp\.(?!layers\.[1-9])",
        {
            "pre_fc_norm_embedding": "enorm",
            "pre_fc_norm_hidden": "hnorm",
            "fc": "eh_proj",
            "embed_tokens": "embed_tokens",
            "norm": "norm",
            "lm_head": "lm_head",
            "layers.0": "block",
        },
    ),
    Naming(
        r"(model\.)?mtp_layers\.0\.",
        {"token_layernorm": "enorm", "hidden_layernorm": "hnorm", "input_proj": "eh_proj", "final_layernorm": "norm"},
        hidden_first=True,
    ),
)


def holds_mtp(names: Iterable[str]) -> bool:
    """Whether there are MTP layers among tensors, of a model with any number of layers."""
    return any(naming.named(name, r"\d+") == PROJECTION for name in names for naming in NAMINGS)


def read_mtp(source: str, num_layers: int, *, revision: str | None = None) -> tuple[Checkpoint, Naming]:
    """The tensors of the first layer in a folder, file or hub id, as `Mtp` calls them.

    ``num_layers`` are the model's own. Raises `ModelError` if there are none, or none that can be read.
    """
    try:
        weights = _tensors(source, revision, lambda name: any(naming.named(name, num_layers) for naming in NAMINGS))
    except ModelError:
        raise
    except Exception as error:  # of any library
        raise ModelError(f"No MTP layers can be loaded from {source!r}: {reason(error)}") from error
    for naming in NAMINGS:
        named = {new: tensor for name, tensor in weights.items() if (new := naming.named(name, num_layers))}
        if PROJECTION in named:
            return _checked(Checkpoint(source, {}, named)), naming
    raise _none(source, num_layers)


def check_mtp(source: str, *, revision: str | None = None, trust_remote_code: bool = False) -> int | None:
    """How many numbers the first MTP layer in the checkpoint of a model has, before any weight is read; None if not known.

    Told from the names of tensors, sizes for checkpoints at hand; where the hub has one file without an index, that is not
    fetched to find out. Raises `ModelError` if there are no such layers.
    """
    text = read_config(source, revision=revision, trust_remote_code=trust_remote_code).get_text_config()
    num_layers = int(text.num_hidden_layers)
    sizes = _sizes(described(source), revision)
    if sizes is None:
        return None
    own = [name for name in sizes if any(naming.named(name, num_layers) for naming in NAMINGS)]
    if not any(naming.named(name, num_layers) == PROJECTION for name in own for naming in NAMINGS):
        raise _none(source, num_layers)
    return sum(sizes[name] for name in own) or None


def _none(source: str, num_layers: int) -> ModelError:
    return ModelError(
        f"The checkpoint {source!r} holds no MTP layers for a model of {num_layers} layers: choose another drafter than 'mtp'"
    )


def _sizes(source: str, revision: str | None) -> dict[str, int] | None:
    """Of all tensors, 0 where only their names are known; None if that is not known without fetching them."""
    try:
        if is_local(source):
            check_files(Path(source))
            return {name: size for file in Path(source).glob(f"*{SUFFIX}") for name, size in numels(file)}
        weight_map = _weight_map(Path(snapshot_download(source, revision=revision, allow_patterns=[INDEX])))
    except ModelError:
        raise
    except Exception as error:  # of any library
        raise ModelError(f"The checkpoint {source!r} cannot be read: {reason(error)}") from error
    return dict.fromkeys(weight_map, 0) or None


def _weight_map(folder: Path) -> dict[str, str]:
    """Files of tensors by their names; empty without an index."""
    if not (folder / INDEX).is_file():
        return {}
    found: dict[str, str] = json.loads((folder / INDEX).read_text(encoding="utf-8"))["weight_map"]
    return found


def _checked(checkpoint: Checkpoint) -> Checkpoint:
    """The same; raises `ModelError` if it is quantised."""
    small = sorted({str(tensor.dtype) for tensor in checkpoint.weights.values() if tensor.dtype.itemsize == 1})
    if small:
        raise checkpoint.wrong(f"its MTP layers are quantised ({small[0].removeprefix('torch.')}): give those in 16 or 32 bits")
    return checkpoint


def _tensors(source: str, revision: str | None, wanted: Callable[[str], object]) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for file in _files(source, revision, wanted):
        with safe_open(file, framework="pt") as opened:
            found |= {name: opened.get_tensor(name) for name in opened.keys() if wanted(name)}  # noqa: SIM118  # no mapping
    return found


def _files(source: str, revision: str | None, wanted: Callable[[str], object]) -> Iterator[Path]:
    """Those that may hold what is wanted; of the hub no others are fetched."""
    if source.endswith(SUFFIX) and Path(source).is_file():
        yield Path(source)
        return
    check_source(source)
    if is_local(source):  # some files stand in no index
        check_files(Path(source))
        yield from sorted(Path(source).glob(f"*{SUFFIX}"))
        return
    weight_map = _weight_map(Path(snapshot_download(source, revision=revision, allow_patterns=[INDEX])))
    names = sorted({file for name, file in weight_map.items() if wanted(name)}) if weight_map else [SINGLE]
    if names:
        folder = Path(snapshot_download(source, revision=revision, allow_patterns=names))
    yield from (folder / name for name in names if (folder / name).is_file())
