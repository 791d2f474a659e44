"""`cascade.LLM`: vLLM's shape around `Cascade`, on the small models."""

import copy
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from cascade import LLM, Cascade, ConfigError, InvalidRequest, SamplingParams
from cascade.chat.template import ChatTemplate
from cascade.engine.tokenizer import pretrained
from cascade.llm import prompt_of
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
    """Guards order and fields: each output belongs to its prompt."""
    assert llm.cascade.names[-3:] == small.NAMES
    outputs = llm.generate(PROMPTS, PARAMS)
    assert [output.prompt for output in outputs] == PROMPTS
    for output, wanted in zip(outputs, llm.cascade.generate(PROMPTS, PARAMS), strict=True):
        [result] = output.outputs
        assert (result.text, result.token_ids) == (wanted.text, wanted.token_ids)
        assert (result.finish_reason, result.index) == (wanted.finish_reason, 0)
    assert llm.generate([], PARAMS) == []


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


def test_templates_that_refuse_are_told(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against errors of templates in place of ours."""
    for template, words in (("{{ raise_exception('no') }}", "these messages: no"), (None, "has no chat")):
        monkeypatch.setattr(llm.cascade.tokenizer, "chat_template", template)
        with pytest.raises(InvalidRequest, match=words):
            llm.chat(CHATS[0])


def test_parameters_default_to_the_models_generation_config(tmp_path: Path) -> None:
    """Guards vLLM's default: without parameters a model is sampled as its generation config says, and only then."""
    full = tmp_path / "full"
    shutil.copytree(small.paths()[-1], full)
    (full / "generation_config.json").write_text('{"temperature": 0, "repetition_penalty": 1.3, "max_new_tokens": 9}')
    expected = SamplingParams(temperature=0, repetition_penalty=1.3, max_tokens=9)
    with LLM(str(full), dtype="float32", device="cpu") as llm:
        assert llm.get_default_sampling_params() == expected
        [[first], [second]] = [output.outputs for output in llm.generate(PROMPTS[:1]) + llm.generate(PROMPTS[:1], expected)]
        assert first.text == second.text
        [output] = llm.generate(PROMPTS[:1], SamplingParams(max_tokens=3))
        assert len(output.outputs[0].token_ids) == 3
    with LLM(str(full), dtype="float32", device="cpu", generation_config="vllm") as llm:
        assert llm.get_default_sampling_params() == SamplingParams()


def test_prompts_and_parameters_have_the_forms_of_vllm(llm: LLM) -> None:
    """Guards scripts written for vLLM: dictionaries, arrays, a SamplingParams for each prompt, no list where there is none."""
    [text, _], ids = PROMPTS, llm.cascade.tokenizer.encode(PROMPTS[0])
    [expected] = llm.generate(text, PARAMS)
    array = np.array(ids)
    forms: list[Any] = [{"prompt": text}, {"prompt_token_ids": ids}, array, {"prompt_token_ids": array}, torch.tensor(ids)]
    for form in (*forms, [np.int64(token) for token in ids], tuple(ids)):
        for given in (form, [form]):
            [output] = llm.generate(given, PARAMS, use_tqdm=False)
            assert output.outputs[0].text == expected.outputs[0].text
            assert output.prompt_token_ids == ids
    several = llm.generate(np.array([ids, ids]), [PARAMS, SamplingParams(max_tokens=3, temperature=0)])
    assert several[0].outputs[0].text == expected.outputs[0].text
    assert len(several[1].outputs[0].token_ids) == 3
    numbers: dict[str, Any] = {"max_tokens": np.int32(24), "temperature": np.float64(0.8), "seed": np.int64(5)}
    lists: dict[str, Any] = {"stop": None, "stop_token_ids": None, "logit_bias": None}
    assert SamplingParams(**numbers, **lists) == PARAMS
    biased = SamplingParams(logit_bias={np.int64(7): np.float32(1.5)}, stop_token_ids=np.array([3]))
    assert biased == SamplingParams(logit_bias={7: 1.5}, stop_token_ids=(3,))
    assert llm.get_tokenizer().encode(text) == ids


SURROGATE = "\ud800"


@pytest.mark.parametrize(
    ("ask", "words"),
    [
        (lambda llm: LLM("full", draft_models="tiny"), "draft_models is 'tiny': give a list"),
        (lambda llm: LLM("full", dtyp="float32"), r"LLM has no option 'dtyp'; did you mean 'dtype'\?"),
        (lambda llm: LLM("full", engine="VLLM"), "engine is 'VLLM': it must be one of cascade, vllm"),
        (lambda llm: Cascade([llm], llm.cascade.tokenizer, window=0), "window is 0: it must be an integer from 1 to 256"),
        (lambda llm: llm.cascade.generate("", PARAMS), "empty"),
        (lambda llm: llm.cascade.generate([1, 99999], PARAMS), "99999"),
        (lambda llm: llm.cascade.generate("x" * 5000, PARAMS), "1024"),
        (lambda llm: llm.cascade.generate(3.5, PARAMS), "float"),
        (lambda llm: llm.cascade.generate(b"x", PARAMS), "bytes"),
        (lambda llm: llm.generate(None), "prompts is None: it must be a prompt or a list"),
        (lambda llm: llm.generate(7), "prompts is 7"),
        (lambda llm: llm.generate(b"x"), "prompts is b'x'"),
        (lambda llm: llm.generate([None]), "A prompt is None"),
        (lambda llm: llm.generate([1.5]), r"A prompt is 1\.5"),
        (lambda llm: llm.generate({"prompt": "x", "multi_modal_data": {}}), "a dictionary of prompt, multi_modal_data"),
        (lambda llm: llm.generate({}), "a dictionary of nothing"),
        (lambda llm: llm.generate("x" + SURROGATE), "lone surrogate"),
        (lambda llm: llm.generate("x", [PARAMS, PARAMS]), "There are 1 prompts and 2 SamplingParams"),
        (lambda llm: llm.generate("x", 5), "params is 5"),
        (lambda llm: llm.chat(None), "messages is .*: it must be a list of messages"),
        (lambda llm: llm.chat("hello"), "messages is .*: it must be a list of messages"),
        (lambda llm: llm.chat([{"role": "king", "content": "x"}]), r"messages\.0\.role is 'king'"),
        (lambda llm: llm.chat([{"role": "user"}]), "content is missing"),
        (lambda llm: llm.chat([5]), "messages"),
        (lambda llm: llm.chat([{"role": "user", "content": SURROGATE}]), "surrogate|unicode"),
        (lambda llm: SamplingParams(n=2), "SamplingParams has no n: give the prompt as often"),
        (lambda llm: SamplingParams(temprature=2), "SamplingParams has no temprature: it takes max_tokens, temperature"),
        (lambda llm: SamplingParams(stop=5), "stop is 5: it must be a list"),
        (lambda llm: SamplingParams(stop=[SURROGATE]), "stop is "),
        (lambda llm: SamplingParams(max_tokens=None), "max_tokens is None"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",  # functions have names that differ from process to process
)
def test_wrong_arguments_are_one_sentence(llm: LLM, ask: Any, words: str) -> None:
    """Guards against Python's raw errors for what vLLM's users may type, and answers to nothing."""
    with pytest.raises((ConfigError, InvalidRequest), match=words) as caught:
        ask(llm)
    assert "\n" not in str(caught.value)


def test_conversations_are_written_as_a_servers(llm: LLM) -> None:
    """Guards against a path of its own: a developer was dropped, parts and null contents failed, arguments were escaped."""
    call = {"id": "call_1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    chat = [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "1 + "}, {"type": "text", "text": "1?"}]},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "2"},
    ]
    tokenizer = copy.copy(llm.cascade.tokenizer)
    tokenizer.chat_template = (
        "{% for m in messages if m.role != 'developer' %}<{{ m.role }}>{{ m.content }}"
        "{% for c in m.tool_calls %}{{ c.function.arguments | tojson }}{% endfor %}{% endfor %}"
    )
    assert prompt_of(ChatTemplate(tokenizer), chat) == '<system>Be brief.<user>1 + 1?<assistant>{"a": 1}<tool>2'
