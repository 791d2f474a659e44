"""Tokenizers are Transformers' own in ids, texts, special tokens and conversations; names and bytes of their tokens."""

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors, trainers
from tokenizers import Tokenizer as FastTokenizer
from transformers import LlamaTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from cascade import ModelError
from cascade.engine.generation import sampling_defaults
from cascade.engine.spelling import Spelling
from cascade.engine.tokenizer import Tokenizer, pretrained
from tests import small

TEXTS = ["def f(x):\n    return x", "  zwei Wörter  ", "中文 😀 é", "<s>a</s> <mark> b", ""]
TEMPLATE = (
    "{% set ns = namespace(n=0) %}{{ bos_token }}{% for message in messages %}\n"
    "    {% if message.role == 'skip' %}{% continue %}{% endif %}\n"
    "{% set ns.n = ns.n + 1 %}[{{ ns.n }} {{ message.role }}]"
    "{% generation %}{{ message.content | trim }}{% endgeneration %}{{ message.name }}{{ dict(a='<é>') | tojson }}"
    "{{ eos_token }}{% endfor %}{{ tools | tojson if tools }}{{ messages | tojson(indent=1) }}{{ strftime_now('%%') }}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)


def byte_level(folder: Path) -> None:
    """As the small models': saved by the generic class, with tokens of its own and a template."""
    tokenizer = pretrained(small.paths()[-1])
    tokenizer.add_tokens([AddedToken("<mark>", special=False, normalized=False)])
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)


def spaces_stripped(folder: Path) -> None:
    """As Llama 2's: words begin with a sign, bytes where letters are not known, and the decoder strips the first space."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", *map(chr, range(33, 127)), "de", "def"]
    merges = [("d", "e"), ("de", "f")]
    vocab = {piece: place for place, piece in enumerate(pieces)}
    tokenizer = LlamaTokenizer(vocab=vocab, merges=merges, add_bos_token=True)
    tokenizer.chat_template = {"default": TEMPLATE, "tool_use": "tools " + TEMPLATE}
    tokenizer.save_pretrained(folder)


def unigram(folder: Path) -> None:
    """As T5's and many SentencePiece models': the likeliest pieces, a normalizer, and special tokens around a prompt."""
    backend = FastTokenizer(models.Unigram())
    backend.normalizer = normalizers.NFKC()
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Metaspace()
    trainer = trainers.UnigramTrainer(
        vocab_size=120, special_tokens=["<unk>", "<s>", "</s>", "<mark>"], unk_token="<unk>", show_progress=False
    )
    backend.train_from_iterator(TEXTS * 20, trainer)
    backend.post_processor = processors.TemplateProcessing(single="<s> $A </s>", special_tokens=[("<s>", 1), ("</s>", 2)])
    backend.enable_truncation(4)
    backend.enable_padding(length=8)
    names = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    PreTrainedTokenizerFast(tokenizer_object=backend, chat_template=TEMPLATE, **names).save_pretrained(folder)


KINDS: list[Callable[[Path], None]] = [byte_level, spaces_stripped, unigram]


@pytest.fixture(scope="module", params=KINDS, ids=lambda kind: kind.__name__)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp(request.param.__name__)
    request.param(folder)
    return folder


@pytest.fixture(scope="module", params=["made", "kept"])
def both(request: pytest.FixtureRequest, folder: Path) -> tuple[Tokenizer, PreTrainedTokenizerBase]:
    """A tokenizer as it comes first, and as every later process has it, beside Transformers' own."""
    if request.param == "kept":
        Tokenizer.from_pretrained(str(folder))
    return Tokenizer.from_pretrained(str(folder)), pretrained(str(folder))


def test_ids_and_texts_are_the_same(both: tuple[Tokenizer, PreTrainedTokenizerBase]) -> None:
    """Guards the text itself: another normalizer, merge, special token or space and every answer is another one."""
    ours, theirs = both

    @settings(suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture])
    @given(st.one_of(st.sampled_from(TEXTS), st.text(st.characters(exclude_categories=["Cs"]))))
    def run(text: str) -> None:
        ids = ours.encode(text)
        assert ids == theirs.encode(text)
        assert ours.encode_part(text) == theirs.encode(text, add_special_tokens=False)
        assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True)
        assert ours.decode(ids, skip_special_tokens=False) == theirs.decode(ids)

    run()
    for token in range(ours.num_ids):  # the names of tokens with log-probabilities
        assert ours.decode([token], skip_special_tokens=False) == theirs.decode([token])
    assert ours.num_ids == len(theirs)
    assert ours.special_tokens == theirs.special_tokens_map
    assert {id: str(token) for id, token in ours.added_tokens.items()} == {
        id: str(token) for id, token in theirs.added_tokens_decoder.items()
    }
    assert ours.end_ids == {theirs.eos_token_id}


def test_conversations_are_the_same(both: tuple[Tokenizer, PreTrainedTokenizerBase]) -> None:
    """Guards prompts: blanks of blocks, loops that go on, variables of a block, JSON, thoughts, null fields, a last turn."""
    ours, theirs = both
    messages: list[dict[str, Any]] = [
        {"role": "user", "content": " <b>é</b> ", "name": None},
        {"role": "skip", "content": "no", "tool_calls": None},
        {"role": "assistant", "content": "Well, ", "reasoning": "hm"},
    ]
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
    for options in ({}, {"add_generation_prompt": True}, {"continue_final_message": True}, {"unknown": (1, 2.5, True)}):
        for shown in (None, tools):
            wanted = theirs.apply_chat_template(messages, shown, tokenize=False, **options)
            assert ours.apply_chat_template(messages, shown, **options) == wanted
    for broken in ("{{ messages.append(1) }}", "{{ ''.__class__.__mro__ }}", "{% set n = namespace(_a=1) %}", "{{ x"):
        ours.chat_template, before = broken, ours.chat_template
        with pytest.raises(Exception, match=r"append|unsafe|_a|expected"):
            ours.apply_chat_template(messages)
        ours.chat_template = before


def test_other_processes_need_no_transformers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards the start of routers: seconds of imports; a tokenizer that changed under the same path; and read-only disks."""
    code = (
        "import sys; from cascade.engine.tokenizer import Tokenizer; found = Tokenizer.from_pretrained(sys.argv[1])\n"
        "print(found.encode('a <mark> b'), found.end_ids, 'transformers' in sys.modules)"
    )
    for kind in (byte_level, spaces_stripped):
        kind(tmp_path / "model")
        first = Tokenizer.from_pretrained(str(tmp_path / "model"))
        output = subprocess.check_output([sys.executable, "-c", code, str(tmp_path / "model")], text=True).strip()
        assert output == f"{first.encode('a <mark> b')} {first.end_ids} False"
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("CASCADE_CACHE", str(tmp_path / "file" / "cache"))
    assert Tokenizer.from_pretrained(str(tmp_path / "model")).decode([0]) == ""
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    (tmp_path / "model" / "tokenizer.json").write_text('{"added_tokens": []}')  # cut, as by a full disk
    for folder in (tmp_path, tmp_path / "model"):
        with pytest.raises(ModelError, match="No tokenizer can be loaded from"):
            Tokenizer.from_pretrained(str(folder))


# names and bytes of tokens, where tokens are data


def unknown(folder: Path) -> Tokenizer:
    """Of a kind that llguidance does not know."""
    backend = FastTokenizer(models.WordPiece({"[UNK]": 0, "he": 1, "##llo": 2}, unk_token="[UNK]"))
    backend.decoder = decoders.WordPiece()
    return Tokenizer(backend, frozenset(), {}, None, "words")


def loaded(kind: Callable[[Path], Any], folder: Path) -> Tokenizer:
    return kind(folder) or Tokenizer.from_pretrained(str(folder))


@pytest.mark.parametrize("kind", [byte_level, spaces_stripped])
def test_bytes_of_tokens_are_the_text(kind: Callable[[Path], Any], tmp_path: Path) -> None:
    """Guards `bytes` of parts of characters, which were those of U+FFFD, and leading spaces, which decoding strips."""
    tokenizer, text = loaded(kind, tmp_path), "😀 😃 😄 def def, wörld"
    spelling, decoder = Spelling(tokenizer), tokenizer.decoder(tokenizer.encode("def"))
    ids = tokenizer.encode_part(text)
    decoded = "".join(decoder.step(id) for id in ids) + decoder.flush()
    assert b"".join(map(spelling.bytes, ids)).decode() == decoded
    assert decoded.strip() == text
    assert [spelling.bytes(id) for id in tokenizer.end_ids] == [b""]


@pytest.mark.parametrize(
    ("prompt", "answer", "text"),
    [
        (["a", "<0xEF>", "<0xBF>", "<0xBD>"], ["de", "f"], "def"),
        (["a", "<0xF0>", "<0x9F>"], ["<0x98>", "<0x80>", "de"], "😀de"),
        (["a"], ["<0x41>", "<0xE4>", "de"], "A\ufffdde"),
        (["a"], ["<0xE4>"], "\ufffd"),
    ],
    ids=["prompt ends in U+FFFD", "prompt ends in half a character", "broken bytes", "half a character"],
)
def test_pieces_are_what_comes_behind_the_prompt(prompt: list[str], answer: list[str], text: str, tmp_path: Path) -> None:
    """Guards answers that began with the prompt's last words, and streams that bytes which are no text broke off."""
    tokenizer = loaded(spaces_stripped, tmp_path)
    vocab = tokenizer.backend.get_vocab()
    decoder = tokenizer.decoder([vocab[piece] for piece in prompt])
    assert "".join(decoder.step(vocab[piece]) for piece in answer) + decoder.flush() == text


@pytest.mark.parametrize("kind", [*KINDS, unknown])
def test_tokens_that_differ_have_names_that_differ(kind: Callable[[Path], Any], tmp_path: Path) -> None:
    """Guards keys of `top_logprobs`, of which the lowest value was kept where several tokens were U+FFFD."""
    tokenizer = loaded(kind, tmp_path)
    spelling, vocab = Spelling(tokenizer), tokenizer.backend.get_vocab()
    num_ids = tokenizer.num_ids + 8  # with ids for padding
    assert len({spelling.name(id) for id in range(num_ids)}) == num_ids
    assert "\ufffd" not in "".join(spelling.name(id) for id in range(tokenizer.num_ids))
    if kind is spaces_stripped:
        wanted = {"def": "def", "▁": " ", "<0xF0>": "bytes:\\xf0", "</s>": "</s>", "<0x48>": "token_id:75", "H": "H"}
        assert {piece: spelling.name(vocab[piece]) for piece in wanted} == wanted


END = "<|im_end|>"
CHATML = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}" + END + "\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
Edit = Callable[..., str]


@pytest.fixture
def model(tmp_path: Path) -> Edit:
    """Writes a folder with the small models' tokenizer, one more token, and these files."""

    def write(*, eos: str | None = None, template: str | None = None, **files: Any) -> str:
        backend = pretrained(small.paths()[-1])
        backend.add_tokens([AddedToken(END, special=True, normalized=False)], special_tokens=True)
        backend.chat_template = template
        if eos is not None:
            backend.eos_token = eos
        folder = tmp_path / "model"
        shutil.rmtree(folder, ignore_errors=True)
        backend.save_pretrained(folder)
        config = json.loads(Path(small.paths()[-1], "config.json").read_text())
        for name, content in {"config": config | {"eos_token_id": None}, **files}.items():
            (folder / f"{name}.json").write_text(content if isinstance(content, str) else json.dumps(content))
        return str(folder)

    return write


def test_every_source_of_end_tokens_counts(model: Edit) -> None:
    """Guards against one source only: a base model's configs beside a chat tokenizer let answers run into invented turns."""
    config = json.loads(Path(small.paths()[-1], "config.json").read_text())
    plain = Tokenizer.from_pretrained(model())
    own, end = plain.backend.token_to_id(plain.special_tokens["eos_token"]), small.VOCAB
    assert plain.end_ids == {own}
    named = Tokenizer.from_pretrained(
        model(eos=END, config=config | {"eos_token_id": 5}, generation_config={"eos_token_id": [5, 7]})
    )
    assert named.end_ids == {5, 7, end}
    nested = config | {"eos_token_id": -1, "text_config": {"eos_token_id": 9}}
    assert Tokenizer.from_pretrained(model(config=nested)).end_ids == {own, 9}
    assert Tokenizer.from_pretrained(model(template=CHATML)).end_ids == {own, end}
    for other in (CHATML.replace(END, "\n"), CHATML.replace(END, "<no-token>"), "{{ raise_exception('no') }}"):
        assert Tokenizer.from_pretrained(model(template=other)).end_ids == {own}


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        ('{"eos_token_id": 2', "is not JSON"),
        ("[2]", "must hold a JSON object"),
        ('{"eos_token_id": "</s>"}', "has the eos_token_id '</s>'"),
        ('{"eos_token_id": [2, null]}', "has the eos_token_id None"),
    ],
)
def test_a_broken_generation_config_is_one_sentence(model: Edit, content: str, sentence: str) -> None:
    """Guards against a broken file taken for an absent one, whose end tokens are then missing without a word."""
    with pytest.raises(ModelError, match=sentence):
        Tokenizer.from_pretrained(model(generation_config=content))


def test_sampling_defaults_are_those_that_vllm_takes(model: Edit, tmp_path: Path) -> None:
    """Guards fields and the switch: the model's file, no file, or that of another folder."""
    given = {"temperature": 0.6, "top_k": 20, "top_p": 0.95, "min_p": 0.1, "repetition_penalty": 1.05, "max_new_tokens": 99}
    source = model(generation_config=given | {"do_sample": True, "typical_p": 0.5, "bos_token_id": 1})
    expected = {**{name: given[name] for name in list(given)[:-1]}, "max_tokens": 99}
    assert sampling_defaults(source) == expected
    assert sampling_defaults(source, "vllm") == {}
    assert sampling_defaults(model()) == {}
    other = tmp_path / "other"
    other.mkdir()
    (other / "generation_config.json").write_text('{"temperature": 0, "top_p": null}')
    assert sampling_defaults(source, str(other)) == {"temperature": 0}
    with pytest.raises(ModelError, match="generation_config is 'nowhere': it must be 'auto', 'vllm', or a folder"):
        sampling_defaults(source, "nowhere")
    with pytest.raises(ModelError, match=r"top_p is 3: .*fix it, or set generation_config to 'vllm'"):
        sampling_defaults(model(generation_config={"top_p": 3}))
