"""Heads from files, and in a cascade: what does not fit its model is refused, what was loaded wrongly is found out."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from cascade import Cascade, ModelError, SamplingParams, Speculation, Structured
from cascade.engine.heads.loading import load_head
from cascade.engine.model import Model
from cascade.engine.tokenizer import Tokenizer
from cascade.planner.cost import Profile
from cascade.scorer import Row, Scored
from tests import small
from tests.architectures import VOCAB, build
from tests.block_heads import Weights
from tests.cases import rare
from tests.heads import Made, eagle, eagle3, make, medusa
from tests.probe import probe

LAYERS = 6

pytestmark = pytest.mark.usefixtures("one_thread")


def without(part: str) -> Callable[[Weights], object]:
    return lambda weights: weights.pop(next(name for name in weights if part in name))


def narrower(name: str) -> Callable[[Weights], None]:
    return lambda weights: weights.update({name: weights[name][:, :-2]})


def shifted(by: int) -> Callable[[Weights], None]:
    return lambda weights: weights.update(d2t=weights["d2t"] + by)


def having(name: str, rows: int) -> Callable[[Weights], None]:
    return lambda weights: weights.update({name: torch.zeros(rows, 32)})


def fewer_queries(weights: Weights) -> None:
    weights["midlayer.self_attn.q_proj.weight"] = weights["midlayer.self_attn.q_proj.weight"][:-8]


def renamed(weights: Weights) -> None:
    for name in [*weights]:
        weights[f"x.{name}"] = weights.pop(name)


def nothing(weights: Weights) -> None:
    """Only the configuration is wrong."""


LAYER_IDS = "eagle_aux_hidden_state_layer_ids"
PROBLEMS: list[tuple[str, Callable[[Weights], object], dict[str, Any], str]] = [
    ("eagle3", without("post_attention"), {}, "lacks the tensor layers.0.post_attention_layernorm.weight"),
    ("medusa", without("1.1.weight"), {}, "lacks the tensor blocks.1.lm_head.weight"),
    ("eagle3", narrower("fc.weight"), {}, "made for a hidden size of 31, and the model's is 32"),
    ("eagle", narrower("fc.weight"), {}, r"fc.weight is \[32, 62\], and has to be \[32, 64\]"),
    ("eagle3", nothing, {"target_hidden_size": 64}, "made for a hidden size of 64"),
    ("eagle3", having("t2d", VOCAB + 8), {}, "made for a vocabulary of 104 tokens, and the model has 96"),
    ("medusa", having("0.1.weight", VOCAB + 8), {}, "guesses among 104 tokens, and the model has 96"),
    ("eagle3", shifted(60), {}, "by its tensor d2t it guesses tokens"),
    ("eagle3", shifted(-90), {}, "by its tensor d2t it guesses tokens -"),
    ("eagle3", having("strange.weight", 1), {}, "has the tensor strange.weight"),
    ("eagle3", fewer_queries, {}, "4 heads of 6 do not fit"),
    ("eagle", renamed, {}, "none of the kinds medusa, eagle, eagle3, peagle, dflash and dspark"),
    ("peagle", nothing, {"ptd_token_id": None}, "config.json does not name mask_token_id"),
    ("peagle", nothing, {"ptd_token_id": 151669}, "its masks are token 151669, and the model has 96"),
    ("eagle3", nothing, {"num_attention_heads": None}, "does not name num_attention_heads"),
    ("eagle3", nothing, {"eagle_config": {LAYER_IDS: [1, 2]}}, "is for 3 hidden states, and its config names 2"),
    ("eagle3", nothing, {LAYER_IDS: [1, 2, 9]}, "reads hidden states 1, 2, 9, and the model has 6 layers"),
    ("eagle3", nothing, {"rope_scaling": {"rope_type": "warp"}}, "its config.json is wrong"),
    ("dflash", narrower("fc.weight"), {}, "fc.weight takes 94 numbers, and its config names 3 hidden states"),
    ("dflash", nothing, {"vocab_size": 104}, "made for a vocabulary of 104 tokens, and the model has 96"),
    ("dflash", nothing, {"num_target_layers": 36}, "made for a model of 36 layers, and the model has 6"),
    ("dflash", nothing, {"block_size": None}, "config.json does not name block_size"),
    ("dflash", nothing, {"block_size": 64}, "its block_size is 64: it must be 2 to 32"),
    ("dflash-sliding", nothing, {"sliding_window": None}, "config.json does not name the sliding_window"),
    ("dflash-sliding", nothing, {"layer_types": ["sliding_attention"]}, "its layer_types are 1, and it has 2 layers"),
]


@pytest.mark.parametrize(("style", "spoil", "config", "words"), PROBLEMS)
def test_heads_that_do_not_fit_are_refused(
    tmp_path: Path, style: str, spoil: Callable[[Weights], object], config: dict[str, Any], words: str
) -> None:
    """Guards against a drafter of another model that loads without a word and guesses nonsense, or writes outside."""
    made = make(style, tmp_path)
    spoil(made.weights)
    source = made.write("medusa_lm_head.safetensors" if style == "medusa" else "pytorch_model.bin", **config)
    with pytest.raises(ModelError, match=words) as caught:
        load_head(source, build("llama", num_hidden_layers=LAYERS))
    assert "\n" not in str(caught.value)
    assert source in str(caught.value)


def test_other_mistakes_are_named(tmp_path: Path) -> None:
    """Guards the messages for what is no drafter at all: no path, no files, files that are damaged, another kind."""
    network = build("llama", num_hidden_layers=LAYERS)
    (tmp_path / "empty").mkdir()
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "pytorch_model.bin").write_bytes(b"garbage")
    source = eagle(tmp_path / "eagle").write()
    for where, kind, words in (
        (str(tmp_path / "nowhere"), "auto", "There is no folder"),
        (str(tmp_path / "empty"), "auto", "has none of the files"),
        (str(tmp_path / "broken"), "auto", "No drafter can be loaded"),
        (source, "eagle3", "drafter_kind is 'eagle3', and its tensors are those of the kind 'eagle'"),
        (source, "hydra", "drafter_kind is 'hydra': it must be one of auto, medusa, eagle, eagle3, peagle, dflash, dspark"),
    ):
        with pytest.raises(ModelError, match=words) as caught:
            load_head(where, network, kind=kind)
        assert "\n" not in str(caught.value)
    shallow = build("llama", num_hidden_layers=1)
    with pytest.raises(ModelError, match="hidden states 2, 0, -2, and the model has 1 layers"):
        load_head(eagle3(tmp_path / "deep").write(), shallow)


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
    for block in range(3):
        made.weights[f"{block}.1.weight"] = network.get_output_embeddings().weight.data.clone()
        made.weights[f"{block}.0.linear.weight"] = torch.zeros(32, 32)
        made.weights[f"{block}.0.linear.bias"] = torch.zeros(32)
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
    made = medusa(tmp_path)
    network = constant(made)
    source, tokenizer = made.write(), Tokenizer.from_pretrained(small.paths()[-1])
    params = SamplingParams(**{"max_tokens": 40, "temperature": 0.8, "seed": 3, "ignore_eos": True} | SHAPED[name])
    with Cascade([Model(constant(made), num_threads=1)], tokenizer) as alone:
        expected = alone.generate([5, 6, 7], params)
    model = Guessing(network, num_threads=1, head=load_head(source, network))
    assert probe(model) == 1.0
    with Cascade([model], tokenizer) as cascade:
        completion = cascade.generate([5, 6, 7], params, Speculation(tiers=("medusa",)))
        passes = cascade.tiers[0].snapshot().passes
    assert completion.token_ids == expected.token_ids
    assert passes <= len(completion.token_ids) / 2, "four tokens a pass, where all guesses pay"
    [edge] = [edge for edge in completion.stats.edges if edge.drafter]
    assert edge.accepted_by_rank[0] == edge.proposed_by_rank[0] > 0, "all that the head says is right"
