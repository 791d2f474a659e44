"""Drafters in a configuration: how they are named, and with which weights they begin."""

import json
from pathlib import Path
from typing import Any

import pytest

from cascade.drafters import DrafterSpec
from cascade.errors import ModelError
from cascade.settings.config import CascadeConfig
from tests.settings.test_config import one, tier


def test_drafters_are_named_in_many_ways() -> None:
    """Guards the short forms of `drafter`: a kind, a list, a mapping, nothing."""

    def named(drafter: Any) -> tuple[DrafterSpec, ...]:
        return CascadeConfig.parse(one(engine_kwargs={"drafter": drafter})).tiers[0].engine_kwargs.drafters

    assert named("auto") == named(["suffix"]) == CascadeConfig.parse(one()).tiers[0].engine_kwargs.drafters
    assert named([]) == named(None) == ()
    corpus = {"kind": "corpus", "source": "a.txt"}
    assert named(["suffix", corpus]) == (DrafterSpec("suffix"), DrafterSpec("corpus", "a.txt"))
    config = CascadeConfig.parse({"tiers": [tier("a", "x/y"), tier("b") | {"engine_kwargs": {"drafter": ["auto", corpus]}}]})
    assert config.drafters == ("suffix", "corpus")
    assert config.chain_names == ("suffix", "corpus", "a", "b")
    assert CascadeConfig.parse(json.loads(json.dumps(config.model_dump(mode="json")))) == config  # on its way to a replica


def test_drafters_begin_at_the_revision_that_is_pinned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards drafters that learn: learner and rollback took the newest weights of the hub, not those that serve."""
    model = tmp_path / "models--some--model"
    folders = {name: model / "snapshots" / (name * 40) for name in "ab"}
    for ref, folder in zip(("v1", "main"), folders.values(), strict=True):
        folder.mkdir(parents=True)
        (folder / "config.json").write_text("{}")
        (model / "refs").mkdir(exist_ok=True)
        (model / "refs" / ref).write_text(folder.name)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    below = tier("tiny", model_loading_config={"model_id": "some/model"}, engine_kwargs={"revision": "v1"})
    config = CascadeConfig.parse({"tiers": [below, tier("full")], "alignment": {"folder": str(tmp_path / "learnt")}})
    assert config.lesson("tiny")[1] == config.beginning("tiny") == str(folders["a"])
    lost = CascadeConfig.parse({"tiers": [below | {"engine_kwargs": {"revision": "v2"}}, tier("full")]})
    with pytest.raises(ModelError, match="Revision 'v2' of 'some/model' cannot be had"):
        lost.beginning("tiny")
