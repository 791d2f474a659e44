"""Checkpoints: what is told of them before they are loaded, how they are loaded, and what is refused."""

from operator import eq
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from click.testing import CliRunner
from huggingface_hub import constants
from safetensors.torch import load, save
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, BitsAndBytesConfig, LlamaConfig

from cascade import ModelError, SamplingParams
from cascade.cli.main import main
from cascade.cli.screen import console
from cascade.engine.checkpoint import anatomy
from cascade.engine.model import Model
from cascade.engine.model_config import read_config
from cascade.engine.tokenizer import Tokenizer, check_source
from cascade.engine.weights import INDEX
from cascade.scorer import Row
from cascade.settings.check import needs
from tests import small
from tests.architectures import CONTEXT, VOCAB, build, config, each

GREEDY = SamplingParams(temperature=0.0, seed=0)
TEXT = tuple(range(3, 33))


def logits(model: Model) -> Tensor:
    return model.logits([Row(model.new_cache(), 0, TEXT, len(TEXT), GREEDY)])


def held_bytes(model: Model) -> int:
    return sum(weight.nbytes for weight in model._network.parameters())


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    build("llama").save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def test_checkpoint_becomes_the_same_model(checkpoint: Path, sharded: Path) -> None:
    """Guards loading: one file or several, dtype as asked or as saved, sizes from the configuration, weights untouched."""
    assert len(shards(sharded)) > 2
    loaded, built = Model.from_pretrained(str(sharded), device="cpu"), Model(build("llama"))
    assert torch.equal(logits(loaded), logits(built))
    assert (loaded.vocab_size, loaded.context_len, loaded.dtype) == (VOCAB, CONTEXT, torch.float32)
    half = Model.from_pretrained(str(checkpoint), dtype="bfloat16", device="cpu")
    assert half.dtype is torch.bfloat16
    assert half.num_parameters == loaded.num_parameters


def spoil(checkpoint: Path, problem: str) -> None:
    file = checkpoint / "model.safetensors"
    weights = {name: tensor.clone() for name, tensor in load(file.read_bytes()).items()}
    if problem == "config":
        (checkpoint / "config.json").write_text("{")
    elif problem == "lacks a layer":
        rest = {name: tensor for name, tensor in weights.items() if "layers.1.self_attn" not in name}
        file.write_bytes(save(rest, metadata={"format": "pt"}))
    else:
        norm = torch.ones(5) if problem == "shape" else torch.full((32,), torch.nan)
        file.write_bytes(save({**weights, "model.norm.weight": norm}, metadata={"format": "pt"}))


@pytest.mark.parametrize("problem", ["config", "lacks a layer", "shape", "not numbers"])
def test_broken_checkpoints_are_refused_in_one_sentence(checkpoint: Path, problem: str) -> None:
    """Guards the start of a server: torch, safetensors and Transformers raise errors of their own, or make weights up."""
    spoil(checkpoint, problem)
    with pytest.raises(ModelError) as caught:
        Model.from_pretrained(str(checkpoint), device="cpu")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("options", "words"),
    [({"source": "/nowhere/at/all"}, "/nowhere/at/all"), ({"dtype": "int3"}, "int3"), ({"device": "warp"}, "warp")],
)
def test_wrong_settings_are_named(checkpoint: Path, options: dict[str, Any], words: str) -> None:
    """Guards the message: what the user wrote, and no traceback of another library."""
    with pytest.raises(ModelError, match=words) as caught:
        Model.from_pretrained(**{"source": str(checkpoint), "device": "cpu", **options})
    assert "\n" not in str(caught.value)


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    """A checkpoint of several files."""
    build("llama").save_pretrained(tmp_path / "sharded", max_shard_size="20KB")
    return tmp_path / "sharded"


def shards(folder: Path) -> list[Path]:
    return sorted(folder.glob("model-*.safetensors"))


@pytest.mark.parametrize("problem", ["missing", "truncated", "longer", "index", "index of nothing"])
def test_damaged_shards_are_named(sharded: Path, problem: str) -> None:
    """Guards the start of a server: a download that broke off is named by its file, before anything is loaded."""
    file = sharded / INDEX if problem.startswith("index") else shards(sharded)[1]
    content = file.read_bytes()
    file.unlink()
    if problem != "missing":
        changed = {"truncated": content[:-100], "longer": content + b"\0", "index": b"{", "index of nothing": b"[]"}
        file.write_bytes(changed[problem])
    with pytest.raises(ModelError, match=rf"{file.name}.*download it again$") as caught:
        Model.from_pretrained(str(sharded), device="cpu")
    assert "\n" not in str(caught.value)


def test_weights_without_room_are_refused(tmp_path: Path) -> None:
    """Guards the host: a model larger than its memory must be refused before the first weight, not killed in the middle."""
    LlamaConfig(
        vocab_size=128_256,
        hidden_size=131_072,
        intermediate_size=425_984,
        num_hidden_layers=2,
        num_attention_heads=1024,
        num_key_value_heads=8,
        dtype="bfloat16",
    ).save_pretrained(tmp_path)
    with pytest.raises(ModelError, match=r"take 8\d\d\.\d\d GiB and cpu has .* GiB free: take a larger device") as caught:
        Model.from_pretrained(str(tmp_path), dtype="bfloat16", device="cpu")
    assert "\n" not in str(caught.value)
    assert anatomy(str(tmp_path)).cache_bytes_per_token == 2 * 8 * 128 * 2 * 2


@pytest.mark.parametrize("name", each())
def test_anatomy_is_that_of_the_loaded_model(name: str, tmp_path: Path) -> None:
    """Guards `cascade check` and the planner: what is told before loading must be what is held afterwards."""
    config(name).save_pretrained(tmp_path)
    model = Model(build(name))
    cache = model.new_cache()
    model.logits([Row(cache, 0, TEXT, 1, GREEDY)])
    held = sum(shape.kv_heads * (shape.key_size + shape.value_size) * 4 for shape in cache.shapes.values())
    told = anatomy(str(tmp_path), dtype="float32")
    assert told.parameters == model.num_parameters
    assert told.weight_bytes == held_bytes(model)
    assert told.cache_bytes_per_token == held
    assert told.context_len == model.context_len


@pytest.mark.parametrize("name", ["falcon", "qwen3_next"])
def test_anatomy_refuses_what_cannot_be_served(name: str, tmp_path: Path) -> None:
    """Guards the user's time: a model whose layers bypass the cache is known by its configuration."""
    config(name).save_pretrained(tmp_path)
    with pytest.raises(ModelError, match=rf"^{type(build(name)).__name__} cannot be served: "):
        anatomy(str(tmp_path))


# cascade check


def checked(path: Path, values: Any) -> tuple[int, str]:
    path.write_text(yaml.safe_dump(values))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(console, "width", 200)
        result = CliRunner().invoke(main, ["check", str(path)])
    return result.exit_code, result.output


def demo(**changes: Any) -> dict[str, Any]:
    values = small.config().model_dump(mode="json")
    values["tiers"][-1].update(changes)
    return values


def test_check_tells_what_tiers_need(tmp_path: Path) -> None:
    """Guards the figures, which people buy machines by."""
    full = needs(small.config())[-1]
    assert full.anatomy.parameters == 7_476_096
    assert full.weight_bytes == 4 * 7_476_096
    assert full.anatomy.cache_bytes_per_token == 6 * 4 * 32 * 2 * 4
    assert full.cache_tokens > 10**5
    code, output = checked(tmp_path / "demo.yaml", demo())
    assert code == 0
    assert "7.5 M" in output
    assert output.endswith("The tiers fit together.\n")


def test_check_refuses_in_a_sentence(tmp_path: Path, sharded: Path) -> None:
    """Guards scripts that check before they deploy: status 1, and the reason after the table."""
    code, output = checked(tmp_path / "c.yaml", demo(model_loading_config={"model_id": "m", "model_source": str(sharded)}))
    assert code == 1
    assert "No tokenizer can be loaded" in output.splitlines()[-1]
    code, output = checked(tmp_path / "c.yaml", {**demo(), "max_model_len": 4096})
    assert code == 1
    assert output.splitlines()[-1] == (
        "Error: max_model_len is 4096, but tier tiny takes 1024 tokens: lower it or choose another model"
    )
    shards(sharded)[0].unlink()
    code, output = checked(tmp_path / "c.yaml", demo(model_loading_config={"model_id": "m", "model_source": str(sharded)}))
    assert code == 1
    assert "The model of tier full cannot be used: The checkpoint" in output


def test_check_knows_accelerators(tmp_path: Path) -> None:
    """Guards the check on a machine that has no such device itself."""
    large = tmp_path / "large"
    LlamaConfig(vocab_size=4096, hidden_size=65_536, num_hidden_layers=2, dtype="bfloat16").save_pretrained(large)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        source = Path(small.config().tiers[0].model_loading_config.source) / name
        (large / name).write_bytes(source.read_bytes())
    loading = {"model_id": "m", "model_source": str(large)}
    code, output = checked(
        tmp_path / "c.yaml", demo(accelerator_type="A100-80G", model_loading_config=loading, engine_kwargs={})
    )
    assert code == 1
    assert "Tier full takes" in output.splitlines()[-1]
    assert "A100-80G offers 72.00 GiB" in output.splitlines()[-1]


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
    assert torch.equal(logits(model), logits(Model(build("llama", seed=seed), num_threads=1)))


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


def test_quantised_checkpoints_are_served(tmp_path: Path) -> None:
    """Guards checkpoints in fewer bits, as Transformers writes them: a twin of a model nearly always says the same, in the
    memory of its bits."""
    source, folder = small.paths()[-1], str(tmp_path)
    bits = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.float32)
    AutoModelForCausalLM.from_pretrained(source, quantization_config=bits, device_map="cpu").save_pretrained(folder)
    AutoTokenizer.from_pretrained(source).save_pretrained(folder)
    full = Model.from_pretrained(source, dtype="float32", device="cpu")
    packed = Model.from_pretrained(folder, dtype="float32", device="cpu")
    held, whole = (sum(weight.nbytes for weight in model._network.parameters()) for model in (packed, full))
    assert held < 0.45 * whole  # embeddings stay
    text = list(
        Tokenizer.from_pretrained(source).encode("def read(path):\n    with open(path) as file:\n        return file\n")
    )
    own, others = ([*one.run([Row(one.new_cache(), 0, text, len(text), GREEDY)])[0].own] for one in (packed, full))
    assert sum(map(eq, own, others)) > 0.7 * len(text)
