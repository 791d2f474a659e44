"""LoRA adapters on the full tier, chosen by each request, and quantised tiers."""

import random
import shutil
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from operator import eq
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch import Tensor
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

from cascade import Cascade, InvalidRequest, ModelError, SamplingParams
from cascade.engine.adapter_folder import AdapterFolder
from cascade.engine.adapters import AdaptedModel
from cascade.engine.model import Model
from cascade.engine.tokenizer import Tokenizer
from cascade.errors import ConfigError
from cascade.scorer import Row
from cascade.settings.config import CascadeConfig
from tests import small
from tests.architectures import build

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing.*:FutureWarning"),  # peft's own
]
NAMES = ("", "red", "blue")
PROMPT = (5, 9, 2, 44, 17)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Adapters red and blue for the small Llama, and green for another model."""
    path = tmp_path_factory.mktemp("adapters")
    for seed, name in enumerate(("red", "blue", "green")):
        network: Any = build("llama", **({"hidden_size": 48} if name == "green" else {}))
        torch.manual_seed(seed)
        adapted = get_peft_model(network, LoraConfig(r=4, target_modules=["q_proj", "v_proj", "down_proj"]))
        for key, weight in adapted.named_parameters():
            if "lora" in key:
                torch.nn.init.normal_(weight, std=0.4)
        adapted.save_pretrained(path / name)
    return path


def adapted(folder: Path) -> AdaptedModel:
    return AdaptedModel(build("llama"), {name: str(folder / name) for name in NAMES if name})


def expected(folder: Path, name: str) -> list[int]:
    """What Transformers writes with the adapter merged into the weights."""
    network: Any = build("llama")
    if name:
        network = PeftModel.from_pretrained(network, folder / name).merge_and_unload()
    ids = torch.tensor([PROMPT])
    out: Tensor = network.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=20, do_sample=False)
    return out[0, len(PROMPT) :].tolist()


def tokenizer() -> Tokenizer:
    return Tokenizer.from_pretrained(small.paths()[0])


def test_every_request_gets_its_adapter(folder: Path) -> None:
    """Guards requests of different adapters in one pass against each other; tiers below draft without any."""
    texts = {name: expected(folder, name) for name in NAMES}
    assert len(set(map(tuple, texts.values()))) == 3
    with Cascade([Model(build("llama", seed=5)), Model(build("llama")), adapted(folder)], tokenizer()) as cascade:
        order = [random.Random(0).choice(NAMES) for _ in range(12)]
        streams = [
            cascade.stream(PROMPT, SamplingParams(max_tokens=20, temperature=0, ignore_eos=True, adapter=name))
            for name in order
        ]
        found: dict[int, list[int]] = {index: [] for index in range(len(order))}
        while streams_left := [(index, stream) for index, stream in enumerate(streams) if len(found[index]) < 20]:
            for index, stream in streams_left:
                found[index] += next(stream).token_ids
        assert [found[index] for index in range(len(order))] == [texts[name] for name in order]


def test_unknown_adapters_are_refused(folder: Path) -> None:
    """Guards requests that name what is not there: they must not get another model's text."""
    with (
        Cascade([adapted(folder)], tokenizer()) as cascade,
        pytest.raises(InvalidRequest, match="adapter is 'green': it must be one of red, blue"),
    ):
        cascade.generate(PROMPT, SamplingParams(adapter="green"))
    with (
        Cascade([Model(build("llama"))], tokenizer()) as cascade,
        pytest.raises(InvalidRequest, match="adapter is 'red': it must be empty"),
    ):
        cascade.generate(PROMPT, SamplingParams(adapter="red"))
    model = adapted(folder)
    with pytest.raises(ModelError, match="green"):
        model.run([Row(model.new_cache(), 0, PROMPT, 1, SamplingParams(seed=1, adapter="green"))])


def test_adapters_of_a_folder_are_loaded_when_they_are_asked_for(folder: Path, tmp_path: Path) -> None:
    """Guards adapters that come and go: never more than may be loaded, each request the text of its own.

    One that does not fit, or is not there, harms nobody but its request.
    """
    shelf = tmp_path / "shelf"
    shelf.mkdir()
    model = AdaptedModel(build("llama"), {}, folder=AdapterFolder(str(shelf)), most=1)
    assert not model._loaded
    params = [SamplingParams(max_tokens=20, temperature=0, ignore_eos=True, adapter=name) for name in (*NAMES, *NAMES)]
    with Cascade([Model(build("llama", seed=5)), model], tokenizer()) as cascade:
        capable = replace(cascade._capabilities, adapters=("red", "blue", "green", "none"))
        cascade._capabilities = capable
        before = cascade.generate(PROMPT, params[0])
        for name in ("red", "blue", "green"):
            shutil.copytree(folder / name, shelf / name)
        streams = [cascade.stream(PROMPT, one) for one in params]
        for name in ("green", "none"):
            with pytest.raises(InvalidRequest, match=name):
                cascade.generate(PROMPT, replace(params[0], adapter=name))
        texts = [[token for chunk in stream for token in chunk.token_ids] for stream in streams]
        assert texts == [expected(folder, one.adapter) for one in params]
        assert len(model._loaded) <= 1
        assert cascade.generate(PROMPT, params[0]).text == before.text  # type: ignore[union-attr]


@pytest.mark.parametrize("scheme", ["", "file://"])
def test_folders_say_what_they_have(folder: Path, scheme: str) -> None:
    """Guards names against ways out of the folder; a bucket is read as a folder is, through its own file system."""
    if scheme:
        pytest.importorskip("pyarrow", reason="pyarrow is not installed: it reads buckets")
    there = AdapterFolder(f"{scheme}{folder}")
    assert there.names() == ["blue", "green", "red"]
    assert [there.has(name) for name in ("red", "none", "../red", "red/..", "", ".")] == [True, *[False] * 5]
    there.fetch("red")
    there.fetch("none")
    assert (Path(there.place("red")) / "adapter_model.safetensors").read_bytes() == (
        folder / "red" / "adapter_model.safetensors"
    ).read_bytes()
    for name in ("none", f"../{folder.name}/red"):
        with pytest.raises(InvalidRequest, match="has none of this name"):
            there.place(name)


def test_folders_that_are_not_there_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards the start: a folder that is elsewhere, a bucket of an unknown kind, and a machine that cannot read buckets."""
    with pytest.raises(ConfigError, match="lora_path is '/nowhere', which is no folder here"):
        AdapterFolder("/nowhere")
    with pytest.raises(ConfigError, match="lora_path is 'what://b/c'"):
        AdapterFolder("what://b/c")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(ConfigError, match=r"cascade-serve\[buckets\]"):
        AdapterFolder("s3://b/c")


def test_adapters_that_do_not_fit_are_refused(folder: Path) -> None:
    """Guards the start: an adapter of another model, and one that is not there, in one sentence."""
    for name in ("green", "none"):
        with pytest.raises(ModelError, match=rf"The adapter '{name}' .*{name}") as caught:
            AdaptedModel(build("llama"), {name: str(folder / name)})
        assert "\n" not in str(caught.value)


def test_a_draft_tier_takes_no_folder_of_adapters() -> None:
    """Guards the configuration: what a lower tier would ignore is refused."""
    values = small.config().model_dump(mode="json")
    for tier in values["tiers"]:
        tier["engine_kwargs"]["lora_modules"] = {"red": "x/y"}
    assert CascadeConfig.parse(values).tiers[0].engine_kwargs.lora_modules == {"red": "x/y"}
    values["tiers"][0]["engine_kwargs"] |= {"lora_modules": {}, "lora_path": "x"}
    with pytest.raises(ConfigError, match="lora_path of tier 'tiny': only the full tier"):
        CascadeConfig.parse(values)


def test_quantised_checkpoints_are_served(tmp_path: Path) -> None:
    """Guards checkpoints in fewer bits, as Transformers writes them: a twin of a model nearly always says the same, in the
    memory of its bits."""
    source, folder = small.paths()[-1], str(tmp_path)
    bits = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.float32)
    AutoModelForCausalLM.from_pretrained(source, quantization_config=bits, device_map="cpu").save_pretrained(folder)
    tokenizer().backend.save_pretrained(folder)
    full = Model.from_pretrained(source, dtype="float32", device="cpu")
    packed = Model.from_pretrained(folder, dtype="float32", device="cpu")
    held, whole = (sum(weight.nbytes for weight in model._network.parameters()) for model in (packed, full))
    assert held < 0.45 * whole  # embeddings stay
    text = list(tokenizer().encode("def read(path):\n    with open(path) as file:\n        return file.read()\n"))
    greedy = SamplingParams(temperature=0, seed=0)
    own, others = ([*one.run([Row(one.new_cache(), 0, text, len(text), greedy)])[0].own] for one in (packed, full))
    assert sum(map(eq, own, others)) > 0.7 * len(text)


def test_adapters_of_a_shared_model_do_not_mix(folder: Path) -> None:
    """Guards tiers that share a model: between the choice of an adapter and its pass another thread chose another."""
    model = adapted(folder)
    params = [SamplingParams(temperature=1.0, seed=7, adapter=name) for name in NAMES]

    def said(one: SamplingParams) -> list[list[int]]:
        return [list(model.run([Row(model.new_cache(), 0, PROMPT, 3, one)])[0].own) for _ in range(10)]

    with ThreadPoolExecutor(len(params)) as threads:
        together = list(threads.map(said, params))
    assert together == [[said(one)[0]] * 10 for one in params]
