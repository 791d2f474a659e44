"""Trains a DSpark head for a model: a DFlash whose guesses follow upon each other, and that learns how sure it may be.

Each guess is made behind the text's own token, as it will be behind a right guess:

    loss = DFlash's, of logits_k + W2 W1[x_{k-1}]
         + binary cross entropy of the confidence against sum_x min(p(x), q(x))

p is the model's distribution and q the head's, so the sum is the chance that the ratio rule accepts a guess. What confidence
learns changes no guess. Cheng et al., "DSpark", arXiv 2607.05147.
"""

from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedModel

from cascade.engine.heads.eagle import Shared
from cascade.engine.heads.markov import Confidence, DSpark, Markov
from cascade.training.block import BlockShape, config_of, guessed, nats, options_of, prepared, write
from cascade.training.fitting import Batch, Schedule, fit

RANK = 64  # numbers between a token and what it adds to logits, unless the model has fewer


def train_dspark(network: PreTrainedModel, batch: Batch, shape: BlockShape, schedule: Schedule, folder: Path) -> float:
    """As `cascade.training.block.train_dflash`; the loss is that of guesses and confidence together."""
    torch.manual_seed(0)
    head = new_dspark(network, shape)
    mean = fit(head, lambda ids: _loss(network, head, ids, shape), batch, schedule, folder)
    said = {"architectures": ["Qwen3DSparkModel"]}
    write(head, shape, network.config.get_text_config().num_hidden_layers, folder, said=said)
    return mean


def new_dspark(network: PreTrainedModel, shape: BlockShape) -> DSpark:
    """An untrained head, whose guesses do not depend on each other yet."""
    size, vocab_size = network.config.get_text_config().hidden_size, len(network.get_input_embeddings().weight)
    rank = min(RANK, size)
    markov = Markov("plain", rank=rank, vocab_size=vocab_size, tokens=vocab_size, hidden_size=size)
    shared = Shared(network.get_input_embeddings(), network.get_output_embeddings())
    head = DSpark(
        config_of(network, shape),
        shared,
        shape.layout(shifted=True),
        markov=markov,
        confidence=Confidence(size + rank),
        **options_of(network, shape),
    )
    torch.nn.init.zeros_(markov.markov_w2.weight)
    return prepared(head, network)


def _loss(network: PreTrainedModel, head: DSpark, ids: Tensor, shape: BlockShape) -> Tensor:
    """Mean nats per guess, and of its confidence."""
    with torch.autocast(ids.device.type, torch.bfloat16):
        found = guessed(network, head, ids)
        logits, sure = head.behind(found.hidden, found.before)
        right = torch.minimum(logits.detach().float().softmax(-1), found.wanted).sum(-1)
        return nats(logits, found.wanted, shape) + F.binary_cross_entropy_with_logits(sure.float(), right)
