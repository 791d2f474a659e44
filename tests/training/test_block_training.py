"""DFlash and DSpark heads that are trained here: they are written as published ones are, and know more than before."""

import math
from pathlib import Path

import pytest
import torch
from torch import Tensor

from cascade.engine.heads.dflash import DFlash
from cascade.engine.heads.dspark import DSpark
from cascade.engine.heads.loading import load_head
from cascade.engine.model import Model
from cascade.params import SamplingParams
from cascade.scorer import Row, gap_byte
from cascade.training.block import BlockShape, blocks, guessed, train_blocks
from cascade.training.fitting import Schedule
from tests.architectures import VOCAB, build

GREEDY = SamplingParams(temperature=0.0, seed=0)
SHAPE = BlockShape(num_layers=1, num_heads=4, num_kv_heads=2, intermediate_size=48, reads=(1, 2, 4), block_size=4, mask=95)
NUM_LAYERS = 4


pytestmark = pytest.mark.usefixtures("one_thread")


def batch(step: int) -> Tensor:
    return torch.randint(0, VOCAB, (4, 24), generator=torch.Generator().manual_seed(step))


@pytest.mark.parametrize("kind", ["dflash", "dspark"])
def test_a_trained_head_says_what_it_was_trained_to_say(tmp_path: Path, kind: str) -> None:
    """Guards training against another formula than that of serving, and the files: it trains what a pass asks for."""
    network = build("llama", num_hidden_layers=NUM_LAYERS)
    losses = []
    for steps in (1, 12):
        schedule = Schedule(steps, warmup_steps=1, muon_lr=0.05, adam_lr=0.01)
        losses.append(train_blocks(network, lambda step: batch(0), SHAPE, schedule, tmp_path / str(steps), kind))
    assert losses[1] < losses[0]
    served = build("llama", num_hidden_layers=NUM_LAYERS)
    model = Model(served, num_threads=1, head=load_head(str(tmp_path / "12"), served))
    assert model.drafter == kind
    store, text = model.new_cache(), batch(99)[0].tolist()
    [scored] = model.run([Row(store, 0, text, 1, GREEDY, guesses=3)])
    ids = torch.tensor([[*text, *scored.own]])
    with torch.no_grad():
        hidden = network(ids, output_hidden_states=True, use_cache=False).hidden_states
        plain = load_head(str(tmp_path / "12"), network)
        assert isinstance(plain, DFlash)
        out = blocks(plain, hidden, ids, torch.tensor([[5, len(text)]]))[0, 1:]
        trunk = scored.draft.trunk  # type: ignore[union-attr]
        logits = plain.logits(out)
        if isinstance(plain, DSpark):
            before = torch.tensor([[scored.own[0], *trunk.tokens, *[0] * (out.shape[1] - 1 - len(trunk.tokens))]])
            logits, odds = plain.teacher_forced(out, before)
            chances = odds[0].sigmoid().tolist()[: len(trunk.tokens)]
            assert list(trunk.confidences) == [gap_byte(-math.log(1 - chance)) for chance in chances]
        assert logits[0].argmax(-1).tolist()[: len(trunk.tokens)] == list(trunk.tokens)
        assert len(trunk.tokens) == 3


def test_confidence_learns_what_is_accepted(tmp_path: Path) -> None:
    """Guards a confidence that learns nothing, or something else than the share of guesses that is accepted."""
    network = build("llama", num_hidden_layers=NUM_LAYERS)
    missed = []
    for steps in (1, 60):
        schedule = Schedule(steps, warmup_steps=1, muon_lr=0.02, adam_lr=0.02)
        train_blocks(network, lambda step: batch(step % 3), SHAPE, schedule, tmp_path / str(steps), "dspark")
        head = load_head(str(tmp_path / str(steps)), network)
        assert isinstance(head, DSpark)
        with torch.no_grad():
            found = guessed(network, head, batch(0))
            logits, odds = head.teacher_forced(found.hidden, found.before)
            right = torch.minimum(logits.float().softmax(-1), found.wanted).sum(-1)
        missed.append(float((odds.sigmoid() - right).abs().mean()))
    assert missed[1] < 0.1
    assert missed[1] < 0.8 * missed[0]
