"""On a CPU the bits of a text's logits depend on the text alone, so that near-ties are decided the same way in every pass.

What a model promises on the machine of the tests (`Model.same_bits`) is held; what it does not promise is skipped.
"""

import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from cascade import SamplingParams
from cascade.engine.model import Model
from cascade.engine.threads import limited
from cascade.scorer import Row
from tests.architectures import DEFAULT, SERVED, VOCAB, WRITTEN_OUT, build, each
from tests.cases import rare

GREEDY = SamplingParams(temperature=0.0, seed=0)
LENGTH = 100  # of a text, more than a tile
DENSE = [*WRITTEN_OUT, "gemma2", "gemma3_text", "phi", "gpt2", "olmo2", "granite"]

# an expert gets as many rows as the router sends it, and long RoPE depends on companions
PLAIN = [name for name, fields in SERVED.items() if name != "phi3-longrope" and not any("expert" in key for key in fields)]

pytestmark = pytest.mark.usefixtures("one_thread")


def cases(dtype: torch.dtype, names: Sequence[str], default: Sequence[str] = DEFAULT) -> list[Any]:
    """Names with a dtype; by default those that are in ``default``."""
    kind = str(dtype).removeprefix("torch.")
    return [pytest.param(*param.values, dtype, id=f"{param.id}, {kind}", marks=param.marks) for param in each(names, default)]


def promising(model: Model) -> Model:
    """The model, if it says that its logits keep their bits on this machine."""
    if not model.same_bits:
        pytest.skip(f"this machine does not promise it: {model.summary}")
    return model


def text(number: int, vocab_size: int) -> list[int]:
    return [(7919 * place + 104729 * number + 17) % vocab_size for place in range(LENGTH)]


def whole(model: Model, tokens: list[int]) -> Tensor:
    """Logits of a text that is scored at once, by itself."""
    return model.logits([Row(model.new_cache(), 0, tokens, len(tokens), GREEDY)])


def in_pieces(model: Model, tokens: list[int], rng: random.Random) -> Tensor:
    """The same in random pieces, after wrong drafts that are rolled back, beside other texts."""
    others = [text(number, model.vocab_size) for number in (1, 2, 3)]
    stores, at, store = [model.new_cache() for _ in others], [0] * len(others), model.new_cache()
    parts: list[Tensor] = []
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
        parts.append(model.logits(rows)[:n])
        start += n
    return torch.cat(parts)


def made(name: str, dtype: torch.dtype) -> Model:
    """In float32 of sizes that are multiples of what the processor takes at once, as real ones are."""
    sizes = {"n_embd": 128} if "n_embd" in SERVED[name] else {"hidden_size": 128, "intermediate_size": 256, "head_dim": 32}
    network = build(name, **sizes) if dtype is torch.float32 else build(name).to(dtype)
    return promising(Model(network, cache_tokens=4096))


BITS = cases(torch.bfloat16, PLAIN) + cases(
    torch.float32, DENSE, ("llama-untied-bias", "qwen2-sliding", "qwen3", "gemma2", "gpt2")
)


@pytest.mark.parametrize(("name", "dtype"), BITS)
def test_logits_are_those_of_the_text_alone(name: str, dtype: torch.dtype) -> None:
    """Guards texts in the dtype of real models: rounding that depends on companions makes them part at near-ties."""
    model = made(name, dtype)
    tokens = text(0, VOCAB)
    assert torch.equal(in_pieces(model, tokens, random.Random(name)), whole(model, tokens))


@pytest.mark.parametrize("name", ["qwen3", rare("gemma2"), rare("gpt2")])
def test_threads_change_no_bit(name: str) -> None:
    """Guards what threads share: a pass takes as many as it is worth."""
    model = made(name, torch.bfloat16)
    tokens = text(0, VOCAB)
    alone = whole(model, tokens)
    with limited(2):
        assert torch.equal(in_pieces(model, tokens, random.Random(name)), alone)


def test_a_model_without_the_promise_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards `Describe` on processors whose kernels for few rows round otherwise: the model is served, and promises nothing."""
    logits = Model.logits
    monkeypatch.setattr(Model, "logits", lambda model, rows: logits(model, rows) * (1 + sum(len(r.tokens) for r in rows) / 256))
    model = Model(build("llama").to(torch.bfloat16), cache_tokens=1024)
    assert not model.same_bits
    assert "logits may differ in their last bits from pass to pass" in model.summary
