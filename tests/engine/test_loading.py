"""Checkpoints: what is told of them before they are loaded, how they or parts of them are loaded, and what is refused."""

import gc
import json
import shutil
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
from safetensors.torch import load as load_bytes
from safetensors.torch import save, save_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer, BitsAndBytesConfig, LlamaConfig

from cascade import Cascade, ConfigError, ModelError, SamplingParams
from cascade.cli.main import main
from cascade.engine import adapter_folder
from cascade.engine.adapter_folder import CONFIG, AdapterFolder
from cascade.engine.checkpoint import anatomy, load
from cascade.engine.draft_vocab import FILE
from cascade.engine.generation import sampling_defaults
from cascade.engine.layers import numbers, shown
from cascade.engine.model import Model
from cascade.engine.model_config import read_config
from cascade.engine.tokenizer import Tokenizer, check_source
from cascade.engine.weights import INDEX
from cascade.errors import InvalidRequest
from cascade.scorer import Row
from tests import small
from tests.architectures import CONTEXT, VOCAB, build, config, each
from tests.engine.test_pass import whole as logits

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
        weights = {name: weight.clone() for name, weight in load_bytes(file.read_bytes()).items() if without not in name}
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
    paths = checkpoint, large(tmp_path / "large"), tmp_path / "bare"
    source, big, bare = ({"model_id": "m", "model_source": str(path)} for path in paths)
    shutil.copytree(small.paths()[-1], paths[-1], ignore=shutil.ignore_patterns("*.safetensors"))
    for changes, words in (
        ({"model_loading_config": source}, "No tokenizer can be loaded"),
        ({"accelerator_type": "A100-80G", "model_loading_config": big, "engine_kwargs": {}}, "A100-80G offers 72.00 GiB"),
        ({"model_loading_config": bare}, f"model_source of tier full is '{paths[-1]}', a folder without weights"),
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


# tiers that are a part of a model


KEPT = (0, 2, 3)
FOUR: dict[str, dict[str, Any]] = {  # of each kind of network: ours, Transformers' with windows, experts, other names
    "llama-untied-bias": {},
    "qwen2-sliding": {"layer_types": ["full_attention", "sliding_attention", "sliding_attention", "full_attention"]},
    "gemma2": {"layer_types": ["sliding_attention", "full_attention", "full_attention", "sliding_attention"]},
    "mixtral": {},
    "smollm3": {"no_rope_layers": [1, 1, 0, 1]},
    "gpt2": {"n_layer": 4},
}
OPTIONS: dict[str, Any] = {"dtype": "float32", "device": "cpu", "drafter": None}


@pytest.mark.parametrize("name", FOUR)
def test_a_model_of_some_layers_is_the_model_without_the_others(name: str, tmp_path: Path) -> None:
    """Guards which layers run, their numbers, windows and weights: read alone from a checkpoint, or shared with the whole."""
    network = build(name, **{"num_hidden_layers": 4, **FOUR[name]})
    network.save_pretrained(tmp_path)
    alone = Model(load(str(tmp_path), dtype="float32", device="cpu", layers=KEPT))
    whole = Model.from_pretrained(str(tmp_path), dtype="float32", device="cpu")
    before, shared = logits(whole, TEXT), whole.cut(KEPT)
    [stack] = [part for part in network.modules() if isinstance(part, nn.ModuleList) and len(part) == 4]
    for place in {*range(4)} - {*KEPT}:
        stack[place].register_forward_hook(lambda layer, inputs, out: inputs[0])  # as if it were not there
    with torch.inference_mode():
        expected = network(input_ids=torch.tensor([TEXT]), use_cache=False).logits[0]
    for model in (alone, shared):
        torch.testing.assert_close(logits(model, TEXT), expected, rtol=1e-4, atol=1e-4)
    assert torch.equal(logits(whole, TEXT), before)
    assert anatomy(str(tmp_path), layers=KEPT).parameters == alone.num_parameters == shared.num_parameters
    assert shared.bytes_per_token == alone.bytes_per_token < whole.bytes_per_token


def test_weights_of_other_layers_are_not_read(tmp_path: Path) -> None:
    """Guards memory of a tier that is alone in its process: it read the whole model first. These could not be read."""
    build("llama", num_hidden_layers=4).save_pretrained(tmp_path)
    weights = load_bytes((tmp_path / "model.safetensors").read_bytes())
    spoiled = {name: part if ".layers.1." not in name else part[:1].clone() for name, part in weights.items()}
    save_file(spoiled, tmp_path / "model.safetensors", metadata={"format": "pt"})
    assert load(str(tmp_path), device="cpu", layers=KEPT).config.num_hidden_layers == 3
    with pytest.raises(ModelError):
        load(str(tmp_path), device="cpu")


def held() -> dict[int, int]:
    """Bytes of the memory of all tensors, by where it lies."""
    parts = [part.untyped_storage() for part in gc.get_objects() if issubclass(type(part), Tensor)]
    return {part.data_ptr(): part.nbytes() for part in parts}


@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_layers_of_a_model_in_the_same_process_have_its_weights(name: str) -> None:
    """Guards memory: a second copy of what the model above has, by our kernels and by Transformers."""
    whole = Model(build(name, num_hidden_layers=4, vocab_size=4096, **FOUR.get(name, {})))
    before = held()
    part = whole.cut(KEPT)
    new = sum(size for place, size in held().items() if place not in before)
    assert new < 0.1 * part.num_parameters * 4


def test_layers_are_named_in_many_ways() -> None:
    """Guards short forms: spans as YAML reads them, single layers, how many of the first; and how they are shown."""
    assert numbers(["0-2", 5, "7 - 8"]) == numbers("0-2, 5,7-8") == numbers([0, 1, 2, 5, 7, 8]) == (0, 1, 2, 5, 7, 8)
    assert numbers(3) == (0, 1, 2)
    assert numbers([3]) == (3,)
    assert shown((0, 1, 2, 5, 7, 8)) == "0-2,5,7-8"


@pytest.mark.parametrize(
    ("layers", "words"),
    [
        ({"tiny": 0}, "layers of tiny: there are no layers"),
        ({"tiny": []}, "there are no layers"),
        ({"tiny": True}, "there are no layers"),
        ({"tiny": "0-x"}, "'0-x' are not layers: give numbers from 0 on"),
        ({"tiny": ["5-3"]}, "'5-3' are not layers"),
        ({"tiny": [-1]}, "-1 are not layers"),
        ({"tiny": ["0-4", "4-6"]}, "'4-6' overlaps with layers before it"),
        ({"tiny": [3, 1]}, "1 overlaps with layers before it, or comes after later ones"),
        ({"full": "0,4-6"}, "layers are 0,4-6, and the model has 6: they go from 0 to 5"),
        ({"medium": 3}, "layers names 'medium', which is no tier: they are tiny, full"),
    ],
    ids=str,
)
def test_wrong_layers_are_refused(layers: dict[str, Any], words: str) -> None:
    """Guards against a tier that is not what was meant: what is wrong is told before anything is loaded."""
    tiny, _, full = small.paths()
    with pytest.raises((ConfigError, ModelError), match=words):
        Cascade.from_pretrained([tiny, full], layers=layers)


# draft models that say a part of their tokens only


SAID = [*range(3, VOCAB, 3)]


def saved(architecture: str, folder: Path, ids: object = SAID) -> str:
    network = build(architecture)
    network.config.draft_vocab_size = len(SAID)
    network.save_pretrained(folder)
    (folder / FILE).write_text(json.dumps(ids))
    return str(folder)


@pytest.mark.parametrize("architecture", ["llama", "olmo2"])
def test_a_draft_says_what_the_whole_model_says_of_its_tokens(architecture: str, tmp_path: Path) -> None:
    """Guards logits against the place of another token, in our own networks and in those of Transformers."""
    source, text = saved(architecture, tmp_path), [5, 9, 40, 41, 42]
    whole, draft = (Model(load(source, draft=draft, dtype="float32")) for draft in (False, True))
    expected, narrow = (logits(model, text) for model in (whole, draft))
    assert narrow.shape == expected.shape
    torch.testing.assert_close(narrow[:, SAID], expected[:, SAID])
    others = sorted({*range(VOCAB)} - {*SAID})
    assert (narrow[:, others] == torch.finfo(narrow.dtype).min).all()


def test_renewed_weights_are_said_of_the_same_tokens(tmp_path: Path) -> None:
    """Guards drafts that learn: new weights reach the part of the embedding that is run, and other tokens are refused."""
    old, new = (saved("llama", tmp_path / name) for name in ("old", "new"))
    network = build("llama", seed=1)
    network.config.draft_vocab_size = len(SAID)
    network.save_pretrained(new)
    renewed, expected = (Model(load(source, draft=True, dtype="float32")) for source in (old, new))
    renewed.renew(new)
    found, wanted = (logits(model, [5, 9, 40]) for model in (renewed, expected))
    torch.testing.assert_close(found, wanted)
    (Path(new) / FILE).write_text(json.dumps([*SAID[1:], 1]))
    with pytest.raises(ModelError, match="they predict other tokens"):
        renewed.renew(new)


@pytest.mark.parametrize("tokens", [SAID[1:], [*SAID[1:], VOCAB], [*SAID[1:], SAID[1]], {}, ["a"], None], ids=str)
def test_a_wrong_file_is_refused(tokens: object, tmp_path: Path) -> None:
    """Guards drafts against ids that are not tokens of the model, and against a file that was not copied."""
    source = saved("llama", tmp_path, tokens)
    if tokens is None:
        (tmp_path / FILE).unlink()
    with pytest.raises(ModelError, match=FILE):
        load(source, draft=True)
