"""Trains Medusa heads for a model, and writes them as such heads are published.

The model stays as it is ("Medusa-1"): the k-th head reads its last hidden state of a token, and is to say the token k + 1
after it.

    loss = sum_k decay^k * cross entropy of head k against the text

Heads begin as the model's own output embedding. Cai et al., arXiv 2401.10774.
"""

from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from cascade.engine.heads.checkpoint import MEDUSA_FILES
from cascade.engine.heads.head import Verifier
from cascade.engine.heads.medusa import Block, Medusa
from cascade.engine.heads.reader import decoder
from cascade.training.fitting import Batch, Schedule, decayed, fit, save
from cascade.training.learning import fast_products

LAYERS = 1  # of each head, before its output embedding


def train_medusa(network: PreTrainedModel, batch: Batch, num_heads: int, schedule: Schedule, folder: Path) -> float:
    """Train ``num_heads`` for ``network`` and write them to ``folder``; see `fit`.

    Rows must have more than ``num_heads + 1`` tokens.
    """
    torch.manual_seed(0)
    head = new_heads(network, num_heads)
    mean = fit(head, lambda ids: _loss(network, head, ids, schedule), batch, schedule, folder)
    write(head, folder, network.name_or_path)
    return mean


def new_heads(network: PreTrainedModel, num_heads: int) -> Medusa:
    """Untrained ones, which say what the model says."""
    verifier, lm_head = Verifier.of(network), network.get_output_embeddings()
    size, vocab_size = verifier.hidden_size, len(lm_head.weight)
    blocks = []
    for _ in range(num_heads):
        block = Block([nn.Linear(size, size) for _ in range(LAYERS)], nn.Linear(size, vocab_size, bias=False))
        with torch.no_grad():
            block.lm_head.weight.copy_(lm_head.weight)
            for layer in block.layers:
                for parameter in layer.parameters():
                    parameter.zero_()
        blocks.append(block)
    return Medusa(blocks, verifier).to(network.device)


def _loss(network: PreTrainedModel, head: Medusa, ids: Tensor, schedule: Schedule) -> Tensor:
    """Mean nats per guess over ``ids`` ``[rows, n]``, those further ahead counting less."""
    model: Any = decoder(network)[0]
    n = ids.shape[1] - 1 - len(head.blocks)
    with fast_products(ids.device):
        with torch.no_grad():
            states = model(input_ids=ids, use_cache=False)[0][:, :n].flatten(0, 1)
        losses = (  # the next token is the model's own
            F.cross_entropy(block(states).float(), ids[:, place + 2 : place + 2 + n].flatten())
            for place, block in enumerate(head.blocks)
        )
        return decayed(losses, schedule.decay)


def write(head: Medusa, folder: Path, base: str) -> None:
    """The heads' files, under their authors' names."""
    weights = {}
    for name, tensor in head.state_dict().items():
        _, block, part, *rest = name.split(".")
        published = f"{block}.{LAYERS}.weight" if part == "lm_head" else f"{block}.{rest[0]}.linear.{rest[1]}"
        weights[published] = tensor
    config = {
        "architectures": ["MedusaModel"],
        "model_type": "medusa",
        "base_model_name_or_path": base,
        "hidden_size": head.width,
        "vocab_size": head.vocab_size,
        "medusa_num_heads": len(head.blocks),
        "medusa_num_layers": LAYERS,
    }
    save(weights, config, folder, MEDUSA_FILES[0])
