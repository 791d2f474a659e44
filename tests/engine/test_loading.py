"""Checkpoints: what is told of them before they are loaded, how they are loaded, and what is refused."""

from collections.abc import Callable
from operator import eq
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from click.testing import CliRunner
from huggingface_hub import constants
from huggingface_hub.errors import LocalEntryNotFoundError
from safetensors.torch import load, save
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, BitsAndBytesConfig, LlamaConfig

from cascade import ModelError, SamplingParams
from cascade.cli.main import main
from cascade.engine import adapter_folder
from cascade.engine.adapter_folder import CONFIG, AdapterFolder
from cascade.engine.checkpoint import anatomy
from cascade.engine.generation import sampling_defaults
from cascade.engine.model import Model
from cascade.engine.model_config import read_config
from cascade.engine.tokenizer import Tokenizer, check_source
from cascade.engine.weights import INDEX
from cascade.errors import InvalidRequest
from cascade.scorer import Row
from tests import small
from tests.architectures import CONTEXT, VOCAB, build, config, each
from tests.engine.test_bits import whole as logits

GREEDY = SamplingParams(temperature=0.0, seed=0)
TEXT = [*range(3, 33)]


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """A model in several files."""
    build("llama").save_pretrained(tmp_path / "model", max_shard_size="20KB")
    return tmp_path / "model"


def shards(folder: Path) -> list[Path]:
    return sorted(folder.glob("model-*.safetensors"))


def test_checkpoint_becomes_the_same_model(checkpoint: Path, tmp_path: Path) -> None:
    """Guards loading: one file or several, dtype as asked or as saved, sizes from the configuration, weights untouched."""
    assert len(shards(checkpoint)) > 2
    loaded, built = Model.from_pretrained(str(checkpoint), device="cpu"), Model(build("llama"))
    assert torch.equal(logits(loaded, TEXT), logits(built, TEXT))
    assert (loaded.vocab_size, loaded.context_len, loaded.dtype) == (VOCAB, CONTEXT, torch.float32)
    build("llama").save_pretrained(tmp_path / "one")
    half = Model.from_pretrained(str(tmp_path / "one"), dtype="bfloat16", device="cpu")
    assert half.dtype is torch.bfloat16
    assert half.num_parameters == loaded.num_parameters


def changed(*, without: str = "nothing", **new: Tensor) -> Callable[[Path], object]:
    """Writes the checkpoint as one file, some of whose weights are others or are missing."""

    def change(folder: Path) -> None:
        build("llama").save_pretrained(folder)
        file = folder / "model.safetensors"
        weights = {name: weight.clone() for name, weight in load(file.read_bytes()).items() if without not in name}
        file.write_bytes(save(weights | {name.replace("__", "."): weight for name, weight in new.items()}, {"format": "pt"}))
        for shard in (folder / INDEX, *shards(folder)):
            shard.unlink()

    return change


def resized(change: Callable[[bytes], bytes]) -> Callable[[Path], object]:
    return lambda folder: shards(folder)[1].write_bytes(change(shards(folder)[1].read_bytes()))


@pytest.mark.parametrize(
    ("spoil", "options", "words"),
    [
        (lambda folder: (folder / "config.json").write_text("{"), {}, None),
        (changed(without="layers.1.self_attn"), {}, None),
        (changed(model__norm__weight=torch.ones(5)), {}, None),
        (changed(model__norm__weight=torch.full((32,), torch.nan)), {}, None),
        (lambda folder: shards(folder)[1].unlink(), {}, r"model-00002.*download it again$"),
        (resized(lambda content: content[:-100]), {}, r"model-00002.*download it again$"),
        (resized(lambda content: content + b"\0"), {}, r"model-00002.*download it again$"),
        (lambda folder: (folder / INDEX).write_text("{"), {}, rf"{INDEX}.*download it again$"),
        (lambda folder: (folder / INDEX).write_text("[]"), {}, rf"{INDEX}.*download it again$"),
        (str, {"source": "/nowhere/at/all"}, "/nowhere/at/all"),
        (str, {"dtype": "int3"}, "int3"),
        (str, {"device": "warp"}, "warp"),
    ],
)
def test_what_cannot_be_loaded_is_one_sentence(
    checkpoint: Path, spoil: Callable[[Path], object], options: dict[str, Any], words: str | None
) -> None:
    """Guards the start of a server: torch, safetensors and Transformers raise errors of their own, or make weights up."""
    spoil(checkpoint)
    with pytest.raises(ModelError, match=words) as caught:
        Model.from_pretrained(**{"source": str(checkpoint), "device": "cpu", **options})
    assert "\n" not in str(caught.value)


def test_weights_without_room_are_refused(tmp_path: Path) -> None:
    """Guards the host: a model larger than its memory must be refused before the first weight, not killed in the middle."""
    with pytest.raises(ModelError, match=r"take 7\d\d\.\d\d GiB and cpu has .* GiB free: take a larger device") as caught:
        Model.from_pretrained(large(tmp_path), dtype="bfloat16", device="cpu")
    assert "\n" not in str(caught.value)
    assert anatomy(str(tmp_path)).cache_bytes_per_token == 2 * 8 * 128 * 2 * 2


@pytest.mark.parametrize("name", each())
def test_anatomy_is_that_of_the_loaded_model(name: str, tmp_path: Path) -> None:
    """Guards `cascade check` and the planner: what is told before loading must be what is held afterwards."""
    config(name).save_pretrained(tmp_path)
    network = build(name)
    model = Model(network)
    cache = model.new_cache()
    model.logits([Row(cache, 0, TEXT, 1, GREEDY)])
    held = sum(shape.kv_heads * (shape.key_size + shape.value_size) * 4 for shape in cache.shapes.values())
    described = anatomy(str(tmp_path), dtype="float32")
    assert described.parameters == model.num_parameters
    assert described.weight_bytes == sum(weight.nbytes for weight in network.parameters())
    assert described.cache_bytes_per_token == held
    assert described.context_len == model.context_len


# cascade check


def large(folder: Path) -> str:
    """A model of 750 GiB without its weights, with a tokenizer."""
    sizes = {"vocab_size": small.VOCAB, "hidden_size": 131_072, "intermediate_size": 425_984, "num_hidden_layers": 2}
    LlamaConfig(**sizes, num_attention_heads=1024, num_key_value_heads=8, dtype="bfloat16").save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).write_bytes(Path(small.paths()[0], name).read_bytes())
    return str(folder)


def test_check_refuses_in_a_sentence(tmp_path: Path, checkpoint: Path) -> None:
    """Guards scripts that check before they deploy: status 1, and the reason after the table."""
    source, big = ({"model_id": "m", "model_source": str(path)} for path in (checkpoint, large(tmp_path / "large")))
    for changes, words in (
        ({"model_loading_config": source}, "No tokenizer can be loaded"),
        ({"accelerator_type": "A100-80G", "model_loading_config": big, "engine_kwargs": {}}, "A100-80G offers 72.00 GiB"),
    ):
        values = small.config().model_dump(mode="json")
        values["tiers"][-1] |= changes
        (tmp_path / "c.yaml").write_text(yaml.safe_dump(values))
        result = CliRunner(env={"COLUMNS": "200"}).invoke(main, ["check", str(tmp_path / "c.yaml")])
        assert result.exit_code == 1
        assert words in result.output.splitlines()[-1]


# the hub


@pytest.mark.parametrize(("revision", "seed"), [(None, 0), ("v2", 1), ("b" * 40, 1)])
def test_models_come_from_the_hub_at_a_revision(
    revision: str | None, seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards hub ids: the shards of the branch or commit that is named, and none of another."""
    cached = tmp_path / "models--some--model"
    (cached / "refs").mkdir(parents=True)
    for place, branch in enumerate(("main", "v2")):
        commit = "ab"[place] * 40
        build("llama", seed=place).save_pretrained(cached / "snapshots" / commit, max_shard_size="60KB")
        (cached / "refs" / branch).write_text(commit)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    model = Model.from_pretrained("some/model", revision=revision, device="cpu", num_threads=1)
    assert torch.equal(logits(model, TEXT), logits(Model(build("llama", seed=seed), num_threads=1), TEXT))


def test_a_hub_out_of_reach_is_told_at_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Guards a misspelt name on a machine without a network: the hub was tried six times, in half a minute."""
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")  # where nobody listens
    monkeypatch.setenv("NO_PROXY", "*")
    monkeypatch.setattr("time.sleep", lambda seconds: pytest.fail("it waits to try again"))
    with pytest.raises(ModelError, match=r"'Qwen/Qwne3-0.6B' is no folder here, nothing of it is in the cache, and the hub"):
        read_config("Qwen/Qwne3-0.6B")
    (tmp_path / "models--Qwen--Qwne3-0.6B").mkdir()
    check_source("Qwen/Qwne3-0.6B")  # the cache may have all that is needed


def test_a_file_that_the_hub_may_have_is_not_taken_for_absent(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards end tokens and sampling defaults against a hub that is out of reach: the model had none, without a word."""

    def unreached(*names: str, **options: Any) -> str:
        raise LocalEntryNotFoundError("no connection")

    monkeypatch.setattr("huggingface_hub.hf_hub_download", unreached)
    with pytest.raises(ModelError, match=r"^generation_config.json of 'some/model' cannot be read: no connection$"):
        sampling_defaults("some/model")
    with monkeypatch.context() as patch:
        patch.setattr(constants, "HF_HUB_OFFLINE", True)  # what is cached is all that there is
        assert sampling_defaults("some/model") == {}
    monkeypatch.setattr("huggingface_hub.try_to_load_from_cache", lambda *names, **options: object())  # known to be absent
    assert sampling_defaults("some/model") == {}


def test_quantised_checkpoints_are_served(tmp_path: Path) -> None:
    """Guards checkpoints in fewer bits: a twin of a model nearly always says the same, in the memory of its bits."""
    source, folder = small.paths()[-1], str(tmp_path)
    bits = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.float32)
    AutoModelForCausalLM.from_pretrained(source, quantization_config=bits, device_map="cpu").save_pretrained(folder)
    AutoTokenizer.from_pretrained(source).save_pretrained(folder)
    full = Model.from_pretrained(source, dtype="float32", device="cpu")
    packed = Model.from_pretrained(folder, dtype="float32", device="cpu")
    held = sum(weight.nbytes for weight in packed.network.module.parameters())
    assert held < 0.45 * 4 * full.num_parameters  # embeddings stay
    text = list(
        Tokenizer.from_pretrained(source).encode("def read(path):\n    with open(path) as file:\n        return file\n")
    )
    own, others = ([*model.run([Row(model.new_cache(), 0, text, len(text), GREEDY)])[0].own] for model in (packed, full))
    assert sum(map(eq, own, others)) > 0.7 * len(text)


# adapters in a shared folder


def test_an_adapter_is_copied_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards passes against a shared folder that is slow or gone, the disk against old copies, and what is outside of it."""
    monkeypatch.setattr(adapter_folder, "MAX_COPIES", 2)
    folder = AdapterFolder(str(tmp_path))
    for name in ("red", "blue", "green"):
        (tmp_path / name).mkdir()
        (tmp_path / name / CONFIG).write_text(name)
    red, blue = Path(folder.place("red")), Path(folder.place("blue"))
    (tmp_path / "red" / CONFIG).unlink()
    assert folder.place("red") == str(red)
    assert (red / CONFIG).read_text() == "red"
    folder.place("green")
    assert (red.exists(), blue.exists()) == (True, False)
    assert Path(folder.place("blue"), CONFIG).read_text() == "blue"
    for name in ("red", "", "..", "blue/..", "yellow"):
        with pytest.raises(InvalidRequest, match="has none of this name"):
            folder.place(name)
