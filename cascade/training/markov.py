"""Trains a DSpark head for a model: a DFlash whose guesses follow upon each other, and that learns how sure it may be.

Each guess is made after the text's own token, as it will be after a right guess:

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

from cascade.engine.heads.dspark import Confidence, DSpark, Markov
from cascade.engine.heads.head import Verifier
from cascade.training.block import PARTS, BlockShape, config_of, guessed, nats, prepared, write
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
    verifier = Verifier.of(network)
    size, rank = verifier.hidden_size, min(RANK, verifier.hidden_size)
    markov = Markov("plain", rank=rank, vocab_size=verifier.vocab_size, tokens=verifier.vocab_size, hidden_size=size)
    head = DSpark(
        config_of(network, shape),
        verifier,
        shape.layout(shifted=True),
        PARTS,
        reads=shape.reads,
        markov=markov,
        confidence=Confidence(size + rank),
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
