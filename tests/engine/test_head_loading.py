"""Heads from files: what does not fit its model is refused in one sentence, and what was loaded wrongly is found out."""

from pathlib import Path
from typing import Any

import pytest
import torch

from cascade import ModelError
from cascade.engine.heads import probe as probing
from cascade.engine.heads.loading import load_head
from cascade.engine.heads.probe import probe
from cascade.engine.model import Model
from cascade.engine.parallel import LeadingModel, check_ranks
from tests.architectures import VOCAB, build
from tests.heads import Made, eagle, eagle3, make, medusa

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
        weights["t2d" if made.kind == "eagle3" else "embed_tokens.weight" if made.kind == "eagle" else "0.1.weight"] = (
            torch.zeros(VOCAB + 8, 32)
        )
    elif problem == "tokens":
        weights["d2t"] = weights["d2t"] + 60
    elif problem == "negative tokens":
        weights["d2t"] = weights["d2t"] - 90
    elif problem == "unknown":
        weights["mask_hidden" if made.kind != "medusa" else "strange.weight"] = torch.zeros(1)
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
    ("eagle3", "unknown", {}, "none of the kinds medusa, eagle and eagle3"),
    ("medusa", "unknown", {}, "has the tensor strange.weight"),
    ("eagle3", "shape", {}, "4 heads of 6 do not fit"),
    ("eagle", "names", {}, "none of the kinds"),
    ("eagle3", "", {"num_attention_heads": None}, "does not name num_attention_heads"),
    (
        "eagle3",
        "",
        {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 2]}},
        "is for 3 hidden states, and its config names 2",
    ),
    ("eagle3", "", {"eagle_aux_hidden_state_layer_ids": [1, 2, 9]}, "reads hidden states 1, 2, 9, and the model has 6 layers"),
    ("eagle3", "", {"rope_scaling": {"rope_type": "warp"}}, "its config.json is wrong"),
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
        (source, "hydra", "drafter_kind is 'hydra': it must be one of auto, medusa, eagle, eagle3"),
    ):
        with pytest.raises(ModelError, match=words) as caught:
            load_head(where, network, kind=kind)
        assert "\n" not in str(caught.value)
    shallow = build("llama", num_hidden_layers=1)
    with pytest.raises(ModelError, match="hidden states 2, 0, -2, and the model has 1 layers"):
        load_head(eagle3(tmp_path / "deep").write(), shallow)


def test_ranks_refuse_heads(tmp_path: Path) -> None:
    """Guards models that several processes share, whose followers know no heads."""
    source = medusa(tmp_path).write()
    network = build("llama", num_hidden_layers=LAYERS)
    with pytest.raises(ModelError, match="take one rank"):
        LeadingModel(network, head=load_head(source, network))
    with pytest.raises(ModelError, match="take one rank"):
        check_ranks("anything", 2, drafter=source)


@pytest.mark.parametrize("better", [0.9, 0.1])
def test_the_probe_refuses_on_proof_alone(tmp_path: Path, better: float, monkeypatch: pytest.MonkeyPatch, caplog: Any) -> None:
    """Guards both ways: layers that are counted otherwise are found out, and a head that knows nothing yet is served."""
    network = build("llama", num_hidden_layers=LAYERS)
    model = Model(network, num_threads=1, head=load_head(eagle3(tmp_path).write(), network))
    assert model.reader is not None
    reads = model.reader.head.reads
    shifted = tuple(layer + 1 for layer in reads)
    monkeypatch.setattr(probing, "_agreement", lambda model, text: better if model.reader.head.reads == shifted else 0.01)
    if better < 0.5:
        assert probe(model, "it") == 0.01
        assert "1 % of the guesses of the drafter it are right" in caplog.text
    else:
        with pytest.raises(ModelError, match=r"reads the hidden states 2, 3, 3, .* of 3, 4, 4 it would be 90%"):
            probe(model, "it")
    assert model.reader.head.reads == reads
