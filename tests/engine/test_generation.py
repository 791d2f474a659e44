"""What a model's own files say about writing: ends of texts, and sampling where a request says nothing."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken

from cascade import ModelError
from cascade.engine.generation import sampling_defaults
from cascade.engine.published_tokenizer import pretrained
from cascade.engine.tokenizer import Tokenizer
from tests import small

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
    with pytest.raises(ModelError, match=r"top_p is 3: .*mend it, or set generation_config to 'vllm'"):
        sampling_defaults(model(generation_config={"top_p": 3}))
