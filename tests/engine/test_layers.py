"""Tiers that are some of a model's layers: they say what it says without the others, and have no weights of their own."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load as load_bytes
from safetensors.torch import save_file
from torch import Tensor, nn

from cascade import Cascade, ConfigError, ModelError, SamplingParams, Speculation
from cascade.engine.checkpoint import anatomy
from cascade.engine.layers import numbers, shown
from cascade.engine.loading import load
from cascade.engine.model import Model
from cascade.messages import Edge
from cascade.scorer import Row
from tests import small
from tests.architectures import build
from tests.waiting import wait_until

TEXT = tuple(range(3, 33))
KEPT = (0, 2, 3)
FOUR: dict[str, dict[str, Any]] = {  # of each kind of network: ours, Transformers' with windows, experts, other names
    "llama-untied-bias": {},
    "qwen2-sliding": {"layer_types": ["full_attention", "sliding_attention", "sliding_attention", "full_attention"]},
    "gemma2": {"layer_types": ["sliding_attention", "full_attention", "full_attention", "sliding_attention"]},
    "mixtral": {},
    "smollm3": {"no_rope_layers": [1, 1, 0, 1]},
    "gpt2": {"n_layer": 4},
}
CODE = ["def read(path):\n", "import os\n\nclass Shape:\n"]


def logits(model: Model) -> Tensor:
    params = SamplingParams(temperature=0, seed=0)
    return model.logits([Row(model.new_cache(), 0, TEXT, len(TEXT), params)])


@pytest.mark.parametrize("name", FOUR)
def test_a_model_of_some_layers_is_the_model_without_the_others(name: str, tmp_path: Path) -> None:
    """Guards which layers run, their numbers, windows and weights: read alone from a checkpoint, or shared with the whole."""
    network = build(name, **{"num_hidden_layers": 4, **FOUR[name]})
    network.save_pretrained(tmp_path)
    alone = Model(load(str(tmp_path), dtype="float32", device="cpu", layers=KEPT), owned=True)
    whole = Model.from_pretrained(str(tmp_path), dtype="float32", device="cpu")
    before, shared = logits(whole), whole.cut(KEPT)
    [stack] = [part for part in network.modules() if isinstance(part, nn.ModuleList) and len(part) == 4]
    for place in {*range(4)} - {*KEPT}:
        stack[place].register_forward_hook(lambda layer, inputs, out: inputs[0])  # as if it were not there
    with torch.inference_mode():
        expected = network(input_ids=torch.tensor([TEXT]), use_cache=False).logits[0]
    for model in (alone, shared):
        torch.testing.assert_close(logits(model), expected, rtol=1e-4, atol=1e-4)
    assert torch.equal(logits(whole), before)
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


def addresses(model: Model) -> set[int]:
    """Where its weights lie."""
    if model._llama is None:
        return {part.data_ptr() for part in model._network.parameters()}
    linear = [part for layer in model._llama.layers for part in (layer.qkv, layer.o, layer.gate_up, layer.down)]
    linear.append(vars(model._llama._head)["forward"])
    return {model._llama._embedding.data_ptr(), *(part.blocks.data_ptr() for part in linear)}


@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_layers_of_a_model_in_the_same_process_have_its_weights(name: str) -> None:
    """Guards memory: a second copy of what the model above has, by our kernels and by Transformers."""
    whole = Model(build(name, num_hidden_layers=4, **FOUR.get(name, {})), owned=True)
    part = whole.cut(KEPT)
    assert addresses(part) < addresses(whole)
    assert (part._llama is None) == (name != "llama")


@pytest.fixture(scope="module")
def cascades() -> Iterator[tuple[Cascade, Cascade]]:
    """A model with its first three layers and all of its layers below it; and the model alone."""
    full, options = small.paths()[-1], {"dtype": "float32", "device": "cpu", "drafter": None}
    layers = {"tiny": 3, "medium": "0-5"}
    with (
        Cascade.from_pretrained([full] * 3, layers=layers, **options) as cascade,
        Cascade.from_pretrained([full], **options) as alone,
    ):
        yield cascade, alone


@pytest.mark.parametrize("tiers", [("tiny",), ("medium",), ("tiny", "medium")])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.usefixtures("always_draft")
def test_a_cascade_of_layers_has_the_full_models_text(
    cascades: tuple[Cascade, Cascade], tiers: Sequence[str], temperature: float
) -> None:
    """Guards the promise where a model drafts for itself; guesses of all its layers are all right."""
    cascade, alone = cascades
    params = SamplingParams(temperature=temperature, seed=5, max_tokens=40, ignore_eos=True)
    expected, edges = [one.token_ids for one in alone.generate(CODE, params)], list[Edge]()

    def accepted() -> int:
        found = cascade.generate(CODE, params, Speculation(tiers=tiers))
        assert [one.token_ids for one in found] == expected
        edges.extend(edge for one in found for edge in one.stats.edges if edge.drafter == tiers[-1])
        return sum(edge.accepted for edge in edges)

    wait_until(accepted)
    if tiers[-1] == "medium":
        assert not any(edge.corrected for edge in edges)


def test_a_tier_of_all_layers_writes_its_models_text(cascades: tuple[Cascade, Cascade]) -> None:
    """Guards tiers that others verify: the full tier may be layers, too, and all layers are the model."""
    full, params = small.paths()[-1], SamplingParams(temperature=0.8, seed=5, max_tokens=40)
    with Cascade.from_pretrained([full], layers={"full": "0-5"}, dtype="float32", device="cpu", drafter=None) as cascade:
        found = cascade.generate(CODE, params)
    assert [one.token_ids for one in found] == [one.token_ids for one in cascades[1].generate(CODE, params)]


def test_layers_are_named_in_many_ways() -> None:
    """Guards short forms: spans as YAML reads them, single layers, how many of the first; and how they are shown."""
    assert numbers(["0-2", 5, "7 - 8"]) == numbers("0-2, 5,7-8") == numbers([0, 1, 2, 5, 7, 8]) == (0, 1, 2, 5, 7, 8)
    assert numbers(3) == (0, 1, 2)
    assert numbers([3]) == (3,)
    assert shown((0, 1, 2, 5, 7, 8)) == "0-2,5,7-8"


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (0, "there are no layers"),
        ([], "there are no layers"),
        (True, "there are no layers"),
        ("0-x", "'0-x' are no layers: give numbers from 0 on"),
        (["5-3"], "'5-3' are no layers"),
        ([-1], "-1 are no layers"),
        (["0-4", "4-6"], "'4-6' overlaps with layers before it"),
        ([3, 1], "1 overlaps with layers before it, or stands behind later ones"),
    ],
)
def test_wrong_layers_are_refused(given: Any, words: str) -> None:
    """Guards against a tier that is not what was meant."""
    with pytest.raises(ConfigError, match=words):
        numbers(given)


def test_layers_that_a_model_has_not_are_refused() -> None:
    """Guards starts: layers of a larger model, and tiers that are not there, are told before anything is loaded."""
    tiny, full = small.paths()[0], small.paths()[-1]
    with pytest.raises(ModelError, match="layers are 0,4-6, and the model has 6: they go from 0 to 5"):
        Cascade.from_pretrained([tiny, full], layers={"full": "0,4-6"})
    with pytest.raises(ConfigError, match="layers names 'medium', which is no tier: they are tiny, full"):
        Cascade.from_pretrained([tiny, full], layers={"medium": 3})
    with pytest.raises(ConfigError, match="layers of tiny: there are no layers"):
        Cascade.from_pretrained([tiny, full], layers={"tiny": 0})
