"""Linear layers in oneDNN's order: the same model, and only where it is of use."""

import pytest
import torch
from architectures import build
from torch import nn

from cascade import packed
from cascade.model import Model
from cascade.packed import PackedLinear, pack
from cascade.params import SamplingParams
from cascade.scorer import Row

GREEDY = SamplingParams(temperature=0.0, seed=0)
TEXT = tuple(range(3, 33))

pytestmark = pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="this PyTorch has no oneDNN")


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pack small networks, too."""
    monkeypatch.setattr(packed, "LARGE", 1)


def _logits(model: Model) -> torch.Tensor:
    """Of a text scored in pieces of one row, of two and of many."""
    store = model.new_cache()
    rows = [(0, 20), (20, 21), (21, 23), (23, 30)]
    return torch.cat([model.logits([Row(store, a, TEXT[a:b], b - a, GREEDY)]) for a, b in rows])


@pytest.mark.parametrize("name", ["llama", "llama-untied-bias", "qwen3", "gemma2", "deepseek_v3", "mixtral", "opt", "gpt_neox"])
def test_packed_models_say_the_same(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards the order of weights, biases, tied heads, and a prompt of which no row is scored against the vocabulary."""
    model = Model(build(name))
    layers = [module for module in model._network.modules() if isinstance(module, PackedLinear)]
    assert layers
    assert model.run([Row(model.new_cache(), 0, TEXT, 0, GREEDY)]) == [[]]
    found = _logits(model)
    monkeypatch.setattr(packed, "host_memory", lambda: 0)
    plain = Model(build(name))
    assert not any(isinstance(module, PackedLinear) for module in plain._network.modules())
    torch.testing.assert_close(found, _logits(plain), rtol=1e-4, atol=1e-4)
    assert model.num_parameters == plain.num_parameters


@pytest.mark.skipif(not torch.ops.mkldnn._is_mkldnn_bf16_supported(), reason="this processor has no bfloat16")
@pytest.mark.parametrize("rows", [0, 1, 2, 3, 4, 9, 300])
@pytest.mark.parametrize("bias", [False, True])
def test_bfloat16_products_are_exact_to_rounding(rows: int, bias: bool) -> None:
    """Guards rows that are filled up to four, and sums, which must be kept in float32."""
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(512, 384, bias=bias)).bfloat16()
    input = torch.randn(1, rows, 512, dtype=torch.bfloat16)
    expected = nn.functional.linear(input.float(), network[0].weight.float(), network[0].bias.float() if bias else None)
    assert pack(network) == 1
    with torch.inference_mode():
        found = network(input)
    torch.testing.assert_close(found, expected.bfloat16(), rtol=2**-7, atol=1e-3)


def test_other_layers_are_left_alone() -> None:
    """Guards layers that have a product of their own: other dtypes, and subclasses such as quantised ones."""

    class Own(nn.Linear):
        pass

    network = nn.Sequential(nn.Linear(8, 8).double(), Own(8, 8), nn.Linear(8, 8), nn.Embedding(8, 8))
    assert pack(network) == 1
    assert [type(layer) for layer in network] == [nn.Linear, Own, PackedLinear, nn.Embedding]


def test_copies_need_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards hosts on which a model just fits: it is slower there, but it runs."""
    monkeypatch.setattr(packed, "host_memory", lambda: 10_000)
    assert pack(build("llama")) == 0


def test_small_networks_in_float32_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards small drafters, whose weights stay in the caches: one row is quicker there as PyTorch multiplies it."""
    monkeypatch.undo()
    assert pack(build("llama")) == 0
    assert pack(build("llama").to(torch.bfloat16)) > 0
