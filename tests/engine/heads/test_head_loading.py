"""Heads from files, and in a cascade: what does not fit its model is refused, what was loaded wrongly is found out."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from cascade import Cascade, ModelError, SamplingParams, Speculation, Structured
from cascade.drafters import DrafterSpec
from cascade.engine.heads.loading import load_head
from cascade.engine.model import Model
from cascade.engine.tokenizer import Tokenizer
from cascade.planner.cost import Profile
from cascade.scorer import Row, Scored
from tests import small
from tests.architectures import VOCAB, build
from tests.cases import rare
from tests.heads import KNOWN, Made, eagle, eagle3, make

LAYERS = 6

pytestmark = pytest.mark.usefixtures("one_thread")


LAYER_IDS = "eagle_aux_hidden_state_layer_ids"
POST_NORM, QUERIES = "midlayer.post_attention_layernorm.weight", "midlayer.self_attn.q_proj.weight"
PROBLEMS: list[tuple[str, dict[str, Tensor | None], dict[str, Any], str]] = [  # tensors and configuration that are changed
    ("eagle3", {POST_NORM: None}, {}, "lacks the tensor layers.0.post_attention_layernorm.weight"),
    ("eagle3", {"fc.weight": torch.zeros(32, 94)}, {}, "made for a hidden size of 31, and the model's is 32"),
    ("eagle", {"fc.weight": torch.zeros(32, 62)}, {}, r"fc.weight is \[32, 62\], and has to be \[32, 64\]"),
    ("eagle3", {}, {"target_hidden_size": 64}, "made for a hidden size of 64"),
    ("eagle3", {"t2d": torch.zeros(VOCAB + 8)}, {}, "made for a vocabulary of 104 tokens, and the model has 96"),
    ("eagle3", {"d2t": torch.full((KNOWN,), 60)}, {}, "by its tensor d2t it guesses tokens 60 to 99, and the model has 96"),
    ("eagle", {"hidden_norm.weight": torch.zeros(32)}, {}, "has the tensor hidden_norm.weight"),  # DFlash
    ("eagle3", {QUERIES: torch.zeros(24, 64)}, {}, "4 heads of 6 do not fit"),
    ("eagle", {"fc.weight": None}, {}, "neither of the kinds eagle and eagle3"),
    ("eagle3", {}, {"num_attention_heads": None}, "does not name num_attention_heads"),
    ("eagle3", {}, {"eagle_config": {LAYER_IDS: [1, 2]}}, "is for 3 hidden states, and its config names 2"),
    ("eagle3", {}, {LAYER_IDS: [1, 2, 9]}, "reads hidden states 1, 2, 9, and the model has 6 layers"),
    ("eagle3", {}, {"rope_scaling": {"rope_type": "warp"}}, "its config.json is wrong"),
]


@pytest.mark.parametrize(("style", "tensors", "config", "words"), PROBLEMS)
def test_heads_that_do_not_fit_are_refused(
    tmp_path: Path, style: str, tensors: dict[str, Tensor | None], config: dict[str, Any], words: str
) -> None:
    """Guards against a drafter of another model that loads without a word and guesses nonsense, or writes outside."""
    made = make(style, tmp_path)
    made.weights = {name: tensor for name, tensor in (made.weights | tensors).items() if tensor is not None}
    source = made.write("pytorch_model.bin", **config)
    with pytest.raises(ModelError, match=words) as caught:
        load_head(DrafterSpec("head", source), build("llama", num_hidden_layers=LAYERS))
    assert "\n" not in str(caught.value)
    assert source in str(caught.value)


def test_other_mistakes_are_named(tmp_path: Path) -> None:
    """Guards the messages for what is no drafter at all: no path, no files, files that are damaged, another kind."""
    (tmp_path / "empty").mkdir()
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "pytorch_model.bin").write_bytes(b"garbage")
    for where, kind, words in (
        (str(tmp_path / "nowhere"), "head", "There is no folder"),
        (str(tmp_path / "empty"), "head", "has none of the files"),
        (str(tmp_path / "broken"), "head", "No drafter can be loaded"),
        (eagle(tmp_path / "eagle").write(), "eagle3", "is 'eagle3', and its tensors are those of the kind 'eagle'"),
        (eagle3(tmp_path / "deep").write(), "head", "hidden states 2, 0, -2, and the model has 1 layers"),
    ):
        with pytest.raises(ModelError, match=words) as caught:
            load_head(DrafterSpec(kind, where), build("llama", num_hidden_layers=1))
        assert "\n" not in str(caught.value)


# in a cascade


class Guessing(Model):
    """A model whose rows all want guesses."""

    def run(self, rows: Sequence[Row]) -> list[Scored]:
        return super().run([replace(row, guesses=4) for row in rows])


def constant(made: Made) -> Any:
    """A model that always says one token, and a head that copies it."""
    network = build("llama", vocab_size=4096, tie_word_embeddings=False)
    with torch.no_grad():
        network.get_input_embeddings().weight[:] = network.get_input_embeddings().weight[0].clone()
        for layer in network.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
    w = made.weights
    del w["embed_tokens.weight"]
    w["fc.weight"], w["fc.bias"] = torch.eye(32, 64).roll(32, 1), torch.zeros(32)  # the hidden state, whatever the token
    for part in ("self_attn.o_proj", "mlp.down_proj"):
        w[f"layers.0.{part}.weight"].zero_()
    return network


SHAPED: dict[str, dict[str, Any]] = {  # by what was written before, guesses included
    "greedy": {"temperature": 0.0},
    "sampled": {},
    "penalties": {"presence_penalty": 1.0, "frequency_penalty": 0.5, "repetition_penalty": 1.3, "logit_bias": {9: 4.0}},
    "grammar": {"structured": Structured(regex="([a-f] [0-9]{2}){60}"), "ignore_eos": False},
    "late end": {"min_tokens": 30, "logit_bias": {0: 30.0}, "ignore_eos": False},
}


@pytest.mark.parametrize("name", ["sampled", "penalties", "grammar", rare("greedy"), rare("late end")])
def test_guesses_are_accepted_by_sessions(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards the way of guesses from the pass into the next one: a head that says what its model says saves passes, at any
    temperature and with any parameters, for both have the same noise; and the text is the same."""
    monkeypatch.setattr(Profile, "turn", lambda *_, **__: 1.0)  # all guesses pay, whatever else the machine does
    made = eagle(tmp_path)
    network = constant(made)
    source, tokenizer = made.write(vocab_size=4096), Tokenizer.from_pretrained(small.paths()[-1])
    params = SamplingParams(**{"max_tokens": 40, "temperature": 0.8, "seed": 3, "ignore_eos": True} | SHAPED[name])
    with Cascade([Model(constant(eagle(tmp_path)), num_threads=1)], tokenizer) as alone:
        expected = alone.generate([5, 6, 7], params)
    model = Guessing(network, num_threads=1, head=load_head(DrafterSpec("head", source), network))
    with Cascade([model], tokenizer) as cascade:
        completion = cascade.generate([5, 6, 7], params, Speculation(tiers=("eagle",)))
        passes = cascade.tiers[0].stats.passes
    assert completion.token_ids == expected.token_ids
    assert passes <= len(completion.token_ids) / 2, "four tokens a pass, where all guesses pay"
    [edge] = [edge for edge in completion.stats.edges if edge.drafter]
    assert edge.accepted_by_rank[0] == edge.proposed_by_rank[0] > 0, "all that the head says is right"
