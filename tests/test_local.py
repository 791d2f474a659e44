"""The library in one process, on real models: the small models, against Transformers' own generate."""

import asyncio
import gc
import random
import threading
import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from cascade import Cascade, Completion, ConfigError, InvalidRequest, ModelError, SamplingParams, Speculation, Unavailable
from cascade.drafters import DrafterSpec
from cascade.engine import models
from cascade.engine.model import Model
from cascade.engine.tokenizer import Tokenizer
from cascade.messages import Edge
from cascade.scorer import Row
from cascade.settings.check import needs
from tests import small
from tests.cases import crossed, rare
from tests.waiting import wait_until

PROMPT = "def read(path):\n    with open(path) as file:\n"
CHAINS = {
    "both": ("tiny", "medium"),
    "medium": ("medium",),
    "tiny": ("tiny",),
    "none": (),
    "suffix": ("suffix",),
    "all": ("suffix", "tiny", "medium"),
}


@pytest.fixture(scope="module")
def cascade() -> Iterator[Cascade]:
    with small.cascade() as cascade:
        yield cascade
        wait_until(lambda: not any(tier.num_sessions for tier in cascade.tiers))  # they hear of the last end a moment later
        assert [tier.num_sessions for tier in cascade.tiers] == [0, 0, 0]
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("tier-")]


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


PARAMS = {
    "greedy": SamplingParams(max_tokens=50, temperature=0),
    "cool": SamplingParams(max_tokens=50, temperature=0.7, seed=1),
    "hot": SamplingParams(max_tokens=50, temperature=1.5, seed=2),
    "top_k": SamplingParams(max_tokens=50, temperature=1.0, seed=3, top_k=20),
    "top_p": SamplingParams(max_tokens=50, temperature=1.0, seed=4, top_p=0.9),
    "min_p": SamplingParams(max_tokens=50, temperature=1.0, seed=5, min_p=0.05),
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


@pytest.mark.parametrize(
    ("models", "names", "words"),
    [
        ([], None, "models has 0 entries"),
        (["x"] * 6, None, "models has 6 entries"),
        ("Qwen/Qwen3-4B", None, "models is 'Qwen/Qwen3-4B': give a list"),
        (["x", "y"], ["full"], "names is .*each of the 2 models"),
        (["x", "y"], ["full", "full"], "names is .*each of the 2 models"),
    ],
)
def test_lists_of_models_are_checked_first(models: Sequence[str], names: list[str] | None, words: str) -> None:
    """Guards the first call of a new user: a name that is no list was taken letter by letter, none at all was an IndexError."""
    with pytest.raises(ConfigError, match=words):
        Cascade.from_pretrained(models, names=names)


@pytest.mark.parametrize(
    ("drafter", "words"),
    [
        ("oracle", "drafter.kind is 'oracle': it must be one of auto, suffix, corpus, lookahead"),
        (["suffix", "suffix"], "names 'suffix' twice"),
        (DrafterSpec("corpus", "nowhere.txt"), "'nowhere.txt', which cannot be read: No such file"),
        ("suffix", "'suffix', as one of its drafters is: give it another name"),
    ],
)
def test_wrong_drafters_are_refused(drafter: Any, words: str) -> None:
    """Guards the start: one sentence that names the value, instead of a cascade that silently drafts nothing."""
    with pytest.raises(ConfigError, match=words):
        small.cascade(drafter=drafter, names=("suffix", "medium", "full") if drafter == "suffix" else None)
