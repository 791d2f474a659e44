"""On a CPU the bits of a text's logits depend on the text alone, so that near-ties are decided the same way in every pass."""

import random
from collections.abc import Iterator
from functools import cache

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from cascade import Cascade, SamplingParams, Speculation, family
from cascade.engine import packed_linear
from cascade.engine.model import Model
from cascade.scorer import TILE, Row
from tests.architectures import SERVED, VOCAB, build

GREEDY = SamplingParams(temperature=0.0, seed=0)
LENGTH = 100  # of a text, more than a tile
# In float32 the others keep the promise up to ties of 1e-6: experts get as many rows as the router sends them, and where values
# have another size than keys, another kernel multiplies them.
DENSE = [
    "llama",
    "qwen2",
    "qwen3",
    "gemma2",
    "gemma3_text",
    "mistral",
    "phi",
    "gpt2",
    "gpt_neox",
    "olmo2",
    "granite",
    "starcoder2",
]

pytestmark = pytest.mark.skipif(
    not (torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported()),
    reason="this processor has no bfloat16",
)


@pytest.fixture(autouse=True, params=[1, 2], ids=["1 thread", "2 threads"])
def threads(request: pytest.FixtureRequest) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(before)


def text(number: int, vocab_size: int) -> list[int]:
    return [(7919 * place + 104729 * number + 17) % vocab_size for place in range(LENGTH)]


def whole(model: Model, tokens: list[int]) -> Tensor:
    """Logits of a text that is scored at once, by itself."""
    return model.logits([Row(model.new_cache(), 0, tokens, len(tokens), GREEDY)])


def in_pieces(model: Model, tokens: list[int], rng: random.Random) -> Tensor:
    """The same in random pieces, behind wrong drafts that are rolled back, beside other texts."""
    others = [text(number, model.vocab_size) for number in (1, 2, 3)]
    stores, at, store = [model.new_cache() for _ in others], [0] * len(others), model.new_cache()
    found: list[Tensor] = []
    start = 0
    while start < len(tokens):
        n = min(rng.choice([1, 2, 3, 5, 12, 33]), len(tokens) - start)
        wrong = [rng.randrange(model.vocab_size) for _ in range(rng.randint(0, 5))]
        rows = [Row(store, start, [*tokens[start : start + n], *wrong], n + len(wrong), GREEDY)]
        for number, other in enumerate(others):
            size = min(rng.randint(0, 4), len(other) - at[number])
            if size:
                rows.append(Row(stores[number], at[number], other[at[number] : at[number] + size], size, GREEDY))
                at[number] += size
        found.append(model.logits(rows)[:n])
        start += n
    return torch.cat(found)


@pytest.mark.parametrize("name", [name for name in SERVED if name not in ("phi3-longrope", "granitemoe_swa")])
def test_bfloat16_logits_are_those_of_the_text_alone(name: str) -> None:
    """Guards texts in the dtype of real models: rounding that depends on companions makes them part at near-ties."""
    model = Model(build(name).to(torch.bfloat16), cache_tokens=4096)
    tokens = text(0, VOCAB)
    assert torch.equal(in_pieces(model, tokens, random.Random(name)), whole(model, tokens))


@pytest.mark.parametrize("name", DENSE)
def test_float32_logits_are_those_of_the_text_alone(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards the same in float32, where sizes are multiples of what the processor takes at once, as real ones are."""
    monkeypatch.setattr(packed_linear, "LARGE", 1)
    sizes = {"n_embd": 128} if "n_embd" in SERVED[name] else {"hidden_size": 128, "intermediate_size": 256, "head_dim": 32}
    model = Model(build(name, **sizes), cache_tokens=4096)
    tokens = text(0, VOCAB)
    assert torch.equal(in_pieces(model, tokens, random.Random(name)), whole(model, tokens))


def exact_dtypes() -> list[str]:
    """In which products of few rows have the bits of many: the oneDNN of PyTorch 2.11 adds up some in float32 otherwise."""
    noise = torch.Generator().manual_seed(0)
    rows, weight = torch.randn(16, 384, generator=noise), torch.randn(1024, 384, generator=noise)
    order = torch.ops.mkldnn._reorder_linear_weight(weight, packed_linear.EXPECTED_ROWS)
    few, many = (torch.ops.mkldnn._linear_pointwise(rows[:n], order, None, "none", [], "") for n in (4, 16))
    return ["float32", "bfloat16"] if torch.equal(few, many[:4]) else ["bfloat16"]


@cache
def embedded(dtype: str) -> Model:
    return Model.from_pretrained(family.paths()[-1], dtype=dtype, cache_tokens=4096)


@settings(max_examples=15, deadline=None)
@given(rng=st.randoms(use_true_random=False), dtype=st.sampled_from(exact_dtypes()))
def test_any_pieces_give_the_same_bits(rng: random.Random, dtype: str) -> None:
    """Guards the embedded full model against cuts, drafts and companions that examples miss."""
    model = embedded(dtype)
    tokens = [rng.randrange(50, 4000) for _ in range(rng.randint(1, 3 * TILE))]
    assert torch.equal(in_pieces(model, tokens, rng), whole(model, tokens))


@pytest.mark.parametrize("temperature", [0.0, 0.8, 1.5])
def test_bfloat16_texts_do_not_depend_on_tiers_or_companions(temperature: float) -> None:
    """Guards the first promise in bfloat16: the full model's text, whoever drafts and whoever shares its passes."""
    asked = [SamplingParams(max_tokens=40, temperature=temperature, seed=seed) for seed in range(4)]
    prompts = ["def parse(", "class Node:\n", "import os\n", "for line in "]
    with Cascade.demo(dtype="bfloat16") as cascade:
        alone = [
            cascade.generate(prompt, own, Speculation("off")).token_ids for prompt, own in zip(prompts, asked, strict=True)
        ]
        for tiers in (("tiny", "medium"), ("medium",)):
            for prompt, own, expected in zip(prompts, asked, alone, strict=True):
                crowd = [prompt, *prompts]
                assert cascade.generate(crowd, own, Speculation(tiers=tiers))[0].token_ids == expected
