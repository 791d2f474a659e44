"""Tiers that are a part of a model, some of its layers or of its tokens: they say what it says without the others."""

import gc
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load as load_bytes
from safetensors.torch import save_file
from torch import Tensor, nn

from cascade import Cascade, ConfigError, ModelError
from cascade.engine.checkpoint import anatomy
from cascade.engine.draft_vocab import FILE
from cascade.engine.layers import numbers, shown
from cascade.engine.loading import load
from cascade.engine.model import Model
from tests import small
from tests.architectures import VOCAB, build
from tests.engine.test_bits import whole as logits

TEXT = [*range(3, 33)]
KEPT = (0, 2, 3)
FOUR: dict[str, dict[str, Any]] = {  # of each kind of network: ours, Transformers' with windows, experts, other names
    "llama-untied-bias": {},
    "qwen2-sliding": {"layer_types": ["full_attention", "sliding_attention", "sliding_attention", "full_attention"]},
    "gemma2": {"layer_types": ["sliding_attention", "full_attention", "full_attention", "sliding_attention"]},
    "mixtral": {},
    "smollm3": {"no_rope_layers": [1, 1, 0, 1]},
    "gpt2": {"n_layer": 4},
}
OPTIONS: dict[str, Any] = {"dtype": "float32", "device": "cpu", "drafter": None}


@pytest.mark.parametrize("name", FOUR)
def test_a_model_of_some_layers_is_the_model_without_the_others(name: str, tmp_path: Path) -> None:
    """Guards which layers run, their numbers, windows and weights: read alone from a checkpoint, or shared with the whole."""
    network = build(name, **{"num_hidden_layers": 4, **FOUR[name]})
    network.save_pretrained(tmp_path)
    alone = Model(load(str(tmp_path), dtype="float32", device="cpu", layers=KEPT))
    whole = Model.from_pretrained(str(tmp_path), dtype="float32", device="cpu")
    before, shared = logits(whole, TEXT), whole.cut(KEPT)
    [stack] = [part for part in network.modules() if isinstance(part, nn.ModuleList) and len(part) == 4]
    for place in {*range(4)} - {*KEPT}:
        stack[place].register_forward_hook(lambda layer, inputs, out: inputs[0])  # as if it were not there
    with torch.inference_mode():
        expected = network(input_ids=torch.tensor([TEXT]), use_cache=False).logits[0]
    for model in (alone, shared):
        torch.testing.assert_close(logits(model, TEXT), expected, rtol=1e-4, atol=1e-4)
    assert torch.equal(logits(whole, TEXT), before)
    assert anatomy(str(tmp_path), layers=KEPT).parameters == alone.num_parameters == shared.num_parameters
    assert shared.bytes_per_token == alone.bytes_per_token < whole.bytes_per_token


def test_weights_of_other_layers_are_not_read(tmp_path: Path) -> None:
    """Guards memory of a tier that is alone in its process: it read the whole model first. These could not be read."""
    build("llama", num_hidden_layers=4).save_pretrained(tmp_path)
    weights = load_bytes((tmp_path / "model.safetensors").read_bytes())
    spoiled = {name: part if ".layers.1." not in name else part[:1].clone() for name, part in weights.items()}
    save_file(spoiled, tmp_path / "model.safetensors", metadata={"format": "pt"})
    assert load(str(tmp_path), device="cpu", layers=KEPT).config.num_hidden_layers == 3
    with pytest.raises(ModelError):
        load(str(tmp_path), device="cpu")


def held() -> dict[int, int]:
    """Bytes of the memory of all tensors, by where it lies."""
    parts = [part.untyped_storage() for part in gc.get_objects() if issubclass(type(part), Tensor)]
    return {part.data_ptr(): part.nbytes() for part in parts}


@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_layers_of_a_model_in_the_same_process_have_its_weights(name: str) -> None:
    """Guards memory: a second copy of what the model above has, by our kernels and by Transformers."""
    whole = Model(build(name, num_hidden_layers=4, vocab_size=4096, **FOUR.get(name, {})))
    before = held()
    part = whole.cut(KEPT)
    new = sum(size for place, size in held().items() if place not in before)
    assert new < 0.1 * part.num_parameters * 4


def test_layers_are_named_in_many_ways() -> None:
    """Guards short forms: spans as YAML reads them, single layers, how many of the first; and how they are shown."""
    assert numbers(["0-2", 5, "7 - 8"]) == numbers("0-2, 5,7-8") == numbers([0, 1, 2, 5, 7, 8]) == (0, 1, 2, 5, 7, 8)
    assert numbers(3) == (0, 1, 2)
    assert numbers([3]) == (3,)
    assert shown((0, 1, 2, 5, 7, 8)) == "0-2,5,7-8"


@pytest.mark.parametrize(
    ("layers", "words"),
    [
        ({"tiny": 0}, "layers of tiny: there are no layers"),
        ({"tiny": []}, "there are no layers"),
        ({"tiny": True}, "there are no layers"),
        ({"tiny": "0-x"}, "'0-x' are not layers: give numbers from 0 on"),
        ({"tiny": ["5-3"]}, "'5-3' are not layers"),
        ({"tiny": [-1]}, "-1 are not layers"),
        ({"tiny": ["0-4", "4-6"]}, "'4-6' overlaps with layers before it"),
        ({"tiny": [3, 1]}, "1 overlaps with layers before it, or comes after later ones"),
        ({"full": "0,4-6"}, "layers are 0,4-6, and the model has 6: they go from 0 to 5"),
        ({"medium": 3}, "layers names 'medium', which is no tier: they are tiny, full"),
    ],
    ids=str,
)
def test_wrong_layers_are_refused(layers: dict[str, Any], words: str) -> None:
    """Guards against a tier that is not what was meant: what is wrong is told before anything is loaded."""
    tiny, _, full = small.paths()
    with pytest.raises((ConfigError, ModelError), match=words):
        Cascade.from_pretrained([tiny, full], layers=layers)


# draft models that say a part of their tokens only


SAID = [*range(3, VOCAB, 3)]


def saved(architecture: str, folder: Path, ids: object = SAID) -> str:
    """A random model whose draft vocabulary is ``ids``."""
    network = build(architecture)
    network.config.draft_vocab_size = len(SAID)
    network.save_pretrained(folder)
    (folder / FILE).write_text(json.dumps(ids))
    return str(folder)


@pytest.mark.parametrize("architecture", ["llama", "olmo2"])
def test_a_draft_says_what_the_whole_model_says_of_its_tokens(architecture: str, tmp_path: Path) -> None:
    """Guards logits against the place of another token, in our own networks and in those of Transformers."""
    source, text = saved(architecture, tmp_path), [5, 9, 40, 41, 42]
    whole, draft = (Model(load(source, draft=draft, dtype="float32")) for draft in (False, True))
    expected, narrow = (logits(model, text) for model in (whole, draft))
    assert narrow.shape == expected.shape
    torch.testing.assert_close(narrow[:, SAID], expected[:, SAID])
    others = sorted({*range(VOCAB)} - {*SAID})
    assert (narrow[:, others] == torch.finfo(narrow.dtype).min).all()


def test_renewed_weights_are_said_of_the_same_tokens(tmp_path: Path) -> None:
    """Guards drafts that learn: new weights reach the part of the embedding that is run, and other tokens are refused."""
    old, new = (saved("llama", tmp_path / name) for name in ("old", "new"))
    network = build("llama", seed=1)
    network.config.draft_vocab_size = len(SAID)
    network.save_pretrained(new)
    renewed, expected = (Model(load(source, draft=True, dtype="float32")) for source in (old, new))
    renewed.renew(new)
    found, wanted = (logits(model, [5, 9, 40]) for model in (renewed, expected))
    torch.testing.assert_close(found, wanted)
    (Path(new) / FILE).write_text(json.dumps([*SAID[1:], 1]))
    with pytest.raises(ModelError, match="they predict other tokens"):
        renewed.renew(new)


@pytest.mark.parametrize("tokens", [SAID[1:], [*SAID[1:], VOCAB], [*SAID[1:], SAID[1]], {}, ["a"], None], ids=str)
def test_a_wrong_file_is_refused(tokens: object, tmp_path: Path) -> None:
    """Guards drafts against ids that are not tokens of the model, and against a file that was not copied."""
    source = saved("llama", tmp_path, tokens)
    if tokens is None:
        (tmp_path / FILE).unlink()
    with pytest.raises(ModelError, match=FILE):
        load(source, draft=True)
