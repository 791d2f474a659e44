"""Captured passes: the same own tokens as passes that are not, whatever the rows, and nothing of the host in them."""

import itertools
from collections.abc import Sequence
from functools import cache, partial
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from cascade.answer import Answer
from cascade.chain.local_links import join
from cascade.chain.tier import Tier
from cascade.engine.attention import Contiguous, Gathered, Paged, Varlen
from cascade.engine.graphs import (
    BUCKETS,
    MAX_TOKENS,
    ROW_COUNTS,
    RUNNER_UPS,
    STEPS,
    TOKEN_COUNTS,
    Bucket,
    Task,
    bucket_for,
    eager,
)
from cascade.engine.kernels import gather_attention
from cascade.engine.lean import PLAIN
from cascade.engine.model import Model
from cascade.engine.sampling import (
    FILTERED,
    GREEDY,
    NOISY,
    Choice,
    demand,
    own_tokens,
    own_tokens_and_next,
    own_tokens_of,
    runner_ups,
)
from cascade.engine.sequence_state import SequenceState
from cascade.errors import ModelError
from cascade.messages import Open
from cascade.params import SamplingParams
from cascade.scorer import BLOCK, Row, Scored
from tests.architectures import VOCAB, build
from tests.chain.test_tier import PROMPT, Inbox, Silent, finish, opening, settle
from tests.kernels import varlen

CPU = torch.device("cpu")
WAYS = [
    *itertools.product(["llama", "mistral", "qwen2-sliding", "gpt2", "phi", "opt"], ["varlen"]),
    *itertools.product(["llama", "mistral", "gemma2", "gpt_oss", "deepseek_v3", "mimo_v2_flash"], ["gathered"]),
]


def some(ways: Sequence[tuple[str, str]], *default: tuple[str, str]) -> list[Any]:
    """``ways`` as parameters of a test; those that are not in ``default`` are for `make test-all` alone."""
    return [pytest.param(*way, marks=() if way in default else pytest.mark.slow) for way in ways]


NAMES = some(WAYS, ("llama", "varlen"), ("qwen2-sliding", "varlen"), ("gemma2", "gathered"), ("gpt_oss", "gathered"))


def over(attention: str, kernel: Any = varlen) -> Paged:
    return Gathered(BLOCK) if attention == "gathered" else Varlen(kernel, CPU, BLOCK)


@cache
def models(name: str, attention: str = "varlen") -> tuple[Model, Model]:
    """The model with captured passes, and the plain one."""
    captured = Model(build(name), attention=over(attention), capture=eager, cache_tokens=4096)
    return captured, Model(build(name), attention=Contiguous())


PARAMS = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.0, 0.7, 1.3]),
    seed=st.integers(0, 2**63 - 1),
    top_k=st.sampled_from([0, 0, 5, 200]),
    top_p=st.sampled_from([1.0, 1.0, 0.9, 0.2]),
    min_p=st.sampled_from([0.0, 0.0, 0.1]),
)


@st.composite
def plans(draw: st.DrawFn) -> list[list[tuple[int, float, int, int, SamplingParams]]]:
    """Passes of rows: session, where it starts (a share of what is held), tokens, own tokens wanted, parameters."""
    rows = st.tuples(st.integers(0, 4), st.floats(0, 1), st.integers(1, 12), st.integers(0, 12), PARAMS)
    return draw(st.lists(st.lists(rows, min_size=1, max_size=5, unique_by=lambda row: row[0]), min_size=1, max_size=6))


@pytest.mark.parametrize(("name", "attention"), NAMES)
@settings(deadline=None, derandomize=True, max_examples=20)
@given(plan=plans(), seed=st.integers(0, 99))
def test_captured_passes_say_the_same(name: str, attention: str, plan: list[Any], seed: int) -> None:
    """Guards buckets: padding, places, positions, tables, noise and filters, over rollbacks and whatever companions."""
    captured, plain = models(name, attention)
    stores = [(captured.new_cache(), plain.new_cache()) for _ in range(5)]
    held, noise = [0] * 5, torch.Generator().manual_seed(seed)
    for rows in plan:
        pairs = []
        for session, share, n, num_own, params in rows:
            start = min(int(share * (held[session] + 1)), held[session], 90)
            tokens = torch.randint(0, VOCAB, (n,), generator=noise).tolist()
            pairs.append([Row(store, start, tokens, min(n, num_own), params) for store in stores[session]])
            held[session] = start + n
        assert captured.run([row for row, _ in pairs]) == plain.run([row for _, row in pairs])


@pytest.mark.parametrize(("name", "attention"), NAMES)
@settings(deadline=None, derandomize=True, max_examples=12)
@given(params=st.lists(PARAMS, min_size=1, max_size=5), ahead=st.lists(st.integers(0, 6), min_size=5, max_size=5))
def test_own_tokens_fed_back_are_those_of_single_passes(
    name: str, attention: str, params: list[SamplingParams], ahead: list[int]
) -> None:
    """Guards a launch of several steps: positions, noise and blocks move on with the text, over the ends of blocks."""
    captured, plain = models(name, attention)
    texts, stores = [], []
    for session, one in enumerate(params):
        prompt = [(7 * place + session) % VOCAB for place in range(11 + session)]
        stores.append((captured.new_cache(), plain.new_cache()))
        own = [
            model.run([Row(store, 0, prompt, 1, one)])[0].own
            for model, store in zip((captured, plain), stores[-1], strict=True)
        ]
        assert own[0] == own[1]
        texts.append([*prompt, *own[0]])
    for _ in range(3):
        rows = [
            Row(store, len(text) - 1, text[-1:], 1, one, ahead=more)
            for (store, _), text, one, more in zip(stores, texts, params, ahead, strict=False)
        ]
        steps = min(STEPS, 1 + min(ahead[: len(params)]))
        for text, scored, (_, store), one in zip(texts, captured.run(rows), stores, params, strict=True):
            assert len(scored.own) + len(scored.ahead) == steps
            for token in (*scored.own, *scored.ahead):
                assert plain.run([Row(store, len(text) - 1, text[-1:], 1, one)]) == [Scored([token])]
                text.append(token)


@pytest.mark.parametrize(("name", "attention"), NAMES)
@settings(deadline=None, derandomize=True, max_examples=12)
@given(params=st.lists(PARAMS, min_size=1, max_size=4), wanted=st.lists(st.integers(0, 2), min_size=4, max_size=4))
def test_captured_passes_have_the_same_runner_ups(
    name: str, attention: str, params: list[SamplingParams], wanted: list[int]
) -> None:
    """Guards runner-ups in graphs: of the first own token where a launch takes several steps, and for rows that want any."""
    captured, plain = models(name, attention)
    stores = [(captured.new_cache(), plain.new_cache()) for _ in params]
    for start, tokens in ((0, [5, 6, 7]), (3, [8])):
        said = [
            model.run(
                [
                    Row(store[side], start, tokens, 1, one, ahead=3, runner_ups=number)
                    for store, one, number in zip(stores, params, wanted, strict=False)
                ]
            )
            for side, model in enumerate((captured, plain))
        ]
        for number, *ways in zip(wanted, *said, strict=False):
            found, expected = (one.runner_ups for one in ways)
            assert ways[0].own == ways[1].own
            assert len(found) == len(expected) == bool(number)
            assert [[up.token for up in ups] for ups in found] == [[up.token for up in ups] for ups in expected]
            assert all(len(ups) <= number for ups in found)
            for ups, others in zip(found, expected, strict=True):
                assert [up.gap for up in ups] == pytest.approx([up.gap for up in others], abs=1e-3)


def test_only_small_plain_passes_are_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against a bucket that is too small, and against penalties, grammars and log-probabilities that are ignored."""
    captured, plain = models("llama")
    greedy = SamplingParams(temperature=0, seed=0)
    asked: list[int] = []
    logits = captured.logits
    monkeypatch.setattr(captured, "logits", lambda rows: asked.append(len(rows)) or logits(rows))

    def run(*rows: tuple[int, SamplingParams, SequenceState | None]) -> int:
        del asked[:]
        own = []
        for model in (captured, plain):
            made = [Row(model.new_cache(), 0, list(range(n)), 1, params, state) for n, params, state in rows]
            own.append(model.run(made))
        assert own[0] == own[1]
        return len(asked)

    assert run((TOKEN_COUNTS[-1], greedy, None)) == 0
    assert run((TOKEN_COUNTS[-1] + 1, greedy, None)) == 1
    assert run(*[(1, greedy, None)] * ROW_COUNTS[-1]) == 0
    assert run(*[(1, greedy, None)] * (ROW_COUNTS[-1] + 1)) == 1
    shaped = SamplingParams(temperature=0, seed=0, logit_bias={5: 100.0})
    assert run((3, greedy, None), (3, shaped, SequenceState(Open("s", (0, 1, 2), 3, shaped), [0, 1, 2]))) == 1


def test_buckets_waste_as_little_as_they_can() -> None:
    """Guards the choice: the smallest bucket that holds a pass, and none that does not."""
    for rows in range(1, ROW_COUNTS[-1] + 2):
        for tokens in range(1, TOKEN_COUNTS[-1] + 2):
            found = bucket_for(rows, tokens)
            fitting = [bucket for bucket in BUCKETS if bucket.rows >= rows and bucket.tokens >= tokens]
            assert (found is None) == (not fitting)
            if found is not None:
                assert found.size == min(bucket.size for bucket in fitting) <= MAX_TOKENS
    assert bucket_for(1, 1) == BUCKETS[0]


@torch.library.custom_op("cascade_tests::varlen", mutates_args=())
def sealed(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    ends: Tensor,
    sizes: list[int],
    scale: float,
    window: list[int],
    lengths: Tensor,
    table: Tensor,
) -> Tensor:
    """The kernel as one operation, as it is on a GPU: what it reads on the host is no part of a graph."""
    options: dict[str, Any] = {"window_size": tuple(window), "enable_gqa": query.shape[1] != key.shape[2]}
    return varlen(query, key, value, ends, None, *sizes, scale=scale, seqused_k=lengths, block_table=table, **options)


@sealed.register_fake
def _(query: Tensor, *_: Any) -> Tensor:
    return torch.empty_like(query)


def _sealed(query: Tensor, key: Tensor, value: Tensor, ends: Tensor, _: None, *sizes: int, **options: Any) -> Tensor:
    scale = query.shape[2] ** -0.5 if options["scale"] is None else options["scale"]
    rest = list(options["window_size"]), options["seqused_k"], options["block_table"]
    return sealed(query, key, value, ends, sizes, scale, *rest)


def recorded(work: Task) -> Task:
    """As a CUDA graph: the operations of one call, on the tensors of that call, without the Python between them."""

    def once() -> Tensor:
        work()
        return torch.zeros(())

    work()
    return make_fx(once)()  # type: ignore[no-any-return]


RECORDED = [
    *itertools.product(["llama", "mistral", "qwen2-sliding", "phi"], ["varlen"]),
    *itertools.product(["mistral", "gemma2", "gpt_oss", "deepseek_v3"], ["gathered"]),
]


@pytest.mark.parametrize(("name", "attention"), some(RECORDED, ("llama", "varlen"), ("deepseek_v3", "gathered")))
def test_recorded_passes_need_nothing_of_the_host(name: str, attention: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards capture itself: a number read on the host, or a tensor made anew, would be that of the first pass for ever."""
    monkeypatch.setattr("cascade.engine.graphs.BUCKETS", [Bucket(1, 1), Bucket(4, 4)])
    monkeypatch.setattr("cascade.engine.packed_linear._packer", lambda *_: None)  # a CPU's own kernels are not recorded
    monkeypatch.setattr("cascade.engine.model.choose_kit", lambda device, dtype: PLAIN)
    captured = Model(build(name), attention=over(attention, _sealed), capture=recorded, cache_tokens=1024)
    plain = models(name, attention)[1]
    params = [SamplingParams(temperature=0, seed=0), SamplingParams(seed=5), SamplingParams(seed=6, top_p=0.9, temperature=0.8)]
    monkeypatch.setattr(captured, "logits", None)  # nothing goes the other way
    for sampling in (params[:1], params[:2], params):
        stores = [(captured.new_cache(), plain.new_cache()) for _ in sampling]
        known = 0
        for n in (4, 3, 1, 1, 2, 4, 1):
            tokens = [[(5 * known + 3 * place + session) % VOCAB for place in range(n)] for session in range(len(sampling))]
            said = [
                model.run(
                    [Row(s[side], known, t, min(n, 2), p, ahead=0) for s, t, p in zip(stores, tokens, sampling, strict=True)]
                )
                for side, model in enumerate((captured, plain))
            ]
            assert said[0] == said[1]
            known += n
        ahead = captured.run([Row(s[0], known, [7], 1, p, ahead=2) for s, p in zip(stores, sampling, strict=True)])
        pairs = [
            model.run([Row(s[side], known, [7], 1, p, runner_ups=2) for s, p in zip(stores, sampling, strict=True)])
            for side, model in enumerate((captured, plain))
        ]
        for found, expected in zip(*pairs, strict=True):
            assert [[up.token for up in ups] for ups in found.runner_ups] == [
                [up.token for up in ups] for ups in expected.runner_ups
            ]
        for session, (_, store) in enumerate(stores):
            token = 7
            for step, own in enumerate((*ahead[session].own, *ahead[session].ahead)):
                assert plain.run([Row(store, known + step, [token], 1, sampling[session])]) == [Scored([own])]
                token = own


def test_models_that_cannot_be_captured_are_served_without(caplog: pytest.LogCaptureFixture) -> None:
    """Guards models that look at numbers on the host in their passes, and devices that are out of memory."""

    def impossible(work: Task) -> Task:
        raise RuntimeError("operation not permitted when stream is capturing\nmore")

    model = Model(build("llama"), attention=Varlen(varlen, CPU, BLOCK), capture=impossible, cache_tokens=1024)
    greedy = SamplingParams(temperature=0, seed=0)
    own = [m.run([Row(m.new_cache(), 0, [1, 2, 3], 1, greedy, ahead=3)]) for m in (model, models("llama")[1])]
    assert own[0] == own[1]
    assert "operation not permitted" in caplog.text
    assert "more" not in caplog.text


def test_full_memory_leaves_passes_as_they_were() -> None:
    """Guards a pass for which there are no blocks: it fails by itself, and the next one is right."""
    model = Model(build("llama"), attention=Varlen(varlen, CPU, BLOCK), capture=eager, cache_tokens=2 * BLOCK)
    plain, greedy = models("llama")[1], SamplingParams(temperature=0, seed=0)
    caches = [model.new_cache() for _ in range(5)]
    with pytest.raises(ModelError, match="blocks of keys and values are wanted"):
        model.run([Row(store, 0, [1, 2], 1, greedy) for store in caches])
    for full in caches:
        full.free()
    assert model.run([Row(caches[3], 0, [4, 5], 1, greedy)]) == plain.run([Row(plain.new_cache(), 0, [4, 5], 1, greedy)])


@settings(deadline=None, derandomize=True, max_examples=60)
@given(params=st.lists(PARAMS, min_size=1, max_size=6), seed=st.integers(0, 99))
def test_choices_in_tensors_are_the_same(params: Sequence[SamplingParams], seed: int) -> None:
    """Guards the second way to choose tokens against the first, ties and limits included."""
    logits = torch.randn(len(params), VOCAB, generator=torch.Generator().manual_seed(seed)).round(decimals=1) * 2
    expected = own_tokens(logits, [(one, 10 + place, 1) for place, one in enumerate(params)])
    choices = [Choice.of(one, VOCAB) for one in params]
    say = partial(
        own_tokens_of,
        logits,
        torch.arange(10, 10 + len(params)),
        torch.tensor([choice.seed for choice in choices]),
        torch.tensor([choice.top_k for choice in choices]),
        torch.tensor([one.temperature for one in params]),
        torch.tensor([choice.top_p for choice in choices]),
        torch.tensor([choice.least for choice in choices]),
    )
    kind = max(map(demand, params))
    rows = [(one, 10 + place, 1) for place, one in enumerate(params)]
    ways = [own_tokens_and_next(logits, rows, RUNNER_UPS), say(filtered=True, number=RUNNER_UPS)]
    assert runner_ups(ways[0].tolist(), RUNNER_UPS) == runner_ups(ways[1].tolist(), RUNNER_UPS)
    assert torch.equal(ways[1][0], expected)
    assert torch.equal(say(filtered=True), expected[None])
    assert kind == FILTERED or torch.equal(say(filtered=False), expected[None])
    assert kind != GREEDY or torch.equal(logits.argmax(-1), expected)
    assert demand(SamplingParams(temperature=0, top_k=3)) == GREEDY
    assert demand(SamplingParams(temperature=1)) == NOISY


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_cascades_of_captured_models_keep_the_promise(temperature: float) -> None:
    """Guards the whole: tiers over captured passes, with guesses, rollbacks, reuse and several steps a launch below."""
    requests = [opening(seed, temperature, 24, chain=("1", "0"), window=60) for seed in range(5)]
    expected, plain = [], Model(build("llama", seed=3))
    for request in requests:
        text, store = list(request.tokens), plain.new_cache()
        while len(text) < request.prompt_len + 24:
            known = len(text) - 1 if len(text) > request.prompt_len else 0
            text += plain.run([Row(store, known, text[known:], 1, request.params)])[0].own
        expected.append(text)
    tiers = []
    for level, network in enumerate((build("mistral", seed=1), build("llama", seed=3), build("llama", seed=3))):
        model = Model(network, attention=Varlen(varlen, CPU, BLOCK), capture=eager, cache_tokens=14 * BLOCK)
        tiers.append(Tier(str(level), level, model))
    join(tiers)
    for tier in tiers:
        tier.start()
    inbox, answers = Inbox(), {request.session: Answer(request, Silent()) for request in requests}
    done = dict(answers)
    tiers[-1].post(requests, inbox)
    finish(tiers[-1], inbox, answers)
    assert [[*PROMPT, *done[request.session]._tokens] for request in requests] == expected
    settle(tiers)
    for tier in tiers:
        tier.kv_admission.check()
        tier.close()


@pytest.mark.parametrize("window", [-1, 0, 5, 40])
@pytest.mark.parametrize("longest", [1, 2, 7])
def test_gathered_attention_is_that_of_the_kernel(window: int, longest: int) -> None:
    """Guards the way without the kernel: blocks, windows, heads that share keys; and what others left is not a number."""
    noise = torch.Generator().manual_seed(longest)
    keys, values = (torch.randn(9, 8, 2, 4, generator=noise) for _ in range(2))
    lengths, table = torch.tensor([17, 30, 7], dtype=torch.int32), torch.tensor([[1, 2, 3, 0], [8, 7, 6, 5], [4, 0, 0, 0]])
    for part in (keys, values):
        part[3, 1:], part[5, 6:], part[4, 7:], part[0] = torch.nan, torch.inf, torch.nan, torch.nan
    query = torch.randn(3 * longest, 6, 4, generator=noise)
    ends = torch.arange(0, 3 * longest + 1, longest, dtype=torch.int32)
    options: dict[str, Any] = {"scale": 0.4, "window_size": (window, 0), "enable_gqa": True, "seqused_k": lengths}
    said = [
        kernel(query, keys, values, ends, None, longest, 32, block_table=table.int(), **options)
        for kernel in (gather_attention, varlen)
    ]
    torch.testing.assert_close(*said)
