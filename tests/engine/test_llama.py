"""The Llama family written out: what Transformers says, to float tolerance, and the same bits in every pass."""

import random
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from cascade.engine.model import Model
from cascade.engine.network.llama import is_written_out
from cascade.engine.threads import Threads
from cascade.params import SamplingParams
from cascade.scorer import Row
from tests.architectures import VOCAB, build
from tests.engine.test_bits import in_pieces

GREEDY = SamplingParams(temperature=0.0, seed=0)
TEXT = tuple((7 * place + 3) % VOCAB for place in range(100))
LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 32}
FAMILY: dict[str, dict[str, Any]] = {
    "llama": {},
    "llama-untied-bias": {"mlp_bias": True},
    "llama-wide-heads": {"head_dim": 48},
    "llama-linear": {"rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0}},
    "llama-llama3": {"rope_parameters": {"rope_type": "llama3", "rope_theta": 10000.0, "factor": 4.0, **LLAMA3}},
    "llama-yarn": {"rope_parameters": {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0}},
    "mistral": {},
    "qwen2": {},
    "qwen2-sliding": {},
    "qwen3": {},
}


def network(name: str) -> PreTrainedModel:
    base = name if name in ("llama-untied-bias", "qwen2-sliding") else name.split("-")[0]
    made = build(base, **FAMILY[name])
    with torch.no_grad():  # which are made as zeros and ones
        for key, weight in made.named_parameters():
            if "bias" in key or "norm" in key:
                weight.add_(torch.randn(weight.shape, generator=torch.Generator().manual_seed(len(key))) / 4)
    return made


@cache
def served(name: str) -> Model:
    return Model(network(name), cache_tokens=4096, num_threads=1)


pytestmark = pytest.mark.usefixtures("one_thread")


def scored(model: Model, *pieces: tuple[int, int], store: Any = None) -> Tensor:
    """Logits of parts of the text, one pass each."""
    store = store or model.new_cache()
    return torch.cat([model.logits([Row(store, start, TEXT[start:end], end - start, GREEDY)]) for start, end in pieces])


@pytest.mark.parametrize("name", FAMILY)
def test_logits_are_those_of_transformers(name: str) -> None:
    """Guards every weight and every field of a configuration: biases, norms of heads, windows, scaled positions, tied heads."""
    reference = network(name)
    assert is_written_out(reference)
    reference.set_attn_implementation("eager")
    with torch.inference_mode():
        expected = reference(input_ids=torch.tensor([TEXT]), use_cache=False).logits[0]
    for pieces in ([(0, 100)], [(0, 1), (1, 40), (40, 42), (42, 100)]):
        torch.testing.assert_close(scored(served(name), *pieces), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", FAMILY)
def test_bits_depend_on_the_text_alone(name: str) -> None:
    """Guards near-ties: pieces, companions and drafts that are rolled back must not change a bit, nor must threads."""
    model = served(name)
    whole = scored(model, (0, 100))
    assert torch.equal(in_pieces(model, list(TEXT), random.Random(name)), whole)
    with Threads(2).use(1):
        assert torch.equal(scored(model, (0, 50), (50, 100)), whole)


def test_logits_stay_when_other_passes_follow() -> None:
    """Guards the memory that passes share."""
    model = served("qwen3")
    found = [scored(model, (0, length)) for length in (1, 30, 2, 1, 48, 3, 33, 1)]
    expected = [scored(model, (0, len(one))) for one in found]
    assert all(map(torch.equal, found, expected))


def test_a_model_may_be_asked_by_several_threads() -> None:
    """Guards tiers that share a model: their threads' passes wrote into the same memory, and texts were not the model's."""
    model = Model(network("llama"), cache_tokens=8192, num_threads=1)
    texts = [[(step + place) % 60 + 3 for place in range(24)] for step in range(4)]

    def passes(text: list[int]) -> list[list[int]]:
        caches = [model.new_cache() for _ in range(40)]
        return [list(model.run([Row(cache, 0, text, len(text), GREEDY)])[0].own) for cache in caches]

    with ThreadPoolExecutor(len(texts)) as workers:
        together = list(workers.map(passes, texts))
    for text, found in zip(texts, together, strict=True):
        assert found == [passes(text)[0]] * 40


@pytest.mark.parametrize("name", ["llama", "llama-untied-bias"])
def test_an_owned_network_gives_its_weights_up(name: str) -> None:
    """Guards memory: weights were held twice. What a drafter beside it shares, embeddings and head, stays."""
    given = network(name)
    model = Model(given, cache_tokens=1024, owned=True, num_threads=1)
    assert {weight.device.type for weight in given.model.layers.parameters()} == {"meta"}
    assert model.num_parameters == served(name).num_parameters
    assert torch.equal(scored(model, (0, 20)), scored(served(name), (0, 20)))
    with torch.inference_mode():
        states = given.get_input_embeddings()(torch.tensor(TEXT[:3]))
        expected = torch.nn.functional.linear(states, network(name).lm_head.weight)
        torch.testing.assert_close(given.get_output_embeddings()(states), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("gemma", {}),
        ("llama-dynamic", {}),
        ("llama", {"hidden_act": "gelu"}),
        ("llama", {"quantization_config": {"quant_method": "torchao"}}),
    ],
)
def test_others_are_left_to_transformers(name: str, changes: dict[str, Any]) -> None:
    """Guards models that change a little of a known one: their text would be wrong."""
    other = build(name)
    for key, value in changes.items():
        setattr(other.config, key, value)
    assert not is_written_out(other)
    assert not is_written_out(build("llama").half())
