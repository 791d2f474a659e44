"""The library in one process and vLLM's shape around it, on the small models, against Transformers' own generate."""

import asyncio
import copy
import gc
import random
import shutil
import threading
import weakref
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from cascade import LLM, Cascade, Completion, ConfigError, InvalidRequest, ModelError, SamplingParams, Speculation, Unavailable
from cascade.chat.template import ChatTemplate
from cascade.drafters import DrafterSpec
from cascade.engine import models
from cascade.engine.model import Model
from cascade.engine.tokenizer import Tokenizer, pretrained
from cascade.llm import prompt_of
from cascade.messages import Edge
from cascade.scorer import Row
from cascade.settings.check import needs
from tests import small
from tests.cases import crossed, rare
from tests.waiting import wait_until

PROMPTS = ["def read(path):\n    with open(path) as file:\n", "import os\n\nclass Shape:\n    def __init__(self"]
PROMPT = PROMPTS[0]
CHATS = [[{"role": "user", "content": text}] for text in PROMPTS]
SAMPLED = SamplingParams(max_tokens=24, temperature=0.8, seed=5)
CHAINS: dict[str, tuple[str, ...]] = {name: (name,) for name in ("medium", "tiny", "suffix")}
CHAINS |= {"both": ("tiny", "medium"), "none": (), "all": ("suffix", "tiny", "medium")}


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    *lower, full = small.paths()
    with LLM(full, draft_models=lower[::-1], dtype="float32", device="cpu") as llm:
        yield llm
        # tiers hear of the last end a moment later
        wait_until(lambda: [tier.num_sessions for tier in llm.cascade.tiers] == [0, 0, 0])
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("tier-")]


@pytest.fixture(scope="module")
def cascade(llm: LLM) -> Cascade:
    return llm.cascade


def test_greedy_text_equals_transformers(cascade: Cascade) -> None:
    """Guards the whole path against the reference: prompt to text, through three models, token by token."""
    full = AutoModelForCausalLM.from_pretrained(small.paths()[-1], dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(small.paths()[-1])
    for prompt in (PROMPT, "# é日本\nx = ["):
        ids = tokenizer(prompt, return_tensors="pt")
        expected = full.generate(**ids, max_new_tokens=40, do_sample=False)[0, ids["input_ids"].shape[1] :].tolist()
        completion = cascade.generate(prompt, SamplingParams(max_tokens=40, temperature=0))
        assert list(completion.token_ids) == expected
        assert completion.text == tokenizer.decode(expected, skip_special_tokens=True)


FILTERS: dict[str, Any] = {"top_k": 20, "top_p": 0.9, "min_p": 0.05}
PARAMS = {
    **{str(heat): SamplingParams(max_tokens=50, temperature=heat, seed=1) for heat in (0, 0.7, 1.5)},
    **{name: SamplingParams(max_tokens=50, seed=2, **{name: value}) for name, value in FILTERS.items()},
}


@pytest.mark.parametrize(("params", "tiers"), crossed(PARAMS, CHAINS))
def test_text_does_not_depend_on_tiers_windows_or_branches(
    cascade: Cascade, params: SamplingParams, tiers: tuple[str, ...]
) -> None:
    """Guards the promise: any subset of tiers, window and branches give the text of the full model alone."""
    rng = random.Random(params.seed or 0)
    alone = cascade.generate(PROMPT, params, Speculation("off"))
    assert {edge.drafter for edge in alone.stats.edges} == {""}
    for branches in rng.sample((None, 0, 1, 20), 2):
        speculation = Speculation(tiers=tiers, window=rng.randint(1, 20), branches=branches)
        other = cascade.generate(PROMPT, params, speculation)
        assert (other.text, other.token_ids, other.finish_reason) == (alone.text, alone.token_ids, alone.finish_reason)
        assert len(other.origins) == len(other.token_ids)


class Deserter:
    """A model whose tier's loop ends in the fifth pass after ``armed``, as by an error that nobody expects."""

    armed, passes = False, 0

    def __init__(self, model: Model) -> None:
        self._model, self.new_cache = model, model.new_cache
        self.vocab_size, self.context_len, self.cache_tokens = model.vocab_size, model.context_len, model.cache_tokens
        self.collect = model.collect

    def launch(self, rows: Sequence[Row]) -> Sequence[Row]:
        self.passes += self.armed
        if self.passes == 5:
            raise SystemExit
        return self._model.launch(rows)


@pytest.mark.filterwarnings("ignore:Exception in thread tier")
@pytest.mark.parametrize("dead", [rare(0), 1, 2])
def test_a_tier_whose_loop_ends_is_missed(cascade: Cascade, dead: int) -> None:
    """Guards the tiers above against a hang: lower tiers are done without, in the same text, and the full one fails at once."""
    params = SamplingParams(max_tokens=40, temperature=0.8, seed=6, ignore_eos=True)
    expected = cascade.generate(PROMPT, params, Speculation("off")).token_ids
    models: list[Any] = [Model.from_pretrained(path, dtype="float32") for path in small.paths()]
    models[dead], everyone = Deserter(models[dead]), Speculation(tiers=("tiny", "medium"))
    with Cascade(models, cascade.tokenizer) as left:
        models[dead].armed = True
        for _ in range(2):
            if dead == 2:
                with pytest.raises(Unavailable, match="tier full stopped"):
                    left.generate(PROMPT, params, everyone)
            else:
                assert left.generate(PROMPT, params, everyone).token_ids == expected


def test_models_on_one_gpu_share_its_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards cascades on a GPU: the cache of the first model took all that the weights of the others wanted."""
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (2 * 10**9, 2 * 10**9))
    loaded = [Model.from_pretrained(path, dtype="float32", device="cpu") for path in small.paths()]
    before = [model.cache_tokens for model in loaded]
    models.share_memory(loaded)
    assert [model.cache_tokens for model in loaded] == before
    for model in loaded:
        model.device = torch.device("cuda")
    models.share_memory(loaded)
    sizes = [needed.anatomy.cache_bytes_per_token for needed in needs(small.config())]
    assert [model.cache_tokens for model in loaded] == [1_800_000_000 // sum(sizes)] * 3


@pytest.fixture(scope="module")
def identical(cascade: Cascade) -> Iterator[Cascade]:  # which counts threads at its end, and so must be the last to go
    """The full model as every tier."""
    full = small.paths()[-1]
    models = [Model.from_pretrained(full, dtype="float32") for _ in range(3)]
    with Cascade(models, Tokenizer.from_pretrained(full), drafter=None) as cascade:
        yield cascade


@pytest.mark.parametrize(
    ("temperature", "branches", "num_tokens"),
    [(0.0, 0, 50), (1.0, None, 50), *(rare(heat, branches, 150) for heat in (0.0, 1.0) for branches in (0, None))],
)
@pytest.mark.usefixtures("always_draft")
def test_identical_models_accept_everything(
    identical: Cascade, temperature: float, branches: int | None, num_tokens: int
) -> None:
    """Guards keys, values and positions of drafters: an error there leaves the text right and the guesses wrong."""
    params = SamplingParams(max_tokens=num_tokens, temperature=temperature, seed=3, ignore_eos=True)
    speculation = Speculation(tiers=identical.names[:-1], branches=branches, window=7)
    edges: list[Edge] = []

    def drafted() -> int:  # who runs beside its twin may come too late each time
        edges.extend(identical.generate(PROMPT, params, speculation).stats.edges)
        return sum(edge.proposed for edge in edges)

    wait_until(drafted)
    assert not any(edge.corrected for edge in edges)
    if branches == 0:  # drafts are lines: nothing else is offered
        assert all(edge.accepted == edge.proposed for edge in edges)


def test_many_answers_on_one_loop(cascade: Cascade) -> None:
    """Guards the event-loop variants: each answer of a loop finds its reader, and a loop that is over is not kept."""
    params = [SamplingParams(max_tokens=24, temperature=0.8, seed=seed) for seed in range(6)]
    loops: list[weakref.ref[asyncio.AbstractEventLoop]] = []

    async def leave() -> None:
        loops.append(weakref.ref(asyncio.get_running_loop()))
        async for _ in cascade.astream(PROMPT, SamplingParams(max_tokens=500, temperature=1.0)):
            return

    async def together() -> tuple[list[Completion | list[Completion]], str]:
        batch = cascade.agenerate([PROMPT, "    return self._lock"], params[0])
        answers, _ = await asyncio.gather(
            asyncio.gather(batch, *(cascade.agenerate(PROMPT, chosen) for chosen in params)), leave()
        )
        return answers, "".join([chunk.text async for chunk in cascade.astream(PROMPT, params[0])])

    with pytest.raises(InvalidRequest):
        asyncio.run(cascade.agenerate("", params[0]))
    [both, *singles], text = asyncio.run(together())
    alone = [cascade.generate(PROMPT, chosen) for chosen in params]
    assert [chosen.token_ids for chosen in singles if isinstance(chosen, Completion)] == [chosen.token_ids for chosen in alone]
    assert (both[0].token_ids, text) == (alone[0].token_ids, alone[0].text)
    gc.collect()
    assert loops[0]() is None


def test_models_that_do_not_belong_together_are_refused(tmp_path) -> None:
    """Guards against drafts in another language: the same ids must mean the same text in all tiers."""
    tokenizer = AutoTokenizer.from_pretrained(small.paths()[0])
    tokenizer.add_tokens(["surprise"])
    tokenizer.save_pretrained(tmp_path)
    AutoModelForCausalLM.from_pretrained(small.paths()[0]).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="different tokenizers"):
        Cascade.from_pretrained([str(tmp_path), small.paths()[-1]])
    with pytest.raises(ModelError, match="no-such-model"):
        Cascade.from_pretrained(["./no-such-model"])


def test_texts_are_those_of_the_cascade(llm: LLM) -> None:
    """Guards order and fields: each output belongs to its prompt."""
    assert llm.cascade.names[-3:] == small.NAMES
    outputs = llm.generate(PROMPTS, SAMPLED)
    assert [output.prompt for output in outputs] == PROMPTS
    for output, wanted in zip(outputs, llm.cascade.generate(PROMPTS, SAMPLED), strict=True):
        [result] = output.outputs
        assert (result.text, result.token_ids) == (wanted.text, wanted.token_ids)
        assert (result.finish_reason, result.index) == (wanted.finish_reason, 0)
    assert llm.generate([], SAMPLED) == []


def test_conversations_go_through_the_chat_template(llm: LLM) -> None:
    """Guards prompts of chats: to the token what `apply_chat_template` gives, of one conversation and of several."""
    backend = pretrained(llm.cascade.tokenizer.source)
    ids = [backend.apply_chat_template(chat, add_generation_prompt=True, return_dict=False) for chat in CHATS]
    expected = [completion.text for completion in llm.cascade.generate(ids, SAMPLED)]
    outputs = llm.chat(CHATS, SAMPLED)
    assert [output.prompt_token_ids for output in outputs] == ids
    assert [output.outputs[0].text for output in outputs] == expected
    [output] = llm.chat(CHATS[1], SAMPLED)
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
    [expected] = llm.generate(text, SAMPLED)
    array = np.array(ids)
    forms: list[Any] = [{"prompt": text}, {"prompt_token_ids": ids}, array, {"prompt_token_ids": array}, torch.tensor(ids)]
    for form in (*forms, [np.int64(token) for token in ids], tuple(ids)):
        for given in (form, [form]):
            [output] = llm.generate(given, SAMPLED, use_tqdm=False)
            assert output.outputs[0].text == expected.outputs[0].text
            assert output.prompt_token_ids == ids
    several = llm.generate(np.array([ids, ids]), [SAMPLED, SamplingParams(max_tokens=3, temperature=0)])
    assert several[0].outputs[0].text == expected.outputs[0].text
    assert len(several[1].outputs[0].token_ids) == 3
    numbers: dict[str, Any] = {"max_tokens": np.int32(24), "temperature": np.float64(0.8), "seed": np.int64(5)}
    lists: dict[str, Any] = {"stop": None, "stop_token_ids": None, "logit_bias": None}
    assert SamplingParams(**numbers, **lists) == SAMPLED
    biased = SamplingParams(logit_bias={np.int64(7): np.float32(1.5)}, stop_token_ids=np.array([3]))
    assert biased == SamplingParams(logit_bias={7: 1.5}, stop_token_ids=(3,))
    assert llm.get_tokenizer().encode(text) == ids


SURROGATE = "\ud800"


@pytest.mark.parametrize(
    ("ask", "words"),
    [
        (lambda llm: Cascade.from_pretrained([]), "models has 0 entries"),
        (lambda llm: Cascade.from_pretrained(["x"] * 6), "models has 6 entries"),
        (lambda llm: Cascade.from_pretrained("Qwen/Qwen3-4B"), "models is 'Qwen/Qwen3-4B': give a list"),
        (lambda llm: Cascade.from_pretrained(["x", "y"], names=["full"]), "names is .*each of the 2 models"),
        (lambda llm: Cascade.from_pretrained(["x", "y"], names=["full", "full"]), "names is .*each of the 2 models"),
        (lambda llm: small.cascade(drafter="oracle"), "drafter.kind is 'oracle': it must be one of auto, suffix, corpus"),
        (lambda llm: small.cascade(drafter=["suffix", "suffix"]), "names 'suffix' twice"),
        (lambda llm: small.cascade(drafter=DrafterSpec("corpus", "nowhere.txt")), "'nowhere.txt', which cannot be read"),
        (lambda llm: small.cascade(names=["suffix", "a", "b"]), "'suffix', as one of its drafters is: give it another name"),
        (lambda llm: LLM("full", draft_models="tiny"), "draft_models is 'tiny': give a list"),
        (lambda llm: LLM("full", dtyp="float32"), r"LLM has no option 'dtyp'; did you mean 'dtype'\?"),
        (lambda llm: LLM("full", engine="VLLM"), "engine is 'VLLM': it must be one of cascade, vllm"),
        (lambda llm: Cascade([llm], llm.cascade.tokenizer, window=0), "window is 0: it must be an integer from 1 to 256"),
        (lambda llm: llm.cascade.generate("", SAMPLED), "empty"),
        (lambda llm: llm.cascade.generate([1, 99999], SAMPLED), "99999"),
        (lambda llm: llm.cascade.generate("x" * 5000, SAMPLED), "1024"),
        (lambda llm: llm.cascade.generate(3.5, SAMPLED), "float"),
        (lambda llm: llm.cascade.generate(b"x", SAMPLED), "bytes"),
        (lambda llm: llm.generate(None), "prompts is None: it must be a prompt or a list"),
        (lambda llm: llm.generate(7), "prompts is 7"),
        (lambda llm: llm.generate(b"x"), "prompts is b'x'"),
        (lambda llm: llm.generate([None]), "A prompt is None"),
        (lambda llm: llm.generate([1.5]), r"A prompt is 1\.5"),
        (lambda llm: llm.generate({"prompt": "x", "multi_modal_data": {}}), "a dictionary of prompt, multi_modal_data"),
        (lambda llm: llm.generate({}), "a dictionary of nothing"),
        (lambda llm: llm.generate("x" + SURROGATE), "lone surrogate"),
        (lambda llm: llm.generate("x", [SAMPLED, SAMPLED]), "There are 1 prompts and 2 SamplingParams"),
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
        (lambda llm: llm.cascade.generate("x", None, {"mode": "off"}), "speculation is {'mode': 'off'}: it must be a `Specul"),
        (lambda llm: llm.cascade.generate("x", handling={}), "handling is {}: it must be a `Handling`"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",  # functions have names that differ from process to process
)
def test_wrong_arguments_are_one_sentence(llm: LLM, ask: Any, words: str) -> None:
    """Guards against Python's raw errors for what users may type, a name that is taken letter by letter, drafts of nobody."""
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
