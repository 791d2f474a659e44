"""Draft models that say a part of their tokens only."""

import json
import shutil
from pathlib import Path

import pytest
import torch

from cascade import Cascade, SamplingParams, Speculation
from cascade.engine.draft_vocab import FILE
from cascade.engine.loading import load
from cascade.engine.model import Model
from cascade.errors import ModelError
from cascade.scorer import Row
from tests import small
from tests.architectures import VOCAB, build

SAID = [*range(3, VOCAB, 3)]


def saved(architecture: str, folder: Path, said: object = SAID) -> str:
    """A random model whose draft vocabulary is ``said``."""
    network = build(architecture)
    network.config.draft_vocab_size = len(SAID)
    network.save_pretrained(folder)
    (folder / FILE).write_text(json.dumps(said))
    return str(folder)


@pytest.mark.parametrize("architecture", ["llama", "olmo2"])
def test_a_draft_says_what_the_whole_model_says_of_its_tokens(architecture: str, tmp_path: Path) -> None:
    """Guards logits against the place of another token, in our own networks and in those of Transformers."""
    source, text = saved(architecture, tmp_path), [5, 9, 40, 41, 42]
    whole, draft = (Model(load(source, draft=draft, dtype="float32")) for draft in (False, True))
    expected, found = (model.logits([Row(model.new_cache(), 0, text, len(text), SamplingParams())]) for model in (whole, draft))
    assert found.shape == expected.shape
    torch.testing.assert_close(found[:, SAID], expected[:, SAID])
    others = sorted({*range(VOCAB)} - {*SAID})
    assert (found[:, others] == torch.finfo(found.dtype).min).all()


def test_a_draft_vocabulary_changes_no_text(tmp_path: Path) -> None:
    """Guards the law that drafts change when a text comes, never what it is."""
    tiny, _, full = small.paths()
    folder = tmp_path / "tiny"
    shutil.copytree(tiny, folder, symlinks=False)
    config = json.loads((folder / "config.json").read_text())
    said = [*range(0, config["vocab_size"], 2)]
    (folder / "config.json").write_text(json.dumps(config | {"draft_vocab_size": len(said)}))
    (folder / FILE).write_text(json.dumps(said))
    with Cascade.from_pretrained([str(folder), full], dtype="float32", drafter=None) as cascade:
        said, alone = (
            cascade.generate("def read(path):", SamplingParams(max_tokens=48, temperature=0.8, seed=3), Speculation(mode))
            for mode in ("auto", "off")
        )
    assert said.text == alone.text


def test_renewed_weights_are_said_of_the_same_tokens(tmp_path: Path) -> None:
    """Guards drafts that learn: new weights reach the part of the embedding that is run, and other tokens are refused."""
    old, new = (saved("llama", tmp_path / name) for name in ("old", "new"))
    network = build("llama", seed=1)
    network.config.draft_vocab_size = len(SAID)
    network.save_pretrained(new)
    renewed, expected = (Model(load(source, draft=True, dtype="float32")) for source in (old, new))
    renewed.renew(new)
    found, wanted = (
        model.logits([Row(model.new_cache(), 0, [5, 9, 40], 3, SamplingParams())]) for model in (renewed, expected)
    )
    torch.testing.assert_close(found, wanted)
    (Path(new) / FILE).write_text(json.dumps([*SAID[1:], 1]))
    with pytest.raises(ModelError, match="they say other tokens"):
        renewed.renew(new)


@pytest.mark.parametrize("said", [SAID[1:], [*SAID[1:], VOCAB], [*SAID[1:], SAID[1]], {}, ["a"], None], ids=str)
def test_a_wrong_file_is_refused(said: object, tmp_path: Path) -> None:
    """Guards drafts against ids that are not tokens of the model, and against a file that was not copied."""
    source = saved("llama", tmp_path, said)
    if said is None:
        (tmp_path / FILE).unlink()
    with pytest.raises(ModelError, match=FILE):
        load(source, draft=True)
