"""The noise is sound and the own token is an exact sample of the model's distribution."""

import itertools
import math
from dataclasses import replace

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from cascade.cpu.noise import ROOM, contenders
from cascade.engine.sampling.own_tokens import (
    Choice,
    adjust,
    find_kernel,
    gumbel,
    mixed,
    noise_bits,
    ordered,
    own_tokens_and_next,
    runner_ups,
)
from cascade.engine.threads import limited
from cascade.params import SamplingParams
from cascade.scorer import RunnerUp
from tests.cases import examples

ALPHA = 1e-4  # of every test of a distribution; seeds are fixed, so a pass stays a pass
SAMPLES = 100_000
KNOWN = [444, 266, 179, 325, 397, 34]  # own tokens of `test_own_tokens_of_a_seed_stay_the_same`
LOGITS = torch.tensor([2.0, 0.3, -1.0, 1.1, 0.0, -4.0])


def p_value(observed: torch.Tensor, expected: torch.Tensor) -> float:
    """Of the chi-square statistic of counts against expected counts."""
    kept = expected > 0
    assert not observed[~kept].any(), "a token of probability 0 was drawn"
    statistic = ((observed[kept] - expected[kept]) ** 2 / expected[kept]).sum()
    freedom = torch.tensor(float(kept.sum() - 1))
    return float(torch.special.gammaincc(freedom / 2, statistic / 2))


def splitmix64(z: int) -> int:
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) % 2**64
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) % 2**64
    return z ^ (z >> 31)


def test_noise_equals_integer_reference() -> None:
    """Guards against signed shifts or products that differ from unsigned arithmetic, and so between devices."""
    golden = 0x9E3779B97F4A7C15
    for seed, position in itertools.product((0, 1, 2**62 + 12345), (0, 1, 77, 2**31 + 5)):
        key = splitmix64(splitmix64((position + golden) % 2**64) ^ splitmix64(seed))
        expected = [splitmix64((key + (token + 1) * golden) % 2**64) >> 11 for token in range(50)]
        assert noise_bits(mixed(seed), torch.tensor([position]), 50)[0].tolist() == expected


@pytest.mark.skipif(torch.cuda.is_available(), reason="there Triton compiles")
def test_a_gpu_where_triton_fails_says_so_once(caplog: pytest.LogCaptureFixture) -> None:
    """Guards tiers in images without a C compiler or without Triton: own tokens come from PyTorch, after one sentence."""
    find_kernel.cache_clear()
    for _ in range(2):
        assert find_kernel(torch.device("cuda", 0)) is None
    [message] = [record.message for record in caplog.records]
    assert message.startswith("Own tokens are chosen by PyTorch on cuda:0, which takes longer, since Triton fails: ")


@pytest.mark.parametrize("axis", ["seed", "position", "token"])
def test_noise_is_uniform_and_independent_along(axis: str) -> None:
    """Guards against a weak key: neighbours in seed, position or token id that move together."""
    if axis == "seed":
        bits = torch.stack([noise_bits(mixed(seed), torch.tensor([3]), 64)[0] for seed in range(4000)])
    elif axis == "position":
        bits = noise_bits(mixed(5), torch.arange(4000), 64)
    else:
        bits = noise_bits(mixed(5), torch.arange(64), 4000).T
    cells = (bits >> 49).flatten()  # 16 equal cells
    even = torch.full((16,), cells.numel() / 16)
    assert p_value(torch.bincount(cells, minlength=16).float(), even) > ALPHA
    pairs = ((bits[:-1] >> 49) * 16 + (bits[1:] >> 49)).flatten()
    assert p_value(torch.bincount(pairs, minlength=256).float(), torch.full((256,), pairs.numel() / 256)) > ALPHA


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(seed=1),
        SamplingParams(seed=2, temperature=0.7),
        SamplingParams(seed=3, temperature=1.5),
        SamplingParams(seed=4, top_k=3),
        SamplingParams(seed=5, top_p=0.8),
        SamplingParams(seed=6, min_p=0.2, temperature=1.5),
    ],
    ids=str,
)
def test_own_tokens_follow_the_distribution(params: SamplingParams) -> None:
    """Guards the law of the output: a bias in noise or filters shows in the counts of 1e5 tokens."""
    [own] = own_tokens_and_next(LOGITS.expand(SAMPLES, -1), [(params, 9, SAMPLES)])
    expected = adjust(LOGITS[None], [params])[0].softmax(-1) * SAMPLES
    assert p_value(torch.bincount(own, minlength=len(LOGITS)).float(), expected) > ALPHA


def test_coupled_acceptance_matches_theory() -> None:
    """Guards the reason for shared noise: two models agree as often as arXiv 2408.07978 says, more than by chance."""
    p_logits, q_logits = LOGITS, LOGITS + torch.tensor([0.0, 1.0, 0.5, -1.0, 0.2, 0.0])
    p, q = p_logits.softmax(-1), q_logits.softmax(-1)
    expected = sum(1 / torch.maximum(p / p[i], q / q[i]).sum() for i in range(len(p)))
    params = SamplingParams(seed=1)
    first, second = (own_tokens_and_next(x.expand(SAMPLES, -1), [(params, 0, SAMPLES)]) for x in (p_logits, q_logits))
    assert (first == second).float().mean().item() == pytest.approx(float(expected), abs=0.005)


def test_filters_keep_what_they_say() -> None:
    """Guards boundary cases of top-k, top-p and min-p: the likeliest token always stays, the crossing token is kept."""
    probabilities = torch.tensor([[0.5, 0.3, 0.15, 0.05]])
    logits = probabilities.log()

    def kept(**options: float) -> list[int]:
        return adjust(logits, [SamplingParams(**options)])[0].isfinite().nonzero().flatten().tolist()

    assert kept(top_k=2) == [0, 1]
    assert kept(top_p=0.01) == [0]
    assert kept(top_p=0.79) == [0, 1]
    assert kept(top_p=0.81) == [0, 1, 2]
    assert kept(min_p=0.25) == [0, 1, 2]
    assert kept(min_p=1.0) == [0]
    assert kept(top_k=10) == [0, 1, 2, 3]


SHAPES = {
    "as drawn": lambda logits: logits,
    "all equal": torch.zeros_like,
    "ties": torch.round,
    "huge": lambda logits: logits * 1e6,
    "beyond all bounds": lambda logits: logits * 1e30,
    "half masked": lambda logits: logits.masked_fill(logits < 0, -torch.inf),
    "one": lambda logits: logits.masked_fill(logits < logits.amax(-1, keepdim=True), -torch.inf),
    "masked altogether": lambda logits: logits.fill_(-torch.inf),
    "not a number": lambda logits: logits.index_fill(-1, torch.tensor([0]), torch.nan),
    "infinite": lambda logits: logits.index_fill(-1, torch.tensor([0]), torch.inf),
}
ANY_PARAMS = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 1e-30, 0.01, 0.1, 0.8, 1.0, 2.0, 10.0]),
    seed=st.integers(0, 2**63 - 1),
    top_k=st.sampled_from([0, 0, 1, 2, 40]),
    top_p=st.sampled_from([1.0, 1.0, 0.9]),
    min_p=st.sampled_from([0.0, 0.0, 0.1]),
)
WARM_PARAMS = st.builds(SamplingParams, temperature=st.sampled_from([0.3, 0.7, 1.7]), seed=st.integers(0, 2**63 - 1))


def of_the_whole_vocabulary(
    logits: torch.Tensor, rows: list[Choice], number: int
) -> tuple[list[int], list[tuple[RunnerUp, ...]]]:
    """Own tokens and runner-ups by their definition, row by row: those of a sort."""
    own, others = [], []
    every = [(params, position + at) for params, position, n in rows for at in range(n)]
    for row, (params, position) in zip(logits.split(1), every, strict=True):
        scores = row.float()
        if params.temperature:
            scores = adjust(row, [replace(params, top_k=0, top_p=1.0, min_p=0.0)])
            gone = ordered(scores, [params]).isneginf() | adjust(row, [replace(params, top_k=0, top_p=1.0)]).isneginf()
            noise = gumbel(noise_bits(mixed(params.seed), torch.tensor([position]), row.shape[-1]))
            scores = scores.masked_fill(gone, -torch.inf) + noise
        values, order = scores[0].sort(descending=True, stable=True)  # of equal ones the first
        own.append(int(order[0]))
        pairs = zip(order[1 : 1 + number].tolist(), (values[0] - values[1 : 1 + number]).tolist(), strict=True)
        others.append(tuple(RunnerUp(token, gap) for token, gap in pairs if gap < math.inf))
    return own, others


def test_own_tokens_of_a_seed_stay_the_same() -> None:
    """Guards texts that clients have: an own token of a seed is the same in every version and on every machine."""
    logits = torch.tensor([[((7919 * token + 31 * row) % 1009) / 250 for token in range(500)] for row in range(6)])
    rows = [(SamplingParams(seed=11), 3, 2), (SamplingParams(seed=2**62, temperature=0.7, top_p=0.9), 700, 2)]
    rows += [(SamplingParams(seed=5, temperature=1.3, top_k=40, min_p=0.1), 2**33, 2)]
    assert own_tokens_and_next(logits, rows).tolist() == [KNOWN]


@settings(max_examples=examples(2))
@given(
    rows=st.lists(st.tuples(ANY_PARAMS, st.integers(0, 2**40), st.integers(1, 3)), min_size=1, max_size=3)
    | st.lists(st.tuples(WARM_PARAMS, st.integers(0, 999), st.integers(1, 3)), min_size=1, max_size=3),
    size=st.sampled_from([1, 2, 7, 65, 4099]),
    shape=st.sampled_from(sorted(SHAPES)),
    spread=st.sampled_from([0.1, 1.0, 5.0]),
    seed=st.integers(0, 999),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    number=st.sampled_from([0, 2, 5]),
)
# as large as vocabularies are; and top_k of the whole vocabulary, which removes nothing, however unlikely
@example([(SamplingParams(temperature=0.8, top_p=0.9, seed=1), 7, 2)], 50_257, "as drawn", 1.0, 0, torch.bfloat16, 2)
@example([(SamplingParams(temperature=1e-30, top_k=40, seed=0), 0, 1)], 2, "as drawn", 1.0, 0, torch.float32, 2)
def test_bounds_change_no_bit(
    rows: list[Choice], size: int, shape: str, spread: float, seed: int, dtype: torch.dtype, number: int
) -> None:
    """Guards own tokens, runner-ups and gaps, ties and filtered tokens: to the bit what a sort of the whole vocabulary says."""
    number = min(number, size - 1)
    drawn = torch.randn(sum(n for *_, n in rows), size, generator=torch.Generator().manual_seed(seed)) * spread
    logits = SHAPES[shape](drawn).to(dtype)
    tokens = own_tokens_and_next(logits, rows, number)
    expected, others = of_the_whole_vocabulary(logits, rows, number)
    assert [tokens[0].tolist()] == own_tokens_and_next(logits, rows).tolist() == [expected]
    for fewer in range(1, number + 1):
        assert runner_ups(tokens.tolist(), fewer) == [ups[:fewer] for ups in others]


def test_threads_change_no_token() -> None:
    """Guards rows of a large vocabulary that threads share: each has numbers, and room for them, of its own."""
    logits = torch.randn(7, 50_257, generator=torch.Generator().manual_seed(1)) * 3
    rows = [(SamplingParams(seed=3), 5, 4), (SamplingParams(seed=4, temperature=0.7, top_p=0.9), 9, 3)]
    with limited(1):
        alone = own_tokens_and_next(logits, rows, 2)
    with limited(2):
        assert torch.equal(own_tokens_and_next(logits, rows, 2), alone)


def test_bounds_hold_for_every_exponent_of_the_noise() -> None:
    """Guards both bounds where the noise is extreme: of a million tokens, with and without the least of them."""
    size = 2**20
    scores = torch.zeros(1, size)
    noise = gumbel(noise_bits(mixed(77), torch.tensor([0]), size))
    tokens, _, _, (count,) = contenders(scores, [(0, mixed(77))], [1.0], 20)
    assert set(noise[0].topk(20).indices.tolist()) <= set(tokens[0, :count].tolist())
    low = torch.where(noise > -2.0, -torch.inf, scores)  # those with the least noise, near u = 1
    tokens, _, _, (count,) = contenders(low, [(0, mixed(77))], [1.0], 1)
    assert count > ROOM or (low + noise).argmax() in tokens[0, :count]
