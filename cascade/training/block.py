"""Trains heads of blocks for a model, and writes them as such heads are published: DFlash, and DSpark, which is one with more.

Blocks begin at random places of a text. Each sees the model's hidden states before it and its own first token, and is to say
at each of its places what the model says there:

    loss = sum_k exp(-(k - 1) / g) * cross entropy of softmax(logits_k) against the model's distribution

The first guesses count most, for after a wrong one the others are lost. Chen et al., "DFlash", arXiv 2602.06036.

Guesses of a DSpark head follow upon each other, and it learns how sure it may be. Each guess is made after the text's own
token, as it will be after a right guess:

    loss = DFlash's, of logits_k + W2 W1[x_{k-1}]
         + binary cross entropy of the confidence against sum_x min(p(x), q(x))

p is the model's distribution and q the head's, so the sum is the chance that the ratio rule accepts a guess. What confidence
learns changes no guess. Cheng et al., "DSpark", arXiv 2607.05147.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedModel

from cascade.engine.heads.checkpoint import ATTENTION, MASK
from cascade.engine.heads.dflash import BlockAttention, DFlash, Layout, Seen
from cascade.engine.heads.dspark import Confidence, DSpark, Markov
from cascade.engine.heads.head import Verifier
from cascade.training.fitting import Batch, Schedule, Shape, begun, by_row, fit, save
from cascade.training.learning import fast_products

PARTS = ("mask_embedding", f"{ATTENTION}q_norm.weight")  # that not every such head has
RANK = 64  # of a DSpark: numbers between a token and what it adds to logits, unless the model has fewer


@dataclass(frozen=True, kw_only=True)
class BlockShape(Shape):
    """Size of a head, whose embedding and projection to tokens are its model's, too."""

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


def train_blocks(
    network: PreTrainedModel, batch: Batch, shape: BlockShape, schedule: Schedule, folder: Path, kind: str = "dflash"
) -> float:
    """Train a head for ``network``, "dflash" or "dspark", and write it to ``folder``; returns as `fit`.

    Rows of a batch are longer than a block.
    """
    torch.manual_seed(0)
    head = new_dspark(network, shape) if kind == "dspark" else new_dflash(network, shape)
    mean = fit(head, lambda ids: _loss(network, head, ids, shape), batch, schedule, folder)
    write(head, shape, network.config.get_text_config().num_hidden_layers, folder)
    return mean


def new_dflash(network: PreTrainedModel, shape: BlockShape) -> DFlash:
    """An untrained head."""
    head = DFlash(shape.config(network), Verifier.of(network), shape.layout(shifted=False), PARTS, reads=shape.reads)
    torch.nn.init.normal_(head.mask_embedding, std=0.02)
    return begun(head, network)


def new_dspark(network: PreTrainedModel, shape: BlockShape) -> DSpark:
    """An untrained head, whose guesses do not depend on each other yet."""
    verifier = Verifier.of(network)
    size, rank = verifier.hidden_size, min(RANK, verifier.hidden_size)
    markov = Markov("plain", rank=rank, vocab_size=verifier.vocab_size, tokens=verifier.vocab_size, hidden_size=size)
    head = DSpark(
        shape.config(network),
        verifier,
        shape.layout(shifted=True),
        PARTS,
        reads=shape.reads,
        markov=markov,
        confidence=Confidence(size + rank),
    )
    torch.nn.init.zeros_(markov.markov_w2.weight)
    torch.nn.init.normal_(head.mask_embedding, std=0.02)
    return begun(head, network)


def _loss(network: PreTrainedModel, head: DFlash, ids: Tensor, shape: BlockShape) -> Tensor:
    """Mean nats per guess, see `guessed`, and of its confidence if the head has one."""
    with fast_products(ids.device):
        found = guessed(network, head, ids)
        if not isinstance(head, DSpark):
            return nats(head.logits(found.hidden), found.wanted, shape)
        logits, sure = head.teacher_forced(found.hidden, found.before)
        right = torch.minimum(logits.detach().float().softmax(-1), found.wanted).sum(-1)
        return nats(logits, found.wanted, shape) + F.binary_cross_entropy_with_logits(sure.float(), right)


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
        queries = by_row(query, rows)
        keys, values = (
            torch.cat([by_row(old, rows), by_row(new, rows)], 2) for old, new in zip(held[layer], (key, value), strict=True)
        )
        out = F.scaled_dot_product_attention(queries, keys.to(queries.dtype), values.to(queries.dtype), seen, enable_gqa=True)
        return out.transpose(1, 2).flatten(0, 1)[None]

    positions = (starts[..., None] + torch.arange(size, device=ids.device)).flatten()[None]
    out: Tensor = head(ids.gather(1, starts).flatten(), positions, attend).unflatten(0, (rows, number))
    return out


def write(head: DFlash, shape: BlockShape, num_layers: int, folder: Path) -> None:
    """The head's files, for a model of ``num_layers``; ids of hidden states are those of the layers whose outputs they are."""
    weights = head.state_dict()
    mask = weights.pop("mask_embedding").bfloat16()
    config = head.config.to_dict() | {
        "architectures": ["Qwen3DSparkModel" if isinstance(head, DSpark) else "DFlashDraftModel"],
        "model_type": "qwen3",
        "block_size": shape.block_size,
        "dflash_config": {"mask_token_id": shape.mask, "target_layer_ids": [layer - 1 for layer in shape.reads]},
        "layer_types": ["full_attention"] * shape.num_layers,
        "num_target_layers": num_layers,
    }
    save(weights, config, folder)
    torch.save({"mask_token_id": shape.mask, "embedding": mask}, folder / MASK)
