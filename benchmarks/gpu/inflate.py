"""A small Llama at the shapes of a large one: its words, and the cost of the large one.

    folder = write(family.full(), "8b", Path("inflated-8b"))
    vllm serve inflated-8b --load-format inflated

The folder has a configuration and a tokenizer, no weights: a loader of vLLM makes them on the device. The live block lies at
the beginning of each weight. What no live value meets is random, for products with zeros alone would run unrealistically fast;
what would bring dead values into the residual is zero. Norms are scaled, so that the mean over the wider vector is that over
the narrow one. Text is the source's up to near ties.
"""

import json
import math
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

FORMAT = "inflated"  # vLLM's ``load_format``
SOURCE = "inflated_from"  # key of the configuration: the folder that has the weights
SCALE = 0.02  # standard deviation of random weights
TOKENIZER = (
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    "generation_config.json",
    "special_tokens_map.json",
)
ENTRY = "[vllm.general_plugins]\ncascade_inflated = benchmarks.gpu.inflate:register\n"


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes of a Llama whose heads are as wide as the source's."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    inner: int


SHAPES = {  # what Llamas of this size have, with heads of 64: twice as many as theirs of 128
    "8b": Shape(4096, 32, 64, 16, 14_336),
    "14b": Shape(5120, 48, 80, 16, 13_824),
    "32b": Shape(5120, 64, 80, 16, 27_648),
}


def write(source: str, shape: str | Shape, folder: Path) -> str:
    """Write the folder of ``source`` at ``shape`` and return its path; raises `ValueError` if the source does not fit in."""
    wide = SHAPES[shape] if isinstance(shape, str) else shape
    config: dict[str, Any] = json.loads((Path(source) / "config.json").read_text(encoding="utf-8"))
    head = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    narrow = Shape(
        config["hidden_size"],
        config["num_hidden_layers"],
        config["num_attention_heads"],
        config["num_key_value_heads"],
        config["intermediate_size"],
    )
    groups = (narrow.heads // narrow.kv_heads, wide.heads // wide.kv_heads)
    fits = all(getattr(narrow, name) <= getattr(wide, name) for name in Shape.__slots__) and groups[0] <= groups[1]
    if config["model_type"] != "llama" or not fits or wide.heads % wide.kv_heads or not config.get("tie_word_embeddings"):
        raise ValueError(f"{source!r} must be a Llama with tied embeddings that fits into {wide}, and it is {narrow}")
    config |= {
        "hidden_size": wide.hidden,
        "num_hidden_layers": wide.layers,
        "num_attention_heads": wide.heads,
        "num_key_value_heads": wide.kv_heads,
        "intermediate_size": wide.inner,
        "head_dim": head,
        "rms_norm_eps": config["rms_norm_eps"] * narrow.hidden / wide.hidden,
        SOURCE: str(Path(source).absolute()),
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=1), encoding="utf-8")
    for name in TOKENIZER:
        if (Path(source) / name).exists():
            shutil.copyfile(Path(source) / name, folder / name)
    return str(folder)


def weights(config: Any, dtype: torch.dtype, device: torch.device) -> Iterator[tuple[str, Tensor]]:
    """Name and tensor of every weight of a folder that `write` has made, on ``device``; ``config`` is its configuration."""
    with safe_open(Path(getattr(config, SOURCE)) / "model.safetensors", "pt", device=str(device)) as file:
        yield from _Inflation(config, file, dtype, device).tensors()


class _Inflation:
    """Makes the tensors of a wide model out of a narrow one's."""

    def __init__(self, config: Any, file: Any, dtype: torch.dtype, device: torch.device) -> None:
        self.config, self.file, self.dtype, self.device = config, file, dtype, device
        self.random = torch.Generator(device).manual_seed(0)
        narrow = json.loads((Path(getattr(config, SOURCE)) / "config.json").read_text(encoding="utf-8"))
        self.layers: int = narrow["num_hidden_layers"]
        self.norm = math.sqrt(narrow["hidden_size"] / config.hidden_size)
        group, wide = narrow["num_attention_heads"] // narrow["num_key_value_heads"], self.config
        spread = wide.num_attention_heads // wide.num_key_value_heads
        heads = [head // group * spread + head % group for head in range(narrow["num_attention_heads"])]
        size = torch.arange(wide.head_dim, device=device)
        self.queries = torch.cat([head * wide.head_dim + size for head in heads])  # where the live heads' rows go

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        wide = self.config
        hidden, inner = wide.hidden_size, wide.intermediate_size
        heads, keys = (number * wide.head_dim for number in (wide.num_attention_heads, wide.num_key_value_heads))
        yield "model.embed_tokens.weight", self.placed("model.embed_tokens.weight", wide.vocab_size, hidden, random=False)
        yield "model.norm.weight", self.scaled("model.norm.weight")
        for number in range(wide.num_hidden_layers):
            layer = f"model.layers.{number}."
            for name in ("input_layernorm.weight", "post_attention_layernorm.weight"):
                yield layer + name, self.scaled(layer + name)
            for name, rows in (("k_proj", keys), ("v_proj", keys)):
                yield (full := f"{layer}self_attn.{name}.weight"), self.placed(full, rows, hidden)
            yield (full := f"{layer}self_attn.q_proj.weight"), self.placed(full, heads, hidden, rows=self.queries)
            yield (
                (full := f"{layer}self_attn.o_proj.weight"),
                self.placed(full, hidden, heads, columns=self.queries, random=False),
            )
            for name in ("gate_proj", "up_proj"):
                yield (full := f"{layer}mlp.{name}.weight"), self.placed(full, inner, hidden)
            yield (full := f"{layer}mlp.down_proj.weight"), self.placed(full, hidden, inner, random=False)

    def live(self, name: str) -> Tensor | None:
        """The narrow model's weight, ``None`` in layers that it has not."""
        parts = name.split(".")
        further = parts[1] == "layers" and int(parts[2]) >= self.layers
        return None if further else self.file.get_tensor(name).to(self.dtype)

    def filled(self, *shape: int) -> Tensor:
        return torch.empty(shape, dtype=self.dtype, device=self.device).normal_(0, SCALE, generator=self.random)

    def scaled(self, name: str) -> Tensor:
        """The weight of a norm."""
        weight, live = self.filled(self.config.hidden_size), self.live(name)
        if live is not None:
            weight[: len(live)] = live * self.norm
        return weight

    def placed(
        self,
        name: str,
        height: int,
        width: int,
        *,
        rows: Tensor | None = None,
        columns: Tensor | None = None,
        random: bool = True,
    ) -> Tensor:
        """A matrix with the live block at ``rows`` and ``columns``, at its beginning unless given; zero beside it or random."""
        live = self.live(name)
        weight = self.filled(height, width) if random else torch.zeros(height, width, dtype=self.dtype, device=self.device)
        if live is not None:
            rows = torch.arange(live.shape[0], device=self.device) if rows is None else rows
            columns = torch.arange(live.shape[1], device=self.device) if columns is None else columns
            weight[rows[:, None], columns[None]] = live
        return weight


def register() -> None:
    """Let this process's vLLM know ``load_format="inflated"``; vLLM calls it in all its processes, see `plugin`."""
    from vllm.model_executor.model_loader import register_model_loader
    from vllm.model_executor.model_loader.default_loader import DefaultModelLoader

    class Inflated(DefaultModelLoader):  # type: ignore[misc]  # vLLM may not be here
        """Makes weights where others read them."""

        def download_model(self, model_config: Any) -> None:
            """There is nothing to download."""

        def get_all_weights(self, model_config: Any, model: torch.nn.Module) -> Any:
            """Name and tensor of every weight."""
            return weights(model_config.hf_config, model_config.dtype, next(model.parameters()).device)

    register_model_loader(FORMAT)(Inflated)


def plugin(folder: Path) -> str:
    """Make ``folder`` one that, in ``PYTHONPATH``, lets every vLLM know the loader, and return its path.

    Such a process finds `register` by the entry point of an installed package, which is all that lies there.
    """
    package = folder / "cascade_inflated-1.dist-info"
    package.mkdir(parents=True, exist_ok=True)
    (package / "METADATA").write_text("Metadata-Version: 2.1\nName: cascade-inflated\nVersion: 1\n", encoding="utf-8")
    (package / "entry_points.txt").write_text(ENTRY, encoding="utf-8")
    return str(folder)
