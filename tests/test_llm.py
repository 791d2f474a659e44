"""`cascade.LLM`: vLLM's shape around `Cascade`, on the small models."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from cascade import LLM, ConfigError, InvalidRequest, SamplingParams
from cascade.engine.published_tokenizer import pretrained
from tests import small

PROMPTS = ["def read(path):\n    with open(path) as file:\n", "import os\n\nclass Shape:\n    def __init__(self"]
CHATS = [[{"role": "user", "content": text}] for text in PROMPTS]
PARAMS = SamplingParams(max_tokens=24, temperature=0.8, seed=5)


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    *lower, full = small.paths()
    with LLM(full, draft_models=lower[::-1], dtype="float32", device="cpu") as llm:
        yield llm


def test_texts_are_those_of_the_cascade(llm: LLM) -> None:
    """Guards prompts, order and fields: each output belongs to its prompt, however the prompts are given."""
    assert llm.cascade.names[-3:] == small.NAMES
    expected = llm.cascade.generate(PROMPTS, PARAMS)
    ids = [llm.cascade.tokenizer.encode(prompt) for prompt in PROMPTS]
    for given, texts in ((PROMPTS, PROMPTS), (ids, [None, None])):
        outputs = llm.generate(given, PARAMS)
        assert [output.prompt for output in outputs] == texts
        assert [output.prompt_token_ids for output in outputs] == ids
        for output, wanted in zip(outputs, expected, strict=True):
            [found] = output.outputs
            assert (found.text, found.token_ids) == (wanted.text, wanted.token_ids)
            assert (found.finish_reason, found.index) == (wanted.finish_reason, 0)
    assert llm.generate([], PARAMS) == []
    for alone in (PROMPTS[1], ids[1]):
        [output] = llm.generate(alone, PARAMS)
        assert output.outputs[0].text == expected[1].text


def test_conversations_go_through_the_chat_template(llm: LLM) -> None:
    """Guards prompts of chats: to the token what `apply_chat_template` gives, of one conversation and of several."""
    backend = pretrained(llm.cascade.tokenizer.source)
    ids = [backend.apply_chat_template(chat, add_generation_prompt=True, return_dict=False) for chat in CHATS]
    expected = [completion.text for completion in llm.cascade.generate(ids, PARAMS)]
    outputs = llm.chat(CHATS, PARAMS)
    assert [output.prompt_token_ids for output in outputs] == ids
    assert [output.outputs[0].text for output in outputs] == expected
    [output] = llm.chat(CHATS[1], PARAMS)
    assert output.prompt == backend.apply_chat_template(CHATS[1], add_generation_prompt=True, tokenize=False)
    assert output.outputs[0].text == expected[1]


def test_what_cannot_be_asked_is_refused(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against a name taken letter by letter, and against errors of templates in place of ours."""
    with pytest.raises(ConfigError, match="draft_models is 'tiny': give a list"):
        LLM("full", draft_models="tiny")
    with pytest.raises(ConfigError, match=r"LLM has no option 'dtyp': it takes .*, dtype, "):
        LLM("full", dtyp="float32")
    with pytest.raises(InvalidRequest, match="empty"):
        llm.generate("")
    backend = llm.cascade.tokenizer
    monkeypatch.setattr(backend, "chat_template", "{{ raise_exception('roles must alternate') }}")
    with pytest.raises(InvalidRequest, match="does not take these messages: roles must alternate"):
        llm.chat(CHATS[0])
    monkeypatch.setattr(backend, "chat_template", None)
    with pytest.raises(InvalidRequest, match="has no chat template"):
        llm.chat(CHATS[0])


def test_parameters_default_to_the_models_generation_config(tmp_path: Path) -> None:
    """Guards vLLM's default: without parameters a model is sampled as its generation config says, and only then."""
    full = tmp_path / "full"
    shutil.copytree(small.paths()[-1], full)
    (full / "generation_config.json").write_text('{"temperature": 0, "repetition_penalty": 1.3, "max_new_tokens": 9}')
    expected = SamplingParams(temperature=0, repetition_penalty=1.3, max_tokens=9)
    with LLM(str(full), dtype="float32", device="cpu") as llm:
        assert llm.get_default_sampling_params() == expected
        [[one], [other]] = [output.outputs for output in llm.generate(PROMPTS[:1]) + llm.generate(PROMPTS[:1], expected)]
        assert one.text == other.text
        [output] = llm.generate(PROMPTS[:1], SamplingParams(max_tokens=3))
        assert len(output.outputs[0].token_ids) == 3
    with LLM(str(full), dtype="float32", device="cpu", generation_config="vllm") as llm:
        assert llm.get_default_sampling_params() == SamplingParams()
