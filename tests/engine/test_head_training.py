"""Heads that are trained here: they are written as published ones are, and know more than before."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from cascade.engine.heads.loading import load_head
from cascade.engine.heads.training import Schedule, Shape, train_eagle3, unroll
from cascade.engine.model import Model
from cascade.params import SamplingParams
from cascade.scorer import Row
from tests.architectures import VOCAB, build

GREEDY = SamplingParams(temperature=0.0, seed=0)
SHAPE = Shape(num_heads=4, num_kv_heads=2, intermediate_size=48, reads=(1, 2, 4), tokens=tuple(range(0, VOCAB, 2)))


pytestmark = pytest.mark.usefixtures("one_thread")


def batch(step: int) -> Tensor:
    return torch.randint(0, VOCAB, (4, 24), generator=torch.Generator().manual_seed(step))


def test_training_goes_on_where_it_was_stopped(tmp_path: Path) -> None:
    """Guards resumption: a run in two parts ends with the weights of one in a single part."""
    network = build("llama", num_hidden_layers=4)
    for folder, parts in (("one", (6,)), ("two", (6, 6))):
        for part, _ in enumerate(parts):
            stop = len(parts) > 1 and not part

            def until(step: int, stop: bool = stop) -> Tensor:
                if stop and step == 3:
                    raise KeyboardInterrupt
                return batch(step)

            try:
                train_eagle3(network, until, SHAPE, Schedule(6, unrolled=2, save_every=3), tmp_path / folder)
            except KeyboardInterrupt:
                assert not (tmp_path / folder / "model.safetensors").exists()
    one, two = ((tmp_path / folder / "model.safetensors").read_bytes() for folder in ("one", "two"))
    assert one == two


def test_a_trained_head_says_what_it_was_trained_to_say(tmp_path: Path) -> None:
    """Guards training against another formula than that of serving, and the files: it trains what a pass asks for."""
    network = build("llama", num_hidden_layers=4)
    losses = []
    for steps in (1, 12):
        schedule = Schedule(steps, unrolled=2, warmup_steps=1, muon_lr=0.05, adam_lr=0.01)
        losses.append(train_eagle3(network, lambda step: batch(0), SHAPE, schedule, tmp_path / str(steps)))
    assert losses[1] < losses[0]
    source = str(tmp_path / "12")
    served = build("llama", num_hidden_layers=4)
    model = Model(served, num_threads=1, head=load_head(source, served))
    assert model.drafter == "eagle3"
    store, text = model.new_cache(), batch(99)[0].tolist()
    [scored] = model.run([Row(store, 0, text, 1, GREEDY, guesses=4)])
    ids = torch.tensor([[*text, *scored.own, *scored.draft.trunk.tokens]])
    with torch.no_grad():
        hidden = network(ids, output_hidden_states=True, use_cache=False).hidden_states
        plain = load_head(source, network)
        for step, logits in enumerate(unroll(plain, hidden, ids[:, :-1], 4)):
            assert plain.known[int(logits[-1].argmax())] == scored.draft.tokens[step]
