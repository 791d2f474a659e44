"""Trains a head of blocks for a model, and writes it as such heads are published.

Blocks begin at random places of a text. Each sees the model's hidden states before it and its own first token, and is to say
at each of its places what the model says there:

    loss = sum_k exp(-(k - 1) / g) * cross entropy of softmax(logits_k) against the model's distribution

The first guesses count most, for after a wrong one the others are lost. Chen et al., "DFlash", arXiv 2602.06036. What comes on
top of it in a DSpark head is in `cascade.training.markov`.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple, TypeVar

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor
from transformers import LlamaConfig, PreTrainedModel

from cascade.engine.heads.checkpoint import ATTENTION, MASK
from cascade.engine.heads.dflash import BlockAttention, DFlash, Layout, Seen
from cascade.engine.heads.head import Verifier
from cascade.training.fitting import Batch, Schedule, fit

PARTS = ("mask_embedding", f"{ATTENTION}q_norm.weight")  # that not every such head has

Kind = TypeVar("Kind", bound=DFlash)


@dataclass(frozen=True)
class BlockShape:
    """Size of a head; its hidden size, embedding and projection to tokens are its model's."""

    num_layers: int
    num_heads: int
    num_kv_heads: int
    intermediate_size: int
    reads: tuple[int, ...]  # hidden states, as Transformers counts them
    block_size: int  # its first place is known
    mask: int  # token id

    @property
    def decay(self) -> float:
        """Places from one to another that counts 1/e of it."""
        return self.block_size / 2

    def layout(self, *, shifted: bool) -> Layout:
        """Of its blocks; see `Layout.shifted`."""
        return Layout(self.block_size, self.mask, shifted=shifted, seen=(Seen(),) * self.num_layers)


class Guessed(NamedTuple):
    """Blocks after random places of texts, with what they are to say."""

    hidden: Tensor  # what guesses are made of, `[blocks, guesses, hidden_size]`
    before: Tensor  # the token before each guess, `[blocks, guesses]`
    wanted: Tensor  # the model's distribution, `[blocks, guesses, vocab_size]`


def train_dflash(network: PreTrainedModel, batch: Batch, shape: BlockShape, schedule: Schedule, folder: Path) -> float:
    """Train a head for ``network`` and write it to ``folder``; returns the mean loss of its last steps, in nats a guess.

    As `cascade.training.eagle.train_eagle3`; rows of a batch are longer than a block.
    """
    torch.manual_seed(0)
    head = new_dflash(network, shape)
    mean = fit(head, lambda ids: _loss(network, head, ids, shape), batch, schedule, folder)
    write(head, shape, network.config.get_text_config().num_hidden_layers, folder)
    return mean


def new_dflash(network: PreTrainedModel, shape: BlockShape) -> DFlash:
    """An untrained head."""
    head = DFlash(config_of(network, shape), Verifier.of(network), shape.layout(shifted=False), PARTS, reads=shape.reads)
    return prepared(head, network)


def prepared(head: Kind, network: PreTrainedModel) -> Kind:
    """``head`` whose last norm is the model's, and whose layers leave what they are given as it is."""
    size = network.config.get_text_config().hidden_size
    with torch.no_grad():
        head.mask_embedding.normal_(std=0.02)
        last = getattr(getattr(network.base_model, "norm", None), "weight", None)
        if isinstance(last, Tensor):
            head.norm.weight.copy_(last)
        for layer in head.own_layers:
            for part in (layer.self_attn.o_proj, layer.mlp.down_proj):
                part.weight.zero_()
        head.fc.weight.zero_()
        head.fc.weight[:, -size:].fill_diagonal_(1.0)
    return head.to(network.device)


def config_of(network: PreTrainedModel, shape: BlockShape) -> LlamaConfig:
    """Of a head's layers."""
    text = network.config.get_text_config()
    return LlamaConfig(
        hidden_size=text.hidden_size,
        intermediate_size=shape.intermediate_size,
        num_attention_heads=shape.num_heads,
        num_key_value_heads=shape.num_kv_heads,
        head_dim=text.hidden_size // shape.num_heads,
        num_hidden_layers=shape.num_layers,
        rms_norm_eps=1e-6,
        vocab_size=text.vocab_size,
        max_position_embeddings=text.max_position_embeddings,
    )


def _loss(network: PreTrainedModel, head: DFlash, ids: Tensor, shape: BlockShape) -> Tensor:
    """Mean nats per guess, see `guessed`."""
    with torch.autocast(ids.device.type, torch.bfloat16):
        found = guessed(network, head, ids)
        return nats(head.logits(found.hidden), found.wanted, shape)


def nats(logits: Tensor, wanted: Tensor, shape: BlockShape) -> Tensor:
    """Mean of what ``[blocks, guesses, vocab_size]`` lack, those further ahead counting less."""
    losses = F.cross_entropy(logits.float().flatten(0, 1), wanted.flatten(0, 1), reduction="none")
    weights = torch.exp(-torch.arange(wanted.shape[1], device=wanted.device) / shape.decay)
    mean: Tensor = (losses.unflatten(0, (-1, len(weights))) * weights).mean(0).sum() / weights.sum()
    return mean


def guessed(network: PreTrainedModel, head: DFlash, ids: Tensor) -> Guessed:
    """Blocks after as many places of ``ids`` ``[rows, n]`` as make its length in blocks.

    They are random, and the same ones each time.
    """
    (rows, n), size = ids.shape, head.layout.size
    chance = torch.Generator().manual_seed(int(ids.sum()))
    places = torch.rand(rows, n - size, generator=chance).argsort(-1)[:, : max(1, n // size)]
    starts = (1 + places).to(ids.device)
    before = starts[..., None] + torch.arange(head.layout.guesses, device=ids.device)
    row = torch.arange(rows, device=ids.device)[:, None, None]
    with torch.no_grad():
        said = network(ids, output_hidden_states=True, use_cache=False)
        wanted = said.logits[row, before].float().softmax(-1)
    hidden = blocks(head, said.hidden_states, ids, starts)
    return Guessed(hidden.flatten(0, 1), ids[row, before].flatten(0, 1), wanted.flatten(0, 1))


def blocks(head: DFlash, hidden: tuple[Tensor, ...], ids: Tensor, starts: Tensor) -> Tensor:
    """What guesses are made of, ``[rows, blocks, guesses, hidden_size]``.

    Blocks begin at ``starts`` ``[rows, blocks]`` of texts ``ids`` ``[rows, n]``; ``hidden`` are all hidden states of the model.
    """
    rows, n = ids.shape
    size, number = head.layout.size, starts.shape[1]
    states = head.state([hidden[layer].flatten(0, 1) for layer in head.reads])
    where = torch.arange(n, device=ids.device).repeat(rows)[None]
    held = {layer.self_attn: pair for layer, pair in zip(head.own_layers, head.context(states, where), strict=True)}
    own = torch.arange(number, device=ids.device).repeat_interleave(size)
    before = torch.arange(n, device=ids.device) < starts.repeat_interleave(size, dim=1)[..., None]
    seen = torch.cat([before, (own[:, None] == own).expand(rows, -1, -1)], -1)[:, None]

    def attend(layer: BlockAttention, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        queries = _by_row(query, rows)
        keys, values = (
            torch.cat([_by_row(old, rows), _by_row(new, rows)], 2) for old, new in zip(held[layer], (key, value), strict=True)
        )
        out = F.scaled_dot_product_attention(queries, keys.to(queries.dtype), values.to(queries.dtype), seen, enable_gqa=True)
        return out.transpose(1, 2).flatten(0, 1)[None]

    positions = (starts[..., None] + torch.arange(size, device=ids.device)).flatten()[None]
    out: Tensor = head(ids.gather(1, starts).flatten(), positions, attend).unflatten(0, (rows, number))
    return out


def _by_row(part: Tensor, rows: int) -> Tensor:
    """``[1, heads, rows * n, head_dim]`` as ``[rows, heads, n, head_dim]``."""
    by_row: Tensor = part[0].unflatten(1, (rows, -1)).transpose(0, 1)
    return by_row


def write(
    head: DFlash,
    shape: BlockShape,
    num_layers: int,
    folder: Path,
    dtype: torch.dtype = torch.bfloat16,
    said: Mapping[str, Any] = MappingProxyType({"architectures": ["DFlashDraftModel"]}),
) -> None:
    """The head's files, for a model of ``num_layers``; ids of hidden states are those of the layers whose outputs they are.

    What is ``said`` in the configuration depends on the kind of head.
    """
    folder.mkdir(parents=True, exist_ok=True)
    weights = {name: tensor.to(dtype).contiguous() for name, tensor in head.state_dict().items()}
    torch.save({"mask_token_id": shape.mask, "embedding": weights.pop("mask_embedding")}, folder / MASK)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    config = head.config.to_dict() | {
        "model_type": "qwen3",
        "block_size": shape.block_size,
        "dflash_config": {"mask_token_id": shape.mask, "target_layer_ids": [layer - 1 for layer in shape.reads]},
        "layer_types": ["full_attention"] * shape.num_layers,
        "num_target_layers": num_layers,
        **said,
    }
    (folder / "config.json").write_text(json.dumps(config, indent=2, default=str) + "\n", encoding="utf-8")
