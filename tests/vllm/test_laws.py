"""A tier on vLLM keeps the laws of a pass.

The bits of logits depend on what shares a pass there, so what is compared with our own engine is compared closely, and texts
where no two tokens are as near as that.
"""

import json
import random
import shutil
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch import Tensor

from cascade import Cascade, SamplingParams, Speculation
from cascade.draft import Draft
from cascade.engine.adapter_folder import AdapterFolder
from cascade.engine.checkpoint import load
from cascade.engine.model import Model
from cascade.engine.tokenizer import Tokenizer
from cascade.engine.vllm.engine import CHOSEN
from cascade.engine.vllm.model import VllmModel
from cascade.engine.vllm.worker import CascadeWorker
from cascade.errors import ConfigError, ModelError
from cascade.scorer import BLOCK, Row
from cascade.settings.check import verify
from cascade.settings.config import CascadeConfig
from tests import small
from tests.architectures import VOCAB, build
from tests.books import check_pages
from tests.vllm.models import ARCHITECTURES, GREEDY, OPTIONS, WIDE, Pair, saved, started

PROMPTS = ["def read(path):\n", "import os\n\nclass Shape:\n", "for name in"]
BITS = 1e-3  # nats by which logits of one text differ from engine to engine


@dataclass
class Text:
    """What a session holds on both engines: chunks, wrong drafts and rollbacks leave it after."""

    stores: Sequence[Any]
    held: int = 0

    def row(self, rng: random.Random) -> list[Row]:
        start, n = rng.randint(0, self.held), rng.randint(1, 12)
        if start + n > 90:
            start = 0
        self.held = start + n
        tokens = [rng.randrange(VOCAB) for _ in range(n)]
        wanted = rng.randint(1, n)
        return [Row(store, start, tokens, wanted, GREEDY) for store in self.stores]


def scores_alike(pair: Pair, seed: int, passes: int = 30) -> None:
    """Random passes over three texts have the same logits on both engines, however they were written before."""
    rng = random.Random(seed)
    texts = [Text((pair.vllm.new_cache(), pair.own.new_cache())) for _ in range(3)]
    for _ in range(passes):
        rows = [text.row(rng) for text in rng.sample(texts, rng.randint(1, 3))]
        found, expected = (
            model.logits([row[place] for row in rows]).float() for place, model in enumerate((pair.vllm, pair.own))
        )
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    check_pages(pair.vllm._blocks, [text.stores[0] for text in texts])
    for text in texts:
        for store in text.stores:
            store.free()


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_passes_are_those_of_our_own_engine(name: str, tmp_path: Path) -> None:
    """Guards positions, slots and block tables on each architecture: chunks, companions and rollbacks change no logit."""
    source = saved(name, tmp_path)
    with closing(started(source)) as model:
        scores_alike(Pair(model, own_model(source)), seed=len(name))


def trees(rng: random.Random) -> Draft:
    size = rng.randint(1, 9)
    parents = tuple(rng.randint(-1, place - 1) for place in range(size))
    return Draft(tuple(rng.randrange(VOCAB) for _ in range(size)), bytes(size), b"", parents)


def test_nodes_of_trees_say_what_they_say_on_our_own_engine(pair: Pair) -> None:
    """Guards forks: a branch that sees another one, and a store that does not hold the path that was taken."""
    rng, params = random.Random(1), SamplingParams(temperature=0.8, seed=5)
    stores = [model.new_cache() for model in (pair.vllm, pair.own)]
    text, held = [rng.randrange(VOCAB) for _ in range(5)], 0
    while len(text) < 80:
        draft = trees(rng)
        found, expected = (
            model.run([Row(store, held, text[held:], 1, params, draft=draft, runner_ups=1)])[0]
            for model, store in zip((pair.vllm, pair.own), stores, strict=True)
        )
        for own, other, [second] in zip(found.own, expected.own, expected.runner_ups, strict=True):
            assert own == other or (own == second.token and second.gap < BITS)
        new = draft.walk(list(found.own))[0]
        if new != draft.walk(list(expected.own))[0]:  # the stores hold other paths from here on
            break
        held, text = len(text) + len(new) - 1, [*text, *new]
    for store in stores:
        store.free()
    check_pages(pair.vllm._blocks, [])


def test_a_library_on_vllm(cascades: tuple[Cascade, Cascade], monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards `from_pretrained`: all tiers on vLLM in one process, whose forward context is a global, write the same."""
    monkeypatch.setitem(CHOSEN, "enforce_eager", True)  # compiling both takes a minute
    params = SamplingParams(temperature=0.8, seed=3, max_tokens=32)
    with Cascade.from_pretrained(small.paths()[1:], dtype="float32", engine="vllm") as cascade:
        said = cascade.generate(PROMPTS, params, Speculation(tiers=("tiny",)))
    expected = cascades[1].generate(PROMPTS, params)
    assert [one.text for one in said] == [one.text for one in expected]


@pytest.fixture(scope="module")
def cascades() -> Iterator[tuple[Cascade, Cascade]]:
    """Three small models of real text, the full one on vLLM; and all of them on our own engine."""
    *lower, full = small.paths()
    tokenizer = Tokenizer.from_pretrained(full)
    drafts = [Model.from_pretrained(path, dtype="float32", device="cpu", cache_tokens=4096) for path in lower]
    with (
        closing(started(full, 16 * BLOCK * 8)) as model,
        Cascade([*drafts, model], tokenizer) as found,
        small.cascade() as expected,
    ):
        yield found, expected


@pytest.mark.parametrize(("mode", "temperature"), [("off", 0.0), ("auto", 0.8), ("tiny", 0.8), ("medium", 0.0)])
def test_a_cascade_writes_what_our_own_engine_writes(cascades: tuple[Cascade, Cascade], mode: str, temperature: float) -> None:
    """Guards the promise with a full tier on vLLM, whatever drafts: text drafters, tiers below, nothing."""
    found, expected = cascades
    params = SamplingParams(temperature=temperature, seed=7, max_tokens=48)
    speculation = Speculation(mode) if mode in ("off", "auto") else Speculation(tiers=(mode,))
    said = [one.text for one in found.generate(PROMPTS, params, speculation)]
    assert said == [expected.generate(prompt, params, Speculation("off")).text for prompt in PROMPTS]


@pytest.mark.parametrize("ahead", [False, True])
def test_shaped_requests_are_shaped(cascades: tuple[Cascade, Cascade], ahead: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards penalties, filters and log-probabilities after drafts, also where a tier tells them when the next pass has run."""
    model = cascades[0].tiers[-1]._runner._model
    monkeypatch.setattr(model, "_ahead", ahead)
    penalties: dict[str, Any] = {"presence_penalty": 0.7, "repetition_penalty": 1.2, "logit_bias": {40: 3.0}, "min_tokens": 10}
    filters: dict[str, Any] = {"top_k": 20, "top_p": 0.9, "min_p": 0.02, "logprobs": 3, "prompt_logprobs": 2}
    for shaped in ({}, {**penalties, **filters}):
        params = SamplingParams(temperature=0.8, seed=2, max_tokens=32, **shaped)
        for one, other in zip(*(each.generate(PROMPTS, params) for each in cascades), strict=True):
            assert one.text == other.text
            assert len(one.logprobs or ()) == len(other.logprobs or ()) == len(one.token_ids) * bool(shaped)
            for found, expected in zip(one.logprobs or (), other.logprobs or (), strict=True):
                assert found.logprob == pytest.approx(expected.logprob, abs=1e-2)


def test_nothing_is_left_to_compute_after_a_launch(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards GPUs against waiting for Python: a pass that is launched ahead needs no worker to be collected."""
    params, draft = SamplingParams(temperature=0.8, seed=5), Draft((6, 7), bytes(2))
    row = Row(pair.vllm.new_cache(), 0, [3, 4, 5], 1, params, draft=draft, runner_ups=1)
    expected = pair.vllm.run([row])
    monkeypatch.setattr(pair.vllm, "_ahead", True)
    launched = pair.vllm.launch([row])
    with monkeypatch.context() as without:
        without.setattr(pair.vllm, "_engine", None)
        assert pair.vllm.collect(launched) == expected


def own_model(source: str) -> Model:
    return Model.from_pretrained(source, dtype="float32", device="cpu", cache_tokens=1024)


def others(folder: Path) -> str:
    """Weights of the same shape as those of a `Pair`."""
    network = build("llama", **WIDE)
    torch.manual_seed(1)
    for weight in network.parameters():
        torch.nn.init.normal_(weight, std=0.2)
    network.save_pretrained(folder)
    return str(folder)


def test_two_ranks_write_what_one_writes(tmp_path: Path, pair: Pair) -> None:
    """Guards tensor parallelism: rows and new weights reach all ranks, logits come from the first, sampled there or here, and
    an error of the second rank is not its answer to the next call."""
    with closing(started(saved("llama", tmp_path / "first"), tensor_parallel_size=2)) as model:
        with pytest.raises(RuntimeError, match="LoRA is not enabled"):
            model._call("list_loras")
        scores_alike(Pair(model, pair.own), seed=5, passes=4)  # which take long on as few cores as ranks
        for params in (GREEDY, SamplingParams(temperature=0.8, seed=5, top_p=0.9)):
            said = []
            for each in (model, pair.own):
                row = Row(each.new_cache(), 0, [3, 4, 5], 1, params, draft=Draft((6, 7), bytes(2)), runner_ups=1)
                said.append(each.run([row])[0])
            assert list(said[0].own) == list(said[1].own)
        model.renew(others(tmp_path / "others"))
        scores_alike(Pair(model, own_model(str(tmp_path / "others"))), seed=6, passes=4)


def test_renewed_weights_are_those_of_a_fresh_model(tmp_path: Path, pair: Pair) -> None:
    """Guards drafters that learn: after new weights a pass is what they say, and those of another shape change nothing."""
    source = others(tmp_path / "others")
    with closing(started(saved("llama", tmp_path / "first"))) as model:
        with pytest.raises(ModelError, match=r"cannot replace others: .* differs"):
            model.renew(saved("qwen3", tmp_path / "wrong"))
        scores_alike(Pair(model, pair.own), seed=7)
        with ThreadPoolExecutor(1) as thread:
            renewing = thread.submit(model.renew, source)
            while not renewing.done():  # passes go on meanwhile
                model.logits([Row(model.new_cache(), 0, [3, 4, 5], 1, GREEDY)])
            renewing.result()
        scores_alike(Pair(model, own_model(source)), seed=8)


def test_a_draft_model_says_its_draft_vocabulary_alone(tmp_path: Path) -> None:
    """Guards tiers below on vLLM: tokens outside `draft_vocab.json`, which they never learnt, were guessed all the same."""
    folder, said = Path(saved("llama", tmp_path)), list(range(0, VOCAB, 3))
    read = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**read, "draft_vocab_size": len(said)}))
    (folder / "draft_vocab.json").write_text(json.dumps(said))
    draft: dict[str, Any] = {"cache_tokens": 1024, "draft": True, "options": dict(OPTIONS)}
    with closing(VllmModel(str(folder), **draft)) as model:
        own = Model(load(str(folder), dtype="float32", device="cpu", draft=True), cache_tokens=1024)
        scores_alike(Pair(model, own), seed=4)
    (folder / "draft_vocab.json").unlink()
    with pytest.raises(ModelError, match="has a draft vocabulary by its config"):
        VllmModel(str(folder), **draft)


def test_what_vllm_cannot_serve_is_named(tmp_path: Path) -> None:
    """Guards users and `cascade check` against vLLM's own errors: one sentence before anything is loaded."""
    for name, words in {
        "gpu_memory_utilisation": "no engine argument of",
        "enable_prefix_caching": "that a tier has no",
    }.items():
        with pytest.raises(ConfigError, match=f"{name} is .*{words}"):
            VllmModel("anything", options={name: 0.5})
    with pytest.raises(ModelError, match="vLLM cannot serve"):
        started(str(tmp_path))
    small_full = Path(small.paths()[-1])
    for name, problem in {"LlamaForCausalLM": None, "NobodysForCausalLM": "vLLM has no model for NobodysForCausalLM"}.items():
        shutil.copytree(small_full, tmp_path / name)
        read = json.loads((small_full / "config.json").read_text())
        (tmp_path / name / "config.json").write_text(json.dumps({**read, "architectures": [name]}))
        tier = {"name": "full", "model_loading_config": {"model_id": str(tmp_path / name)}, "engine_kwargs": {"engine": "vllm"}}
        with pytest.raises(ConfigError, match=problem) if problem else nullcontext():
            verify(CascadeConfig.parse({"tiers": [tier]}))


# passes that fail or hang in the middle of answers


def test_a_pass_that_failed_may_be_tried_again(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards blocks that are shared in part: their copies were made again by the second try, of what the first had written."""
    base, other = pair.vllm.new_cache(), pair.vllm.new_cache()
    base.reserve(64)
    expected = pair.vllm.logits([Row(base, 0, list(range(40)), 1, GREEDY)]).clone()
    other.reuse(base, 39)
    rows = [Row(base, 34, [7] * 6, 0, GREEDY), Row(other, 39, [39], 1, GREEDY)]
    forward = CascadeWorker._forward
    with monkeypatch.context() as patch:
        patch.setattr(CascadeWorker, "_forward", lambda *args: (forward(*args), 1 / 0))
        with pytest.raises(ZeroDivisionError):
            pair.vllm.run(rows)
    torch.testing.assert_close(pair.vllm.logits(rows), expected, rtol=1e-4, atol=1e-4)
    base.free()
    other.free()
    check_pages(pair.vllm._blocks, [])


# LoRA adapters: each row of a pass follows its own


NAMES = ("", "red", "blue")
PROMPT = list(range(5, 45))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model, adapters red and blue for it, and green of a higher rank than vLLM takes unless told."""
    path = tmp_path_factory.mktemp("adapters")
    saved("llama", path / "model")
    for seed, name in enumerate(("red", "blue", "green")):
        network: Any = build("llama", **WIDE)
        torch.manual_seed(seed)
        rank = 32 if name == "green" else 4
        adapted = get_peft_model(network, LoraConfig(r=rank, target_modules=["q_proj", "v_proj", "down_proj"]))
        for key, weight in adapted.named_parameters():
            if "lora" in key:
                torch.nn.init.normal_(weight, std=0.4)
        adapted.save_pretrained(path / name)
    return path


def expected(folder: Path, name: str) -> list[int]:
    """What Transformers writes with the adapter merged into the weights."""
    network: Any = build("llama", **WIDE)
    if name:
        network = PeftModel.from_pretrained(network, folder / name).merge_and_unload()
    ids = torch.tensor([PROMPT])
    written: Tensor = network.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=20, do_sample=False, eos_token_id=None
    )
    return written[0, len(PROMPT) :].tolist()


def test_requests_get_the_text_of_their_adapter(folder: Path) -> None:
    """Guards rows without an adapter, which on a CPU followed the last one that was loaded, and companions of another."""
    source, adapters = str(folder / "model"), {name: str(folder / name) for name in NAMES if name}
    params = [SamplingParams(temperature=0, max_tokens=20, ignore_eos=True, adapter=name) for name in (*NAMES, *NAMES)]
    options: dict[str, Any] = {"cache_tokens": 1024, "options": OPTIONS}
    with (
        closing(VllmModel(source, adapters=adapters, **options)) as model,
        closing(VllmModel(source, adapters={"red": adapters["red"]}, draft=True, **options)) as red,
        Cascade([red, Model(build("llama", **WIDE)), model], Tokenizer.from_pretrained(small.paths()[-1])) as cascade,
    ):
        streams = [cascade.stream(PROMPT, one, Speculation(tiers=cascade.names[:-1])) for one in params]
        texts = [[token for chunk in stream for token in chunk.token_ids] for stream in streams]
    assert texts == [expected(folder, one.adapter) for one in params]
    assert len(set(map(tuple, texts))) == len(NAMES)


def test_a_pass_reads_the_copy_of_an_adapter(folder: Path, tmp_path: Path) -> None:
    """Guards the sessions beside it: a pass read the adapter from the shared folder, however slow that was."""
    shutil.copytree(folder / "red", tmp_path / "red")
    adapters = AdapterFolder(str(tmp_path))
    adapters.place("red")
    shutil.rmtree(tmp_path / "red")
    params, start, text = SamplingParams(temperature=0, seed=0, adapter="red"), 0, list(PROMPT)
    with closing(VllmModel(str(folder / "model"), cache_tokens=1024, folder=adapters, most=1, options=OPTIONS)) as model:
        cache = model.new_cache()
        cache.reserve(len(PROMPT) + 20)
        for _ in range(20):
            [scored] = model.run([Row(cache, start, text[start:], 1, params)])
            start, text = len(text), [*text, *scored.own]
    assert text[len(PROMPT) :] == expected(folder, "red")


def test_adapters_that_vllm_refuses_are_named(folder: Path) -> None:
    """Guards the start: one sentence with the name, and with what to change."""
    with pytest.raises(ModelError, match=r"The adapter 'green' cannot be loaded from .*green.*max_lora_rank"):
        VllmModel(str(folder / "model"), cache_tokens=1024, adapters={"green": str(folder / "green")}, options=OPTIONS)
