"""Linear layers in other orders than PyTorch's: the same model."""

import pytest
import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from cascade.engine import packed_linear
from cascade.engine.model import Model
from cascade.engine.packed_linear import MIN_ROWS, InBlocks, Product, pack, watch
from cascade.params import SamplingParams
from cascade.scorer import Row, Scored
from tests.architectures import build

GREEDY = SamplingParams(temperature=0.0, seed=0)
TEXT = tuple(range(3, 33))


def product_of(layer: nn.Module) -> Product | None:
    """The product that a packed layer is a part of."""
    forward = vars(layer).get("forward")
    product = getattr(getattr(forward, "func", None), "__self__", None)
    return product if isinstance(product, Product) else None


def _logits(model: Model) -> torch.Tensor:
    """Of a text scored in pieces of one row, of two and of many."""
    store = model.new_cache()
    rows = [(0, 20), (20, 21), (21, 23), (23, 30)]
    return torch.cat([model.logits([Row(store, a, TEXT[a:b], b - a, GREEDY)]) for a, b in rows])


@pytest.mark.parametrize("name", ["llama", "llama-untied-bias", "qwen3", "gemma2", "deepseek_v3", "mixtral", "opt", "gpt_neox"])
def test_packed_models_say_the_same(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards the order of weights, biases, tied heads, and a prompt of which no row is scored against the vocabulary."""
    model = Model(build(name))
    assert any(map(product_of, model._network.modules()))
    assert model.run([Row(model.new_cache(), 0, TEXT, 0, GREEDY)]) == [Scored([])]
    found = _logits(model)
    monkeypatch.setattr(packed_linear, "host_memory", lambda: 0)
    plain = Model(build(name))
    assert not any(map(product_of, plain._network.modules()))
    torch.testing.assert_close(found, _logits(plain), rtol=1e-4, atol=1e-4)
    assert model.num_parameters == plain.num_parameters


@pytest.mark.parametrize("rows", [0, 1, 2, 3, 4, 9, 300])
@pytest.mark.parametrize("bias", [False, True])
def test_bfloat16_products_are_exact_to_rounding(rows: int, bias: bool) -> None:
    """Guards rows that are filled up to four, and sums, which must be kept in float32."""
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(512, 384, bias=bias)).bfloat16()
    input = torch.randn(1, rows, 512, dtype=torch.bfloat16)
    expected = nn.functional.linear(input.float(), network[0].weight.float(), network[0].bias.float() if bias else None)
    assert pack(network) == MIN_ROWS
    with torch.inference_mode():
        found = network(input)
    torch.testing.assert_close(found, expected.bfloat16(), rtol=2**-7, atol=1e-3)


def _joined(network: nn.Module) -> dict[str, int]:
    """By layer, how many are computed with it."""
    products = {name: product for name, layer in network.named_modules() if (product := product_of(layer))}
    return {name: list(products.values()).count(product) for name, product in products.items()}


def test_layers_with_one_input_are_one_product() -> None:
    """Guards the fewest products a layer can do with: queries, keys and values are one, and so are both halves of an MLP."""
    found = _joined(Model(build("llama"))._network)
    names = {"q_proj": 3, "k_proj": 3, "v_proj": 3, "o_proj": 1, "gate_proj": 2, "up_proj": 2, "down_proj": 1, "lm_head": 1}
    assert {name.rsplit(".", 1)[-1]: count for name, count in found.items()} == names


class Fork(nn.Module):
    """Layers that have one input when they are watched, and anything else later."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(512, 256), nn.Linear(512, 320)

    def forward(self, input: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.left(input), self.right(input)


@pytest.mark.parametrize("packer", [InBlocks, None])
def test_joined_layers_need_no_partner(packer: object, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards mixtures, which do not use all layers in each pass: parts of another input, and inputs that are kept."""
    network = Fork()
    with watch(network) as groups:
        network(torch.zeros(1, 512))
    assert groups == [[network.left, network.right]]
    plain = Fork()
    plain.load_state_dict(network.state_dict())
    monkeypatch.setattr(packed_linear, "_packer", lambda *_: packer)
    assert pack(network, groups) == 1
    assert _joined(network) == {"left": 2, "right": 2}
    assert all(torch.equal(one, other) for one, other in zip(network.parameters(), plain.parameters(), strict=True))
    first, second = torch.randn(4, 512), torch.randn(9, 512)
    with torch.inference_mode():
        for side, input in (("right", first), ("left", second), ("left", second), ("right", first), ("right", second)):
            found, expected = getattr(network, side)(input), getattr(plain, side)(input)
            torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
        network(first)
    product = product_of(network.left)
    assert product is not None
    assert product._input is None


def test_unlike_layers_are_not_joined() -> None:
    """Guards biases that only one of two has, layers that are used twice, and those of different modules."""
    network = Fork()
    network.right.bias = None  # type: ignore[assignment]
    chain = nn.Sequential(nn.Sequential(network.left), nn.Sequential(network.right))
    input = torch.zeros(1, 512)
    with watch(chain) as groups:
        chain[0](input), chain[1](input)
    assert groups == [[network.left], [network.right]]
    assert pack(network, [[network.left, network.right], [network.right, network.right]]) == 1
    assert _joined(network) == {"left": 1, "right": 1}


def test_other_layers_are_left_alone() -> None:
    """Guards layers that have a product of their own: other dtypes, and subclasses such as quantised ones."""

    class Own(nn.Linear):
        pass

    network = nn.Sequential(nn.Linear(8, 8).double(), Own(8, 8), nn.Linear(8, 8), nn.Embedding(8, 8), Conv1D(8, 8))
    pack(network)
    assert [product_of(layer) is not None for layer in network] == [False, False, True, False, True]
    forwards = [vars(layer).get("forward") for layer in network]
    pack(network)
    assert [vars(layer).get("forward") for layer in network] == forwards, "once is enough"


def test_copies_need_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards hosts on which a model just fits: it is slower there, but it runs."""
    monkeypatch.setattr(packed_linear, "host_memory", lambda: 10_000)
    network = build("llama")
    pack(network)
    assert not any(map(product_of, network.modules()))
