"""The packed pass on real architectures, against Transformers' own generate."""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AttentionInterface, PreTrainedModel
from transformers.masking_utils import causal_mask_function, chunked_causal_mask_function, sliding_window_causal_mask_function

from cascade import ModelError, SamplingParams
from cascade.draft import Draft
from cascade.engine.model import Model
from cascade.engine.network.attention import Attention, Span, attend
from cascade.engine.network.contiguous import Cache, Contiguous, Pass
from cascade.engine.network.survey import window_of_mask
from cascade.scorer import TILE, Row, Scored
from tests.architectures import CONTEXT, DEFAULT, REFUSED, SERVED, VOCAB, build, each

GREEDY = SamplingParams(temperature=0.0, seed=0)
PROMPTS = ((5, 9, 2), (1, *range(20, 41)), (7, 7, 8, 3, 60, 61, 62, 63, 64, 11, 12))
NEW = 24
PREFIX = tuple(range(3, 33))  # several windows long


pytestmark = pytest.mark.usefixtures("one_thread")


def way(name: str) -> Attention | None:
    """A new strategy: "native", which is chosen here, or "contiguous"."""
    return None if name == "native" else Contiguous()


@cache
def written(name: str) -> tuple[tuple[int, ...], ...]:
    """The texts that `generate` writes for PROMPTS."""
    network = build(name)
    network.set_attn_implementation("eager")
    return tuple(tuple(_generate(network, prompt)) for prompt in PROMPTS)


@cache
def served(name: str, attention: str = "native") -> tuple[Model, tuple[tuple[int, ...], ...]]:
    """A model and the texts that `generate` writes for PROMPTS with its weights."""
    return Model(build(name), attention=way(attention), cache_tokens=4096), written(name)


CONTIGUOUS = ("llama", "gemma2", "deepseek_v3")  # by default: it is for 16 bits, and the others have tests of their bits
WAYS = [
    pytest.param(
        name,
        attention,
        id=name if attention == "native" else f"{name}-{attention}",
        marks=() if name in DEFAULT and (attention != "contiguous" or name in CONTIGUOUS) else pytest.mark.slow,
    )
    for name in SERVED
    for attention in ("native", "contiguous")
]


def _generate(network: PreTrainedModel, prompt: tuple[int, ...]) -> list[int]:
    ids = torch.tensor([prompt])
    out: Tensor = network.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=NEW, do_sample=False)
    return out[0].tolist()


@dataclass
class Writer:
    """One session, driven by a random schedule: chunked prompt, windows partly right, rollbacks."""

    cache: Cache
    prompt: tuple[int, ...]
    goal: tuple[int, ...]
    rng: random.Random
    text: list[int] = field(default_factory=list)
    held: int = 0  # positions of the text in the cache

    @property
    def done(self) -> bool:
        return len(self.text) >= len(self.goal)

    def row(self) -> Row:
        """A chunk of the prompt, or the text's end and a draft after it, from anywhere the cache allows."""
        self.text = self.text or list(self.prompt)
        start = self.held if self.rng.random() < 0.7 else self.rng.randint(0, self.held)
        unread = self.text[start:]
        if len(unread) > 2 and self.rng.random() < 0.3:
            return Row(self.cache, start, unread[: self.rng.randint(1, len(unread) - 1)], 0, GREEDY)
        right = list(self.goal[len(self.text) :][: self.rng.randint(0, 6)])
        draft = right + [self.rng.randrange(VOCAB) for _ in range(self.rng.randint(0, 3))]
        return Row(self.cache, start, unread, 1, GREEDY, draft=Draft(tuple(draft), bytes(len(draft))))

    def take(self, row: Row, own: Sequence[int]) -> None:
        """Accept the draft up to its first wrong token, and the own token there."""
        if not row.num_own:
            self.held = row.start + len(row.tokens)
            return
        new, _ = row.draft.walk(own)
        self.text += new
        self.held = len(self.text) - 1


def _logits(model: Model, *rows: tuple[Any, int, tuple[int, ...]]) -> Tensor:
    return model.logits([Row(store, start, tokens, len(tokens), GREEDY) for store, start, tokens in rows])


@pytest.mark.parametrize(("name", "attention"), WAYS)
def test_text_equals_generate_under_any_schedule(name: str, attention: str) -> None:
    """Guards exactness: no chunking, draft, rollback or companion in the pass may change a greedy token."""
    model, goals = served(name, attention)
    for seed in range(3):
        rng = random.Random(seed)
        writers = [Writer(model.new_cache(), p, goal, rng) for p, goal in zip(PROMPTS, goals, strict=True)]
        while unfinished := [writer for writer in writers if not writer.done]:
            chosen = rng.sample(unfinished, rng.randint(1, len(unfinished)))
            rows = [writer.row() for writer in chosen]
            for writer, row, scored in zip(chosen, rows, model.run(rows), strict=True):
                assert len(scored.own) == row.num_scored
                writer.take(row, scored.own)
        for writer in writers:
            assert tuple(writer.text[: len(writer.goal)]) == writer.goal


@pytest.mark.parametrize(("name", "attention"), WAYS)
def test_logits_are_those_of_the_text_alone(name: str, attention: str) -> None:
    """Guards rollback and packing: no row sees what its cache held after its start, nor its neighbours in the pass.

    Guards logits behind the greedy tokens, too: they are Transformers' at every position, or only sampled texts would differ.
    """
    model, _ = served(name, attention)
    used, fresh, begun = model.new_cache(), model.new_cache(), model.new_cache()
    _logits(model, (used, 0, PREFIX), (begun, 0, PREFIX[::-1]))
    _logits(model, (used, 11, tuple(range(90, 40, -1))))  # wrong, and longer: the cache grows meanwhile
    companions = (
        (begun, 9, (44, 3)),
        (used, 17, PREFIX[17:21]),
        (model.new_cache(), 0, PREFIX),
        (model.new_cache(), 0, PREFIX[5:]),
    )
    found = _logits(model, *companions)[2 : 6 + len(PREFIX)]
    rolled = _logits(model, (fresh, 0, (*PREFIX[:11], *range(90, 84, -1), *PREFIX[17:21])))[-4:]
    expected = torch.cat([rolled, _logits(model, (model.new_cache(), 0, PREFIX))])
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    assert torch.equal(found[:4].argmax(-1), rolled.argmax(-1))
    if "longrope" not in name:  # whose frequencies depend on the longest text of a pass
        network = build(name)
        network.set_attn_implementation("eager")
        with torch.inference_mode():
            reference = network(input_ids=torch.tensor([PREFIX]), use_cache=False).logits[0]
        torch.testing.assert_close(expected[4:], reference, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("scores", [1, 2000])
@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt_oss", "mistral", "deepseek_v3"])
def test_long_rows_take_turns(name: str, scores: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards memory with long contexts: the queries of a row are split where their scores are too many, and see the same."""
    model, _ = served(name, "contiguous")
    expected = _logits(model, (model.new_cache(), 0, PREFIX))
    monkeypatch.setattr("cascade.engine.network.contiguous.SCORES", scores)
    store = model.new_cache()
    found = torch.cat([_logits(model, (store, 0, PREFIX[:7])), _logits(model, (store, 7, PREFIX[7:]))])
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["mistral", "gpt_oss", "gemma2", "qwen2-sliding"])
def test_a_narrow_window_forgets(name: str) -> None:
    """Guards the mask itself: with all layers sliding, a token farther back than all windows together changes nothing."""
    types: dict[str, Any] = {"layer_types": ["sliding_attention"] * 2} if name != "mistral" else {}
    model = Model(build(name, sliding_window=4, **types), attention=Contiguous(), cache_tokens=1024)
    far, near = (50, *PREFIX[1:]), (*PREFIX[:-3], 50, *PREFIX[-2:])
    last = [_logits(model, (model.new_cache(), 0, text))[-1] for text in (PREFIX, far, near)]
    torch.testing.assert_close(last[1], last[0], rtol=0, atol=1e-5)
    assert (last[2] - last[0]).abs().max() > 1e-2
    store = model.new_cache()
    one_by_one = [_logits(model, (store, place, (token,)))[0] for place, token in enumerate(PREFIX)]
    torch.testing.assert_close(one_by_one[-1], last[0], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("keeps", [True, False])
def test_logits_are_of_the_wanted_positions_alone(keeps: bool) -> None:
    """Guards the projection to the vocabulary, dear at 150k tokens, and its order, with models that keep all logits too."""
    model = Model(build("gemma"))
    model._keeps_logits = keeps
    everything = _logits(model, (model.new_cache(), 0, PREFIX), (model.new_cache(), 0, PREFIX[:5]))
    rows = [Row(model.new_cache(), 0, PREFIX, 2, GREEDY), Row(model.new_cache(), 0, PREFIX[:5], 3, GREEDY)]
    projected: list[int] = []
    head = model._network.get_output_embeddings()
    head.register_forward_hook(lambda module, inputs, out: projected.append(out[..., 0].numel()))
    wanted = model.logits(rows)
    assert wanted.shape == (5, VOCAB)
    torch.testing.assert_close(wanted, torch.cat([everything[28:30], everything[-3:]]))
    chunk = Row(model.new_cache(), 0, PREFIX, 0, GREEDY)
    assert model.logits([chunk]).shape == (0, VOCAB)
    assert model.run([chunk]) == [Scored([])]
    assert projected == [5, 0, 0], "128 thousand tokens of a prompt would be 128 GiB of logits"


@pytest.mark.parametrize("name", each(REFUSED, default=("falcon", "mamba", "qwen3_next", "llama4_text", "deepseek_v32")))
def test_refused_architectures_are_named(name: str) -> None:
    """Guards against serving a model whose layers bypass the cache: its text would be nonsense."""
    network = build(name)
    with pytest.raises(ModelError, match=f"^{type(network).__name__} cannot be served: .+"):
        Model(network)


def test_context_ends_where_logits_would_depend_on_companions(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards long RoPE (Phi 3): one long text in a pass changes the frequencies of all rows, and of their past."""
    assert served("phi3-longrope")[0].context_len == 64
    assert Model(build("llama-dynamic")).context_len == CONTEXT
    assert served("gpt2")[0].context_len == CONTEXT
    model = Model(build("llama"))
    monkeypatch.setitem(vars(model._network.config), "max_position_embeddings", None)
    assert model.context_len > 10**6


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", each())
def test_rounding_is_no_reason_to_refuse(name: str, dtype: torch.dtype) -> None:
    """Guards against a probe so strict that good models in 16 bits are refused, such as mixtures of experts."""
    assert Model(build(name).to(dtype)).dtype is dtype


class Stray:
    """Our attention with a mistake in it."""

    def __init__(self, mistake: str) -> None:
        self.mistake = mistake

    def __call__(self, module: Any, query: Tensor, key: Tensor, value: Tensor, mask: None, **options: Any) -> Any:
        rows: Pass = options["cascade_pass"]
        if self.mistake == "late":
            options["cascade_pass"] = Pass(
                [Span(s.cache, s.begin, s.end, max(0, s.start - 1)) for s in rows.spans], rows.windows
            )
        elif self.mistake == "mixed":
            options["cascade_pass"] = Pass([Span(Cache(), 0, query.shape[2], 0)], rows.windows)
        elif self.mistake == "scale":
            options["scaling"] = 0.5
        elif self.mistake == "layer" and module.layer_idx == 1:
            return torch.full_like(query.transpose(1, 2), torch.nan), None
        return attend(module, query, key, value, mask, **options)


@pytest.mark.parametrize("mistake", ["late", "mixed", "scale", "layer"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_probe_sees_mistakes(monkeypatch: pytest.MonkeyPatch, mistake: str, dtype: torch.dtype) -> None:
    """Guards the probe: a network that treats rows wrongly must not be served, be its logits numbers or not."""
    monkeypatch.setitem(AttentionInterface._global_mapping, "cascade", Stray(mistake))
    with pytest.raises(ModelError, match="LlamaForCausalLM cannot be served: its logits change"):
        Model(build("llama").to(dtype), attention=Contiguous())


def test_probe_sees_that_positions_are_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards models that number tokens by themselves, as if the packed input were one text."""
    network = build("gemma")
    forward = network.model.forward
    monkeypatch.setattr(network.model, "forward", lambda *args, position_ids=None, **options: forward(*args, **options))
    with pytest.raises(ModelError, match="logits change"):
        Model(network)


@pytest.mark.parametrize(
    ("mask", "size", "window"),
    [
        (causal_mask_function, None, 0),
        (sliding_window_causal_mask_function(8), 8, 8),
        (sliding_window_causal_mask_function(1), 1, 1),
        (chunked_causal_mask_function(8, torch.zeros(1, dtype=torch.long)), 8, -1),
        (chunked_causal_mask_function(8192, torch.zeros(1, dtype=torch.long)), 8192, -1),
        (lambda batch, head, query, keys: keys <= query + 1, None, -1),
        (lambda batch, head, query, keys: (keys <= query) & (keys % 2 == 0), None, -1),
    ],
)
def test_windows_are_read_off_masks(mask: Any, size: int | None, window: int) -> None:
    """Guards the survey: chunked, dilated or two-sided attention must not pass for a window."""
    assert int(window_of_mask(mask_function=mask, local_size=size)) == window


def test_cache_holds_and_frees() -> None:
    """Guards memory: what is counted is what is held, growth keeps what is written, nothing stays when freed."""
    model = Model(build("llama", head_dim=16))
    store = model.new_cache()
    assert store.nbytes == 0
    _logits(model, (store, 0, PREFIX))
    assert model.bytes_per_token == 2 * 2 * 2 * 16 * 4  # layers, keys and values, heads, size of a head, bytes
    assert store.nbytes == TILE * model.bytes_per_token
    expected = _logits(model, (store, len(PREFIX), PREFIX))
    store.reserve(TILE + 1)
    assert store.nbytes == 2 * TILE * model.bytes_per_token
    assert torch.equal(_logits(model, (store, len(PREFIX), PREFIX)), expected)
    store.free()
    assert store.nbytes == 0


@pytest.mark.parametrize("attention", [lambda: None, Contiguous])
def test_drafts_that_overflow_harm_nobody(attention: Callable[[], Attention | None]) -> None:
    """Guards texts before and after a wrong draft whose keys are not numbers: 0 times that is not 0."""
    network = build("llama-untied-bias")
    model = Model(network, attention=attention(), cache_tokens=1024)
    text, drafts = tuple(range(3, 20)), (*range(30, 40), 77)
    expected = _logits(model, (model.new_cache(), 0, text))
    with torch.no_grad():
        network.get_input_embeddings().weight[77] = torch.inf
    store = model.new_cache()
    found = _logits(model, (store, 0, (*text[:10], *drafts)))
    assert not found[-1].isfinite().any()
    torch.testing.assert_close(found[:10], expected[:10], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(_logits(model, (store, 10, text[10:])), expected[10:], rtol=1e-4, atol=1e-4)
    store.free()
    other = model.new_cache()  # in the blocks that the first one had
    torch.testing.assert_close(_logits(model, (other, 0, text)), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("attention", [lambda: None, Contiguous])
def test_forks_that_overflow_harm_nobody(attention: Callable[[], Attention | None]) -> None:
    """Guards the same for a branch: neither its base nor another branch, nor its own next guesses, may see it."""
    network = build("llama-untied-bias")
    model = Model(network, attention=attention(), cache_tokens=1024)
    text, other = tuple(range(3, 20)), tuple(range(40, 46))
    expected = _logits(model, (model.new_cache(), 0, text)), _logits(model, (model.new_cache(), 0, text[:12] + other))[12:]
    with torch.no_grad():
        network.get_input_embeddings().weight[77] = torch.inf
    store = model.new_cache()
    fork, wrong = store.fork(12), store.fork(9)
    found = _logits(model, (wrong, 9, (77, 5)), (store, 0, text), (fork, 12, other[:2]))
    torch.testing.assert_close(found[2:], torch.cat([expected[0], expected[1][:2]]), rtol=1e-4, atol=1e-4)
    _logits(model, (fork, 14, (77, 77)))
    found = _logits(model, (fork, 14, other[2:]), (store, 16, text[16:]), (wrong, 9, text[9:]))
    torch.testing.assert_close(found, torch.cat([expected[1][2:], expected[0][16:], expected[0][9:]]), rtol=1e-4, atol=1e-4)
