"""Heads beside a tier on vLLM: what they guess, whatever was rolled back or preempted, and no other text."""

import json
import random
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from benchmarks.prompts import chats
from cascade import Cascade, SamplingParams, Speculation, family
from cascade.draft import num_same
from cascade.drafters import DrafterSpec
from cascade.engine.tokenizer import Tokenizer
from cascade.engine.vllm.engine import weight_bytes
from cascade.engine.vllm.model import VllmModel
from cascade.engine.weights import shapes
from cascade.errors import ModelError
from cascade.family.packed import widened
from cascade.planner.cost import Profile
from cascade.scorer import Row, Scored
from cascade.settings.check import needs
from cascade.settings.config import CascadeConfig
from tests import small
from tests.books import check_pages
from tests.vllm.models import GREEDY, OPTIONS

LONG = "import json\nimport os\n\n\ndef main():\n" * 48  # more than a pass takes: it is read in chunks
PROMPTS = ["def read(path):\n", "import os\n\nclass Shape:\n", "for name in", LONG]
SIZE, VOCAB, LAYERS, WIDE = 384, 4096, 6, 512  # of the model
KINDS = ("eagle3", "medusa", "mtp")  # EAGLE's first version reads what MTP does
END = 2  # of a turn
FLOAT32 = {"dtype": "float32"}
HEAD = Path(__file__).parent / "weights" / "smollm2-eagle3"  # of the demonstration's full model, in 8 bits
# share of positions at which the first guess, the first two, three, four are right, with the same weights on an engine that is
# not vLLM's: 12 chats of 60 tokens
ACCEPTED = {0.0: (0.297, 0.122, 0.067, 0.040), 0.7: (0.303, 0.118, 0.039, 0.015)}


def config_of(folder: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((Path(folder) / "config.json").read_text())
    return found


def layer() -> dict[str, torch.Size]:
    first, weights = "model.layers.0.", load_file(Path(small.paths()[-1]) / "model.safetensors")
    return {name.removeprefix(first): part.shape for name, part in weights.items() if name.startswith(first)}


def random_weights(shapes: Mapping[str, Sequence[int]]) -> dict[str, torch.Tensor]:
    """Norms are ones."""
    noise = torch.Generator().manual_seed(0)
    return {
        name: torch.ones(shape) if len(shape) == 1 else torch.randn(shape, generator=noise) * shape[-1] ** -0.5
        for name, shape in shapes.items()
    }


def random_head(kind: str, folder: Path) -> str:
    """A head of the model with random weights, under the names that its authors give them; of MTP with the model."""
    shapes: dict[str, Sequence[int]] = {}
    if kind == "mtp":
        return with_further_layer(folder)
    if kind == "medusa":
        for number in range(3):
            shapes |= {f"blocks.{number}.layers.0.weight": (SIZE, SIZE), f"lm_heads.{number}.weight": (VOCAB, SIZE)}
        sizes = {"hidden_size": SIZE, "vocab_size": VOCAB, "num_heads": 3, "num_hidden_layers": 1}
        return written(folder, random_weights(shapes), sizes | {"model_type": "medusa", "architectures": ["MedusaModel"]})
    published, config = load_file(Path(small.head()) / "model.safetensors"), config_of(small.head())
    shapes = {name: part.shape for name, part in published.items() if name not in ("d2t", "t2d")}
    del config["draft_vocab_size"]
    return written(folder, random_weights({**shapes, "lm_head.weight": (VOCAB, SIZE)}), config)


def written(folder: Path, weights: Mapping[str, torch.Tensor], config: Mapping[str, Any]) -> str:
    folder.mkdir(parents=True, exist_ok=True)
    save_file({name: part.contiguous() for name, part in weights.items()}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


def with_further_layer(folder: Path, **own: torch.Tensor) -> str:
    """The model as one of MiMo's kind, with a layer that predicts a further token; random where it is not its ``own``.

    MiMo's layers are Llama's with biases, which are zero here: it says what the model says.
    """
    weights = {name: part.float() for name, part in load_file(Path(small.paths()[-1]) / "model.safetensors").items()}
    norms = ("token_layernorm.weight", "hidden_layernorm.weight", "final_layernorm.weight")
    further = random_weights({**layer(), "input_proj.weight": (SIZE, 2 * SIZE)} | dict.fromkeys(norms, (SIZE,)))
    for name, made in further.items():
        weights[f"model.mtp_layers.0.{name}"] = own.get(name.removesuffix(".weight").rpartition(".")[2], made)
    for name in [name for name in weights if name.endswith(("q_proj.weight", "k_proj.weight", "v_proj.weight"))]:
        weights[name.replace(".weight", ".bias")] = torch.zeros(len(weights[name]))
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"].clone()
    config = config_of(small.paths()[-1]) | {"model_type": "qwen2", "architectures": ["MiMoForCausalLM"]}
    return written(folder, weights, config | {"num_nextn_predict_layers": 1, "tie_word_embeddings": False})


def started(kind: str, source: str, cache_tokens: int = 4096, **options: Any) -> VllmModel:
    model, head = (source, "") if kind == "mtp" else (small.paths()[-1], source)
    return VllmModel(model, cache_tokens=cache_tokens, drafter=DrafterSpec(kind, head), options={**OPTIONS, **options})


@pytest.fixture(scope="module")
def expected() -> Iterator[Cascade]:
    with Cascade.from_pretrained(small.paths()[-1:], dtype="float32", device="cpu", drafter=None) as cascade:
        yield cascade


@pytest.fixture(scope="module")
def trained() -> Iterator[VllmModel]:
    with closing(started("eagle3", small.head())) as model:
        yield model


def accepted(model: VllmModel, temperature: float, tokens: int = 60) -> list[float]:
    """Shares of positions of twelve chats at which the first guesses are what the model says, by how many."""
    size = len(ACCEPTED[temperature])
    right, positions = [0] * size, 0
    for seed, prompt in enumerate(chats(2)[:12], 1):
        params, text, drafts, cache = SamplingParams(temperature=temperature, seed=seed), [*prompt], [], model.new_cache()
        cache.reserve(len(prompt) + tokens + 8)
        start = 0
        while len(text) < len(prompt) + tokens and text[-1:] != [END]:
            [scored] = model.run([Row(cache, start, text[start:], 1, params, guesses=size)])
            start = len(text)
            text.append(scored.own[0])
            drafts.append(scored.draft.tokens)
        cache.free()
        for place, draft in enumerate(drafts, len(prompt) + 1):
            if place + size <= len(text):
                same = num_same(draft, text[place:])
                right = [count + (same > number) for number, count in enumerate(right)]
                positions += 1
    return [count / positions for count in right]


@pytest.mark.slow
@pytest.mark.parametrize("temperature", sorted(ACCEPTED))
def test_a_published_head_is_as_often_right_as_elsewhere(temperature: float, tmp_path: Path) -> None:
    """Guards hidden states that are off by a layer or a position, and the noise: a head would guess, and rarely be right."""
    shutil.copy(HEAD / "config.json", tmp_path)
    save_file(widened(load_file(HEAD / "model.safetensors")), tmp_path / "model.safetensors")
    options: dict[str, Any] = {"cache_tokens": 4096, "options": {**OPTIONS, "max_model_len": 1024}}
    with closing(VllmModel(family.full(), drafter=DrafterSpec("eagle3", str(tmp_path)), **options)) as model:
        assert accepted(model, temperature) == pytest.approx(ACCEPTED[temperature], abs=0.02)


def texts(cascade: Cascade, params: SamplingParams, speculation: Speculation) -> list[list[int]]:
    return [list(one.token_ids) for one in cascade.generate(PROMPTS, params, speculation)]


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_a_trained_head_changes_no_text(
    trained: VllmModel, expected: Cascade, temperature: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards the promise with a head that is mostly right, alone and in one tree with a text drafter; it is asked and used."""
    # guesses cost nothing at first: timed on a busy machine they might never pay
    monkeypatch.setattr("cascade.local.measure", lambda *args, **options: Profile(((1, 0.01), (64, 0.01))))
    params = SamplingParams(temperature=temperature, seed=7, max_tokens=40, ignore_eos=True)
    said = texts(expected, params, Speculation("off"))
    with Cascade([trained], Tokenizer.from_pretrained(small.paths()[-1]), drafter="suffix") as cascade:
        assert len(cascade.tokenizer.encode(LONG)) > 512
        assert cascade.names == ("suffix", "eagle3", "full")
        for tiers in (("eagle3",), ("eagle3", "suffix"), ("suffix",), None):
            assert texts(cascade, params, Speculation(tiers=tiers)) == said
        edges = [edge for one in cascade.generate(PROMPTS, params, Speculation(tiers=("eagle3",))) for edge in one.stats.edges]
        assert sum(edge.accepted for edge in edges if edge.drafter == "eagle3")
    check_pages(trained._blocks, [])


@pytest.mark.parametrize("kind", KINDS)
def test_a_random_head_changes_no_text(kind: str, expected: Cascade, tmp_path: Path) -> None:
    """Guards rollbacks of a head's layers, prefix hits and preemption: with guesses that are all wrong no text changes."""
    rng, params = random.Random(3), SamplingParams(temperature=0.8, seed=9, max_tokens=24, ignore_eos=True)
    common = [rng.randrange(VOCAB) for _ in range(40)]
    prompts = [[*common[: rng.choice([20, 33, 40])], *(rng.randrange(VOCAB) for _ in range(4))] for _ in range(8)]
    with closing(started(kind, random_head(kind, tmp_path / kind), 6 * 32, max_model_len=96)) as model:
        with Cascade([model], Tokenizer.from_pretrained(small.paths()[-1]), drafter=None) as cascade:
            said = [one.token_ids for one in cascade.generate(prompts, params, Speculation(tiers=(kind,)))]
            [tier] = cascade.tiers
            assert tier.kv_admission.preempted
            assert tier.kv_admission.block_manager.reused
        check_pages(model._blocks, [])
    assert said == [one.token_ids for one in expected.generate(prompts, params, Speculation("off"))]


def test_guesses_do_not_depend_on_chunks_and_companions(trained: VllmModel) -> None:
    """Guards places in a pass: what a head reads of one text lies beside others', in any order and in pieces."""
    rng = random.Random(1)
    prompts = [[rng.randrange(VOCAB) for _ in range(size)] for size in (9, 40, 17)]

    def guess(together: bool) -> list[tuple[int, ...]]:
        stores, rows = [], []
        for prompt in prompts:
            stores.append(trained.new_cache())
            stores[-1].reserve(96)
            rows.append(Row(stores[-1], 0, prompt, 1, GREEDY, guesses=3))
        found = trained.run(rows) if together else [trained.run([row])[0] for row in rows]
        for store in stores:
            store.free()
        return [one.draft.tokens for one in found]

    assert guess(together=True) == guess(together=False)
    assert all(len(draft) == 3 for draft in guess(together=True))


def scored(kind: str, source: str) -> Scored:
    """What a model says after a short prompt, with three guesses of a head."""
    with closing(started(kind, source)) as model:
        store = model.new_cache()
        store.reserve(64)
        [found] = model.run([Row(store, 0, [5, 6, 7, 8], 1, GREEDY, guesses=3)])
        store.free()
    return found


def test_medusa_reads_the_last_token(tmp_path: Path) -> None:
    """Guards Medusa's place: with an empty block and the model's own embedding a head says the token that the model says."""
    folder = Path(random_head("medusa", tmp_path / "medusa"))
    weights = load_file(folder / "model.safetensors")
    embedding = load_file(Path(small.paths()[-1]) / "model.safetensors")["model.embed_tokens.weight"].float()
    weights |= {name: torch.zeros_like(part) for name, part in weights.items() if name.startswith("blocks.")}
    weights |= {name: embedding.clone() for name in weights if name.startswith("lm_heads.")}
    save_file(weights, folder / "model.safetensors")
    found = scored("medusa", str(folder))
    assert found.draft.tokens == (found.own[0],) * 3


@pytest.mark.parametrize("passed", ["state", "token"])
def test_a_further_layer_reads_the_state_and_the_token_after_it(tmp_path: Path, passed: str) -> None:
    """Guards MTP's places: a layer that passes the state on says what the model says, one that passes the token on does not."""
    full = load_file(Path(small.paths()[-1]) / "model.safetensors")
    embedding, norm = full["model.embed_tokens.weight"].float(), full["model.norm.weight"].float()
    empty = {"o_proj": torch.zeros(SIZE, SIZE), "down_proj": torch.zeros(SIZE, WIDE), "final_layernorm": norm}
    projection = torch.eye(SIZE, 2 * SIZE).roll(SIZE * (passed == "token"), 1)
    found = scored("mtp", with_further_layer(tmp_path, input_proj=projection, **empty))
    of_token = (embedding @ (norm * embedding[found.own[0]])).argmax().item()
    assert found.draft.tokens[0] == (found.own[0] if passed == "state" else of_token)
    assert len(found.draft.tokens) == 3


def test_a_head_takes_memory(tmp_path: Path) -> None:
    """Guards tiers that share a GPU, and `cascade check`: both forgot a head, and layers that predict further tokens."""
    source, eagle = with_further_layer(tmp_path / "mtp"), random_head("eagle3", tmp_path / "eagle3")
    alone = weight_bytes(source, FLOAT32, (), None)
    layer = sum(prod(shape) for name, shape in shapes(source).items() if ".mtp_layers." in name)
    head = sum(prod(shape) for shape in shapes(eagle).values())
    for drafter, number in ((DrafterSpec("mtp"), layer), (DrafterSpec("eagle3", eagle), head)):
        assert number > 100_000
        assert weight_bytes(source, FLOAT32, (), drafter) == alone + 4 * number
        options = {"engine": "vllm", "drafter": {"kind": drafter.kind, "source": drafter.source or None}, **FLOAT32}
        tier = {"name": "full", "model_loading_config": {"model_id": source}, "engine_kwargs": options}
        [need] = needs(CascadeConfig.parse({"tiers": [tier]}))
        assert need.drafter_bytes == 4 * number
        assert need.cache_bytes_per_token * LAYERS == need.anatomy.cache_bytes_per_token * (LAYERS + 1)


@pytest.mark.parametrize(
    ("kind", "change", "words"),
    [
        ("mtp", "mtp_layers", "The drafter 'mtp' cannot be used: the model's files hold no layers"),
        ("mtp", "input_proj.weight", r"input_proj"),
        ("eagle3", "fc.weight", r"lacks the tensor fc\.weight"),
        ("eagle3", {"t2d": torch.zeros(VOCAB + 8, dtype=torch.bool)}, "a vocabulary of 4104 tokens, and the model's has 4096"),
        ("eagle3", {"fc.weight": torch.zeros(SIZE, 3 * 128)}, "for a hidden size of 128, and the model's is 384"),
    ],
)
def test_a_head_that_does_not_fit_is_refused(kind: str, change: Any, words: str, tmp_path: Path) -> None:
    """Guards starts: vLLM loads heads with missing tensors as they happen to be in memory, and fails late on wrong shapes."""
    folder = Path(random_head(kind, tmp_path / kind))
    weights = load_file(folder / "model.safetensors")
    left = {name: part for name, part in weights.items() if isinstance(change, dict) or change not in name}
    save_file(left | change if isinstance(change, dict) else left, folder / "model.safetensors")
    with pytest.raises(ModelError, match=words):
        started(kind, str(folder))
