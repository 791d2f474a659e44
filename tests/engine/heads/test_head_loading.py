"""Heads from files, and in a cascade: what does not fit its model is refused, what was loaded wrongly is found out."""

from collections.abc import Sequence
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
from tests.heads import Made, eagle, eagle3, make, medusa
from tests.probe import probe

LAYERS = 6


pytestmark = pytest.mark.usefixtures("one_thread")


def spoiled(made: Made, problem: str) -> None:
    """A checkpoint with one mistake."""
    weights, query = made.weights, next((name for name in made.weights if "q_proj" in name), "")
    if problem == "lacks":
        del weights[next(name for name in weights if "post_attention" in name or name == "1.1.weight")]
    elif problem == "hidden size":
        key = "fc.weight" if made.kind != "medusa" else "0.1.weight"
        weights[key] = weights[key][:, :-2]
    elif problem == "vocabulary":
        weights[
            "t2d" if made.kind in ("eagle3", "dflash") else "embed_tokens.weight" if made.kind == "eagle" else "0.1.weight"
        ] = torch.zeros(VOCAB + 8, 32)
    elif problem == "tokens":
        weights["d2t"] = weights["d2t"] + 60
    elif problem == "negative tokens":
        weights["d2t"] = weights["d2t"] - 90
    elif problem == "unknown":
        weights["strange.weight"] = torch.zeros(1)
    elif problem == "hidden norm":
        del weights["hidden_norm.weight"]
    elif problem == "markov":
        del weights["markov_head.markov_w2.weight"]
    elif problem == "DFlash2":
        weights["layers.0.attention_conv.weight"] = torch.zeros(1)
    elif problem == "shape":
        weights[query] = weights[query][:-8]
    elif problem == "names":
        made.weights = {f"x.{name}": tensor for name, tensor in weights.items()}


PROBLEMS = [
    ("eagle3", "lacks", {}, "lacks the tensor layers.0.post_attention_layernorm.weight"),
    ("medusa", "lacks", {}, "lacks the tensor blocks.1.lm_head.weight"),
    ("eagle3", "hidden size", {}, "made for a hidden size of 31, and the model's is 32"),
    ("eagle", "hidden size", {}, r"fc.weight is \[32, 62\], and has to be \[32, 64\]"),
    ("medusa", "hidden size", {}, "made for a hidden size of 30"),
    ("eagle3", "", {"target_hidden_size": 64}, "made for a hidden size of 64"),
    ("eagle3", "vocabulary", {}, "made for a vocabulary of 104 tokens, and the model has 96"),
    ("eagle", "vocabulary", {}, "made for a vocabulary of 104 tokens"),
    ("medusa", "vocabulary", {}, "guesses among 104 tokens, and the model has 96"),
    ("eagle3", "tokens", {}, "by its tensor d2t it guesses tokens"),
    ("eagle3", "negative tokens", {}, "by its tensor d2t it guesses tokens -"),
    ("eagle3", "unknown", {}, "has the tensor strange.weight"),
    ("medusa", "unknown", {}, "has the tensor strange.weight"),
    ("eagle3", "shape", {}, "4 heads of 6 do not fit"),
    ("eagle", "names", {}, "none of the kinds medusa, eagle, eagle3, peagle, dflash and dspark"),
    ("peagle", "", {"ptd_token_id": None}, "config.json does not name mask_token_id"),
    ("peagle", "", {"ptd_token_id": 151669}, "its masks are token 151669, and the model has 96"),
    ("eagle3", "", {"num_attention_heads": None}, "does not name num_attention_heads"),
    (
        "eagle3",
        "",
        {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 2]}},
        "is for 3 hidden states, and its config names 2",
    ),
    ("eagle3", "", {"eagle_aux_hidden_state_layer_ids": [1, 2, 9]}, "reads hidden states 1, 2, 9, and the model has 6 layers"),
    ("eagle3", "", {"rope_scaling": {"rope_type": "warp"}}, "its config.json is wrong"),
    ("dflash", "lacks", {}, "lacks the tensor layers.0.post_attention_layernorm.weight"),
    ("dflash", "hidden norm", {}, "lacks the tensor hidden_norm.weight"),
    ("dflash", "hidden size", {}, "fc.weight takes 94 numbers, and its config names 3 hidden states"),
    ("dflash", "DFlash2", {}, "has the tensor layers.0.attention_conv.weight, which a drafter of this kind does not have"),
    ("dflash", "", {"vocab_size": 104}, "made for a vocabulary of 104 tokens, and the model has 96"),
    ("dflash", "", {"num_target_layers": 36}, "made for a model of 36 layers, and the model has 6"),
    ("dflash", "", {"block_size": None}, "config.json does not name block_size"),
    ("dflash", "", {"block_size": 64}, "its block_size is 64: it must be 2 to 32"),
    ("dflash", "", {"dflash_config": {}}, "config.json does not name mask_token_id"),
    ("dflash", "", {"dflash_config": {"mask_token_id": 151669}}, "its masks are token 151669, and the model has 96"),
    (
        "dflash",
        "",
        {"dflash_config": {"mask_token_id": 9, "target_layer_ids": [1, 2, 6]}},
        "reads hidden states 2, 3, 7, and the model has 6 layers",
    ),
    ("dflash-sliding", "", {"sliding_window": None}, "config.json does not name the sliding_window"),
    ("dflash-sliding", "", {"layer_types": ["sliding_attention"]}, "its layer_types are 1, and it has 2 layers"),
    ("dflash-speculators", "vocabulary", {}, "made for a vocabulary of 104 tokens, and the model has 96"),
    ("dflash-speculators", "tokens", {}, "by its tensor d2t it guesses tokens"),
    ("dspark", "markov", {}, "lacks the tensor markov_head.markov_w2.weight"),
    ("dspark", "shape", {}, "4 heads of 8 do not fit"),
]


@pytest.mark.parametrize(("style", "problem", "config", "words"), PROBLEMS)
def test_heads_that_do_not_fit_are_refused(
    tmp_path: Path, style: str, problem: str, config: dict[str, Any], words: str
) -> None:
    """Guards against a drafter of another model that loads without a word and guesses nonsense, or writes outside."""
    made = make(style, tmp_path)
    spoiled(made, problem)
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


def test_a_head_that_knows_nothing_is_served(tmp_path: Path) -> None:
    """Guards heads that nobody has trained."""
    network = build("llama", num_hidden_layers=LAYERS)
    model = Model(network, num_threads=1, head=load_head(make("eagle3", tmp_path).write(), network))
    assert probe(model) < 0.5


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


@pytest.mark.parametrize("name", SHAPED)
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
