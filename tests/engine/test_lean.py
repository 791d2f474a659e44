"""Lean layers: known by their code, left alone where it is another, and saying what the plain ones say."""

from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch
from torch import nn
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm

from cascade.engine import lean
from cascade.engine.lean import fatten
from cascade.engine.model import Model
from cascade.engine.whole_layer import Angles, WholeLayer
from cascade.engine.whole_network import Turns
from cascade.params import SamplingParams
from cascade.scorer import Row
from tests.architectures import build

GREEDY = SamplingParams(temperature=0.0, seed=0)
TEXT = tuple(range(3, 33))
FORMS = {
    "llama": {"_attention": 2, "_mlp": 2, "_norm": 5},
    "qwen3": {"_attention": 2, "_mlp": 2, "_norm": 9},
    "qwen2-sliding": {"_attention": 2, "_mlp": 2, "_norm": 5},
    "gemma": {"_attention": 2, "_mlp": 2, "_norm": 5},
    "gemma2": {"_mlp": 2, "_norm": 9},
    "phi3": {"_mlp": 2, "_norm": 5},
    "deepseek_v3": {"_mlp": 2, "_norm": 9},
    "gpt2": {},
}


def forms(network: nn.Module) -> Counter[str]:
    """How many modules have which lean form."""
    given = (getattr(vars(module).get("forward"), "func", None) for module in network.modules())
    return Counter(one.__name__ for one in given if one in (lean._norm, lean._mlp, lean._attention))


def logits(model: Model) -> torch.Tensor:
    return model.logits([Row(model.new_cache(), 0, TEXT, len(TEXT), GREEDY)])


@pytest.mark.parametrize("kit", ["NATIVE", "PLAIN"])
@pytest.mark.parametrize("name", FORMS)
def test_known_layers_are_lean(name: str, kit: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards speed: a new release of Transformers that changes their code would leave all as it is, and nobody would notice."""
    monkeypatch.setattr("cascade.engine.model.choose_kit", lambda device, dtype: getattr(lean, kit))
    model = Model(build(name), cache_tokens=1024)
    assert forms(model._network) == FORMS[name]
    found = logits(model)
    fatten(model._network)
    assert not forms(model._network)
    torch.testing.assert_close(found, logits(model), rtol=1e-4, atol=1e-4)


class OwnNorm(LlamaRMSNorm):
    """The same names, another computation."""

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return super().forward(hidden_states) * 2


class OwnMLP(LlamaMLP):
    """Another order of the same steps."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.down_proj(self.act_fn(self.up_proj(x)) * self.gate_proj(x))
        return out


def test_other_code_is_left_alone() -> None:
    """Guards models that change a little of a known one: what is known by its name alone would be wrong there."""
    network = build("llama")
    config = network.config
    plain = build("llama")
    for layer, other in zip(network.model.layers, plain.model.layers, strict=True):
        own, weights = OwnNorm(config.hidden_size), layer.input_layernorm.state_dict()
        own.load_state_dict(weights)
        layer.input_layernorm = own
        mlp = OwnMLP(config)
        mlp.load_state_dict(other.mlp.state_dict())
        layer.mlp = mlp
    model = Model(network.eval(), cache_tokens=1024)
    assert forms(network) == {"_attention": 2, "_norm": 3}
    found = logits(model)
    fatten(network)
    torch.testing.assert_close(found, logits(model), rtol=1e-4, atol=1e-4)


def test_lean_layers_that_say_something_else_are_taken_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards models whose code is known and means something else after all: they are served as they are."""
    wrong = replace(lean.NATIVE, whole=False, gated=lambda wide, activation: wide[:, : wide.shape[1] // 2].clone())
    monkeypatch.setattr(lean, "NATIVE", wrong)
    model = Model(build("llama"), cache_tokens=1024)
    assert not forms(model._network)
    monkeypatch.undo()
    torch.testing.assert_close(logits(model), logits(Model(build("llama"), cache_tokens=1024)), rtol=1e-4, atol=1e-4)


# of norms with and without offset or heads of their own, biases, windows, angles that do not depend on positions alone
WHOLE = ("llama", "llama-dynamic", "qwen2-sliding", "qwen3", "gemma")
ROWS = ((0, 1), (1, 2), (2, 11), (11, 30), (30, 31), (31, 48))  # positions of passes


def in_one_call(network: nn.Module) -> int:
    """Layers that are one call."""
    return sum(isinstance(vars(module).get("forward"), WholeLayer) for module in network.modules())


def said(model: Model, num_threads: int) -> torch.Tensor:
    """Logits of a text that grows from one position to 48, two rows of which end in drafts that are rolled back."""
    text, cache = [7 * place % 60 + 3 for place in range(60)], model.new_cache()
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        passes = [model.logits([Row(cache, a, text[a:b][::-1], 1, GREEDY)]) for a, b in ROWS[2:4]]
        passes += [model.logits([Row(cache, a, text[a:b], b - a, GREEDY)]) for a, b in ROWS]
    finally:
        torch.set_num_threads(before)
    return torch.cat(passes)


@pytest.mark.parametrize("all_at_once", [False, True], ids=["layers", "network"])
@pytest.mark.parametrize("name", WHOLE)
def test_one_call_has_the_bits_of_its_steps(name: str, all_at_once: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards exactness between tiers and machines: an operation in another order is another text sooner or later."""
    whole = Model(build(name), cache_tokens=1024)
    assert in_one_call(whole._network) == 2
    assert (whole._whole is not None) == (name != "gemma")  # whose network scales its embeddings
    if not all_at_once:
        whole._whole = None
    monkeypatch.setattr(lean, "NATIVE", replace(lean.NATIVE, whole=False))
    by_steps = Model(build(name), cache_tokens=1024)
    assert not in_one_call(by_steps._network)
    expected = said(by_steps, 1)
    assert torch.equal(said(whole, 1), expected)
    assert torch.equal(said(whole, 2), expected)


def test_layers_that_are_listened_to_go_step_by_step() -> None:
    """Guards ranks and adapters, whose hooks on a layer's parts one call would pass by."""
    network = build("llama")
    heard: list[str] = []
    network.model.layers[0].self_attn.o_proj.register_forward_hook(lambda *_: heard.append("o_proj"))
    model = Model(network, cache_tokens=1024)
    assert in_one_call(network) == 1
    assert model._whole is None
    heard.clear()
    logits(model)
    assert heard == ["o_proj"]


def test_a_network_that_is_listened_to_goes_layer_by_layer() -> None:
    """Guards drafters that read hidden states: one call over all layers would leave them with those of another pass."""
    model = Model(build("llama"), cache_tokens=1024)
    together, heard = logits(model), list[str]()
    backbone = model._network.model
    listened = {
        "embedding": backbone.embed_tokens,
        "layer": backbone.layers[1],
        "norm": backbone.norm,
        "backbone": backbone,
        "head": model._network.lm_head,
    }
    for name, module in listened.items():
        hook = module.register_forward_hook(lambda *_, name=name: heard.append(name))
        assert torch.equal(logits(model), together)
        hook.remove()
    assert heard == list(listened)


@pytest.mark.parametrize("name", ["llama", "llama-dynamic", "phi3-longrope"])
def test_angles_are_those_of_the_network(name: str) -> None:
    """Guards long texts: angles that are kept must grow with the positions, and those that change be asked for."""
    rotary = build(name).model.rotary_emb
    turns = Turns(rotary)
    for positions in ([0], [3, 4], [90, 2, 63], [200, 5], [1]):
        wanted = rotary(torch.empty(0), position_ids=torch.tensor([positions]))
        found = Angles(torch.empty(len(positions), turns.size), torch.empty(len(positions), turns.size))
        turns.put(torch.tensor(positions), max(positions) + 1, found)
        assert all(torch.equal(mine, told[0]) for mine, told in zip(found, wanted, strict=True))


def test_passes_of_a_network_in_one_call_do_not_meddle_with_each_other() -> None:
    """Guards the memory that its passes share: logits of one must stay when longer and shorter ones follow."""
    model = Model(build("qwen3"), cache_tokens=1024)
    kept, expected = [], []
    for length in (1, 30, 2, 1, 48, 3, 33, 1):
        text = tuple(5 * place % 60 + 3 for place in range(length))
        kept.append(model.logits([Row(model.new_cache(), 0, text, length, GREEDY)]))
        expected.append(kept[-1].clone())
    assert all(map(torch.equal, kept, expected))
    model._whole = None
    again = model.logits([Row(model.new_cache(), 0, (3,), 1, GREEDY)])
    assert torch.equal(again, kept[0])
    assert torch.equal(again, kept[-1])


def test_a_model_may_be_asked_by_several_threads() -> None:
    """Guards tiers that share a model: their threads' passes wrote into the same memory, and texts were not the model's."""
    model = Model(build("llama"), cache_tokens=8192, num_threads=1)
    texts = [[(step + place) % 60 + 3 for place in range(24)] for step in range(4)]

    def passes(text: list[int]) -> list[list[int]]:
        caches = [model.new_cache() for _ in range(40)]
        return [list(model.run([Row(cache, 0, text, len(text), GREEDY)])[0].own) for cache in caches]

    with ThreadPoolExecutor(len(texts)) as threads:
        together = list(threads.map(passes, texts))
    for text, found in zip(texts, together, strict=True):
        alone = passes(text)[0]
        assert all(one == alone for one in found)
