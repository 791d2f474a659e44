"""Heads that are trained here: they are written as published ones are, and know more than before."""

from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from cascade.drafters import DrafterSpec
from cascade.engine.heads.loading import load_head
from cascade.engine.model import Model
from cascade.errors import ConfigError
from cascade.params import SamplingParams
from cascade.scorer import Row
from cascade.training.eagle import Batch, Schedule, fit, new_head, unroll
from tests.architectures import VOCAB, build

GREEDY = SamplingParams(temperature=0.0, seed=0)
TOKENS = range(0, VOCAB, 2)  # that heads know

pytestmark = pytest.mark.usefixtures("one_thread")


def batch(step: int) -> Tensor:
    return torch.randint(0, VOCAB, (4, 24), generator=torch.Generator().manual_seed(step))


def run(network: PreTrainedModel, batch: Batch, steps: int, folder: Path) -> float:
    return fit(network, new_head(network, TOKENS), batch, Schedule(steps, unrolled=2, save_every=3), folder)


def test_training_goes_on_where_it_was_stopped(tmp_path: Path) -> None:
    """Guards resumption: a run in two parts ends with the weights of one in a single part."""
    network, file = build("llama", num_hidden_layers=4), "model.safetensors"

    def stopping(step: int) -> Tensor:
        if step == 3:
            raise KeyboardInterrupt
        return batch(step)

    run(network, batch, 6, tmp_path / "one")
    with pytest.raises(KeyboardInterrupt):
        run(network, stopping, 6, tmp_path / "two")
    assert not (tmp_path / "two" / file).exists()
    run(network, batch, 6, tmp_path / "two")
    one, two = ((tmp_path / folder / file).read_bytes() for folder in ("one", "two"))
    assert one == two


def test_trainings_of_other_drafters_are_not_gone_on_with(tmp_path: Path) -> None:
    """Guards folders that are used again: weights of another shape were an error of a library."""
    network = build("llama", num_hidden_layers=4)
    run(network, batch, 1, tmp_path)
    other = new_head(network, TOKENS[1:])
    with pytest.raises(ConfigError, match="is the training of another drafter: choose another folder"):
        fit(network, other, batch, Schedule(1, unrolled=2), tmp_path)


def test_a_trained_head_says_what_it_was_trained_to_say(tmp_path: Path) -> None:
    """Guards training against another formula than that of serving, and the files: it trains what a pass asks for."""
    network = build("llama", num_hidden_layers=4)
    losses = []
    for steps in (1, 12):
        schedule = Schedule(steps, unrolled=2, warmup_steps=1, muon_lr=0.05, adam_lr=0.01)
        losses.append(fit(network, new_head(network, TOKENS), lambda step: batch(0), schedule, tmp_path / str(steps)))
    assert losses[1] < losses[0]
    source = str(tmp_path / "12")
    served = build("llama", num_hidden_layers=4)
    model = Model(served, num_threads=1, head=load_head(DrafterSpec("head", source), served))
    assert model.drafter == "eagle3"
    store, text = model.new_cache(), batch(99)[0].tolist()
    [scored] = model.run([Row(store, 0, text, 1, GREEDY, guesses=4)])
    ids = torch.tensor([[*text, *scored.own, *scored.draft.trunk.tokens]])
    with torch.no_grad():
        hidden = network(ids, output_hidden_states=True, use_cache=False).hidden_states
        plain = load_head(DrafterSpec("head", source), network)
        for step, logits in enumerate(unroll(plain, hidden, ids[:, :-1], 4)):
            assert plain.known[int(logits[-1].argmax())] == scored.draft.tokens[step]
