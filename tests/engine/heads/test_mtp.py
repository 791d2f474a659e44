"""MTP layers: found in checkpoints as they are published, the same as Transformers' own, and refused in one sentence."""

import json
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedModel

from cascade import Cascade
from cascade.engine.heads import mtp as mtp_heads
from cascade.engine.heads.loading import load_head
from cascade.engine.heads.mtp import Mtp, check_mtp
from cascade.engine.model import Model
from cascade.engine.model_config import read_config
from cascade.errors import ModelError
from cascade.params import SamplingParams, Speculation
from cascade.scorer import Row
from tests import small
from tests.architectures import VOCAB, build
from tests.cases import crossed, rare
from tests.heads import Made, Paper
from tests.mtp import LAYERS, MODELS, NAMES, mtp, network_of

GREEDY = SamplingParams(temperature=0.0, seed=0)
TEXT = [(37 * place + 11) % VOCAB for place in range(24)]


pytestmark = pytest.mark.usefixtures("one_thread")


def whole(folder: Path, style: str, *, beside: bool = False) -> Made:
    """A checkpoint of a model with its MTP layer, which may lie in files that are in no index."""
    made = mtp(folder, style)
    network_of(style).save_pretrained(folder)
    if beside:
        names = sorted(made.weights)
        for part in (0, 1):
            save_file({name: made.weights[name] for name in names[part::2]}, folder / f"mtp-{part}.safetensors")
    else:
        save_file({**load_file(folder / "model.safetensors"), **made.weights}, folder / "model.safetensors", {"format": "pt"})
    return made


def guesses(model: Model, number: int) -> tuple[list[int], list[int]]:
    """A text with its own token, and what is guessed after it."""
    store = model.new_cache()
    [scored] = model.run([Row(store, 0, TEXT, 1, GREEDY, guesses=number)])
    store.free()
    return [*TEXT, *scored.own], list(scored.draft.trunk.tokens)


@pytest.mark.parametrize(("style", "beside"), crossed({style: style for style in MODELS}, {"within": False, "beside": True}))
def test_layers_lie_in_the_checkpoint_of_the_model(tmp_path: Path, style: str, beside: bool) -> None:
    """Guards loading without a source: the model loads as ever, and its layer is found whatever files it is in.

    Guards `cascade check`, too, which counts what the layer takes.
    """
    made = whole(tmp_path, style, beside=beside)
    assert check_mtp(str(tmp_path)) == sum(weight.numel() for weight in made.weights.values())
    model = Model.from_pretrained(str(tmp_path), drafter="", drafter_kind="mtp", num_threads=1)
    assert model.drafter == "mtp"
    text, said = guesses(model, 4)
    assert said == Paper(made, network_of(style)).guesses(text, 4, GREEDY)


@pytest.mark.parametrize("style", ["mtp-glm", rare("mtp-mimo")])
def test_sources_of_their_own(tmp_path: Path, style: str) -> None:
    """Guards folders and files with nothing but the layer, by kind and by their tensors."""
    made = mtp(tmp_path, style)
    folder = made.write()
    for source, kind in ((folder, "auto"), (folder, "mtp"), (str(tmp_path / "model.safetensors"), "mtp")):
        network = network_of(style)
        model = Model(network, num_threads=1, head=load_head(source, network, kind=kind))
        text, said = guesses(model, 3)
        assert said == Paper(made, network_of(style)).guesses(text, 3, GREEDY)


@pytest.mark.skipif(not hasattr(transformers.modeling_layers, "MtpModel"), reason="Transformers has no MTP layers yet")
@pytest.mark.parametrize("style", ["mtp-deepseek", "mtp-qwen", rare("mtp-glm")])
def test_transformers_says_the_same(tmp_path: Path, style: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards the reading of checkpoints and formulas against the same mistake in the layer and in our own formulas."""
    whole(tmp_path, style)
    network: Any = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    network.set_attn_implementation("eager")
    network.config.num_mtp_layers = 1
    if style == "mtp-qwen":
        network.config.mtp_layer_types = ["full_attention"]
    else:
        network._keys_to_ignore_on_load_unexpected = {rf"model\.layers\.{LAYERS}.*"}  # is for the published depth
    reference = transformers.modeling_layers.MtpModel.from_pretrained(network).eval()
    model = Model.from_pretrained(str(tmp_path), drafter="", drafter_kind="mtp", num_threads=1)
    assert model.reader is not None
    seen: list[Tensor] = []
    monkeypatch.setattr(model.reader.head, "whole", lambda logits: seen.append(logits) or logits)
    text, said = guesses(model, 1)
    ids = torch.tensor([text])
    with torch.no_grad():
        states = network(ids[:, :-1], output_hidden_states=True, use_cache=False).hidden_states[-1]
        positions = torch.arange(1, ids.shape[1])[None]
        found, logits, _ = reference(ids[:, 1:], states, None, positions, None)
    assert found.tolist() == [said]
    torch.testing.assert_close(seen[0], logits[0], rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("other", ["embed", "head"])
def test_embeddings_of_their_own_are_used(tmp_path: Path, other: str) -> None:
    """Guards embeddings beside the layer: the model's are held once, and others are not dropped without a word."""
    made, network = mtp(tmp_path, "mtp-glm"), network_of("mtp-glm")
    head = load_head(made.write(), network)
    assert isinstance(head, Mtp)
    names = {name for name, _ in head.named_parameters()}
    assert not names & {"embed_tokens.weight", "lm_head.weight"}
    rolled = made.weights[f"{NAMES['mtp-glm'][other]}.weight"].roll(1, 0)
    made.weights[f"{NAMES['mtp-glm'][other]}.weight"] = rolled
    model = Model(network, num_threads=1, head=load_head(made.write(), network))
    plain = network_of("mtp-glm")
    embeddings = {"embed": plain.get_input_embeddings(), "head": plain.get_output_embeddings()}
    text, said = guesses(model, 1)
    with torch.no_grad():
        states = plain(torch.tensor([text[:-1]]), output_hidden_states=True, use_cache=False).hidden_states[-1][0]
        embeddings[other].weight = torch.nn.Parameter(rolled)
        assert made.out is not None
        assert said == [int(embeddings["head"](made.out(plain, text, states)[-1]).argmax())]


GLM = NAMES["mtp-glm"]
PROBLEMS: list[tuple[str, Tensor | None, str]] = [  # a tensor, and what is there instead
    (f"{GLM['enorm']}.weight", None, "lacks the tensor enorm.weight"),
    (
        f"{GLM['block']}.self_attn.o_proj.weight",
        None,
        r"its layer lacks the tensor block.self_attn.o_proj.weight, unlike those of Glm4MoeForCausalLM",
    ),
    (
        f"{GLM['block']}.strange.weight",
        torch.zeros(1),
        "its layer has the tensor block.strange.weight, unlike those of Glm4MoeForCausalLM",
    ),
    (f"{GLM['proj']}.weight", torch.zeros(32, 60), r"its tensor eh_proj.weight is \[32, 60\], and has to be \[32, 64\]"),
    (f"{GLM['proj']}.weight", torch.zeros(32, 64, dtype=torch.float8_e4m3fn), r"are quantised \(float8_e4m3fn\)"),
    (f"{GLM['proj']}.weight", None, "holds no MTP layers for a model of 6 layers"),
    (f"{GLM['head']}.weight", torch.zeros(VOCAB + 8, 32), "made for a vocabulary of 104 tokens, and the model has 96"),
]


@pytest.mark.parametrize(("name", "tensor", "words"), PROBLEMS)
def test_layers_that_do_not_fit_are_refused(tmp_path: Path, name: str, tensor: Tensor | None, words: str) -> None:
    """Guards against a layer of another model, or half of one, that loads without a word."""
    made = mtp(tmp_path, "mtp-glm")
    if tensor is None:
        del made.weights[name]
    else:
        made.weights[name] = tensor
    source = made.write()
    with pytest.raises(ModelError, match=words) as caught:
        load_head(source, network_of("mtp-glm"), kind="mtp")
    assert "\n" not in str(caught.value)
    assert source in str(caught.value)


def test_models_without_layers_are_named(tmp_path: Path) -> None:
    """Guards the common mistake: a model that was never trained with such layers, or that is no checkpoint."""
    build("llama").save_pretrained(tmp_path)
    for look in (check_mtp, partial(Model.from_pretrained, drafter="", drafter_kind="mtp")):
        with pytest.raises(ModelError, match="holds no MTP layers for a model of 2 layers: choose another drafter than 'mtp'"):
            look(str(tmp_path))
    with pytest.raises(ModelError, match="holds no MTP layers"):
        Cascade.from_pretrained([small.paths()[0]], drafter="mtp")
    with pytest.raises(ModelError, match="was not loaded from a checkpoint, so give it a source"):
        load_head("", build("llama"), kind="mtp")
    with pytest.raises(ModelError, match="There is no folder"):
        load_head(str(tmp_path / "nowhere"), build("llama"), kind="mtp")
    (tmp_path / "broken.safetensors").write_bytes(b"garbage")
    with pytest.raises(ModelError, match="No MTP layers can be loaded from"):
        load_head(str(tmp_path / "broken.safetensors"), build("llama"), kind="mtp")


def test_architectures_that_do_not_fit_are_named(tmp_path: Path) -> None:
    """Guards layers that see a part of the text only, and models without rotary positions."""
    weights = mtp(tmp_path, "mtp-mimo").weights
    sliding: Any = {"sliding_window": 8, "use_sliding_window": True, "layer_types": ["sliding_attention"] * LAYERS}
    for network, words in (
        (build("qwen2", num_hidden_layers=LAYERS, **sliding), "the model has no layer with full attention"),
        (build("gpt2", n_layer=LAYERS), "GPT2LMHeadModel has no"),
    ):
        source = Made("mtp", weights, {}, tmp_path).write()
        with pytest.raises(ModelError, match=words) as caught:
            load_head(source, network, kind="mtp")
        assert "\n" not in str(caught.value)


def test_parts_that_need_32_bits_keep_them(tmp_path: Path) -> None:
    """Guards routers: DeepSeek's correction of scores is rounded away in bfloat16. Others keep what Transformers gave them."""
    whole(tmp_path, "mtp-deepseek")
    network: PreTrainedModel = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    head = load_head("", network, kind="mtp")
    told, its = _dtypes(head), _dtypes(network.model.layers[-1])
    assert told["block.mlp.gate.e_score_correction_bias"] is torch.float32
    assert {name: told.pop(f"block.{name}") for name in its} == its
    assert set(told.values()) == {torch.bfloat16}


def _dtypes(module: torch.nn.Module) -> dict[str, torch.dtype]:
    return {name: tensor.dtype for name, tensor in (*module.named_parameters(), *module.named_buffers())}


def test_of_several_layers_the_first_is_used(tmp_path: Path) -> None:
    """Guards checkpoints with a layer for each guess: the others' tensors do not mix with the first one's."""
    made, said = mtp(tmp_path, "mtp-glm"), []
    second = {name.replace(f".{LAYERS}.", f".{LAYERS + 1}."): tensor.roll(1, 0) for name, tensor in made.weights.items()}
    for weights in (made.weights, {**second, **made.weights}):
        made.weights, network = weights, network_of("mtp-glm")
        said.append(guesses(Model(network, num_threads=1, head=load_head(made.write(), network)), 3))
    assert said[0] == said[1]


def test_of_the_hub_other_files_are_not_fetched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards downloads: a layer of its own model lies in a few of many large files."""
    made, asked = mtp(tmp_path, "mtp-glm"), []
    save_file(made.weights, tmp_path / "b.safetensors")
    files = {**dict.fromkeys(made.weights, "b.safetensors"), "model.layers.0.mlp.up_proj.weight": "a.safetensors"}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))

    def fetched(source: str, *, revision: str | None, allow_patterns: list[str]) -> str:
        asked.append((source, revision, allow_patterns))
        return str(tmp_path)

    monkeypatch.setattr(mtp_heads, "snapshot_download", fetched)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)  # nobody asks whether the hub answers
    checkpoint, _ = mtp_heads.read_mtp("some/model", LAYERS, revision="abc")
    assert asked == [("some/model", "abc", [name]) for name in ("model.safetensors.index.json", "b.safetensors")]
    assert "block.self_attn.o_proj.weight" in checkpoint.weights
    network_of("mtp-glm").config.save_pretrained(tmp_path)
    monkeypatch.setattr(mtp_heads, "read_config", lambda source, **_: read_config(str(tmp_path)))
    check_mtp("some/model", revision="abc")
    assert asked[2:] == [("some/model", "abc", ["model.safetensors.index.json"])]


def test_a_model_drafts_for_itself(tmp_path: Path) -> None:
    """Guards the whole way from `drafter="mtp"` to the tiers of a cascade, in the same text."""
    sizes: dict[str, Any] = {"vocab_size": 4096, "tie_word_embeddings": False}
    build("qwen2", **sizes).save_pretrained(tmp_path)
    names, donor = NAMES["mtp-mimo"], build("qwen2", 1, **sizes)
    weights = {f"{names['block']}.{name}": tensor for name, tensor in donor.model.layers[0].state_dict().items()}
    weights |= {f"{names[norm]}.weight": torch.ones(32) for norm in ("enorm", "hnorm", "norm")}
    save_file({**weights, f"{names['proj']}.weight": torch.eye(32, 64)}, tmp_path / "mtp.safetensors")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(Path(small.paths()[-1]) / name, tmp_path / name)
    with Cascade.from_pretrained([str(tmp_path)], drafter="mtp") as cascade:
        assert cascade.names == ("mtp", "full")
        asked = SamplingParams(max_tokens=40, temperature=0.8, seed=3, ignore_eos=True)
        said, alone = (cascade.generate([5, 6, 7], asked, Speculation(mode)) for mode in ("auto", "off"))
    assert said.token_ids == alone.token_ids
