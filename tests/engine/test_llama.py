"""The Llama family written out: memory that passes share, weights that are given up, and models that it is not for.

Its logits and their bits are held in `test_pass.py` and `test_bits.py`.
"""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from cascade.engine.loading import load
from cascade.engine.model import Model
from cascade.engine.network.llama import is_written_out
from cascade.engine.network.plain import Plain
from cascade.engine.network.survey import Survey, agree
from cascade.params import SamplingParams
from cascade.scorer import Row
from tests.architectures import VOCAB, WRITTEN_OUT, build
from tests.engine.test_pass import served

GREEDY = SamplingParams(temperature=0.0, seed=0)
TEXT = tuple((7 * place + 3) % VOCAB for place in range(100))

pytestmark = pytest.mark.usefixtures("one_thread")


def scored(model: Model, *pieces: tuple[int, int], store: Any = None) -> Tensor:
    """Logits of parts of the text, one pass each."""
    store = store or model.new_cache()
    return torch.cat([model.logits([Row(store, start, TEXT[start:end], end - start, GREEDY)]) for start, end in pieces])


def test_logits_stay_when_other_passes_follow() -> None:
    """Guards the memory that passes share."""
    model = served("qwen3")
    found = [scored(model, (0, length)) for length in (1, 30, 2, 1, 48, 3, 33, 1)]
    expected = [scored(model, (0, len(one))) for one in found]
    assert all(map(torch.equal, found, expected))


def test_a_model_may_be_asked_by_several_threads() -> None:
    """Guards tiers that share a model: their threads' passes wrote into the same memory, and texts were not the model's."""
    model = Model(build("llama"), cache_tokens=8192, num_threads=1)
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
    given = build(name)
    model = Model(given, cache_tokens=1024, owned=True, num_threads=1)
    assert {weight.device.type for weight in given.model.layers.parameters()} == {"meta"}
    assert model.num_parameters == served(name).num_parameters
    assert torch.equal(scored(model, (0, 20)), scored(served(name), (0, 20)))
    with torch.inference_mode():
        states = given.get_input_embeddings()(torch.tensor(TEXT[:3]))
        expected = torch.nn.functional.linear(states, build(name).lm_head.weight)
        torch.testing.assert_close(given.get_output_embeddings()(states), expected, rtol=1e-4, atol=1e-4)


def test_the_family_is_known() -> None:
    """Guards speed: a model of the family that runs as Transformers wrote it says the same, much later."""
    assert all(is_written_out(build(name)) for name in WRITTEN_OUT)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", WRITTEN_OUT)
def test_plain_networks_are_those_of_transformers(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    """Guards the reference of the probe: a checkpoint is read as Transformers reads it, and says the same, beyond its windows.

    Loading took seconds, most of which went by while the code of Transformers' models was imported.
    """
    build(name).to(dtype).save_pretrained(tmp_path)
    plain, published = (load(str(tmp_path), device="cpu", trainable=trainable) for trainable in (False, True))
    assert isinstance(plain, Plain)
    ids = torch.tensor([TEXT[:40], TEXT[60:]])
    with torch.inference_mode():
        expected = published(input_ids=ids, use_cache=False).logits
    assert agree(plain, plain(ids), expected)
    assert plain.num_parameters() == published.num_parameters()
    model, other = Model(plain, cache_tokens=1024, num_threads=1), Model(published, cache_tokens=1024, num_threads=1)
    assert torch.equal(scored(model, (0, 60)), scored(other, (0, 60)))
    assert plain.survey == Survey.of(published)


@pytest.mark.parametrize("surplus", ["tied, and the same", "tied, and other", "missing", "old frequencies"])
def test_only_checkpoints_with_exactly_its_weights_are_plain(surplus: str, tmp_path: Path) -> None:
    """Guards files that Transformers reads in its own way: an output embedding that differs though it should be tied, names."""
    published = build("llama", tie_word_embeddings=True)
    published.save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    weights = load_file(file)
    embedding = weights["model.embed_tokens.weight"]
    if surplus.startswith("tied"):
        weights["lm_head.weight"] = embedding + (surplus == "tied, and other")
    elif surplus == "missing":
        weights = {name.removeprefix("model."): weight for name, weight in weights.items()}
    else:
        weights["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(4)
    save_file({name: weight.clone() for name, weight in weights.items()}, file, metadata={"format": "pt"})
    assert isinstance(load(str(tmp_path), device="cpu"), Plain) == (surplus in ("tied, and the same", "old frequencies"))


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
