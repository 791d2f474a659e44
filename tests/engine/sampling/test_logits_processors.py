"""Penalties, bias, `min_tokens`, ends and log-probabilities: at every position, under guesses, on every tier."""

import itertools
import math
import random
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from transformers import MinNewTokensLengthLogitsProcessor, RepetitionPenaltyLogitsProcessor, SequenceBiasLogitsProcessor

from cascade import InvalidRequest, SamplingParams, Structured
from cascade.engine.sampling.state import SequenceState, shape, state_maker
from cascade.messages import Edge, Open, SessionSpec, mint
from cascade.scorer import BLOCK, Row, Scored
from cascade.tier.tier import Tier
from tests.cases import examples
from tests.drafters.test_drafters import INSIDE, Nonsense, drafters
from tests.tier.test_tier import answered, running
from tests.toys import ToyModel, full_text
from tests.waiting import wait_until

VOCAB = 12
PROMPT = (1, 2, 3, 2)
NAMES = ("babbler", "weak", "good", "twin", "full")  # bottom to top

shaped_params = st.builds(
    SamplingParams,
    max_tokens=st.integers(8, 24),
    temperature=st.sampled_from([0.0, 0.7, 1.5]),
    top_k=st.sampled_from([0, 3]),
    top_p=st.sampled_from([1.0, 0.8]),
    min_p=st.sampled_from([0.0, 0.1]),
    seed=st.integers(0, 2**63 - 1),
    stop_token_ids=st.lists(st.integers(0, VOCAB - 1), max_size=2).map(tuple),
    presence_penalty=st.sampled_from([0.0, 0.0, 1.5, -1.0]),
    frequency_penalty=st.sampled_from([0.0, 0.0, 1.0, -0.3]),
    repetition_penalty=st.sampled_from([1.0, 1.0, 1.4, 0.7]),
    logit_bias=st.dictionaries(st.integers(0, VOCAB - 1), st.floats(-5, 5) | st.integers(-5, 5), max_size=3),
    min_tokens=st.integers(0, 8),
    logprobs=st.sampled_from([None, 0, 3]),
)


def reference(
    logits: torch.Tensor, params: SamplingParams, prompt: Sequence[int], output: Sequence[int], ends: set[int]
) -> torch.Tensor:
    """Logits ``[V]`` after ``output``, one token after another, in plain Python."""
    scores = [float(x) for x in logits]
    for token, bias in params.biases:
        scores[token] += bias
    for token in {*prompt, *output}:
        scores[token] = (
            scores[token] / params.repetition_penalty if scores[token] > 0 else scores[token] * params.repetition_penalty
        )
    for token, times in Counter(output).items():
        scores[token] -= params.frequency_penalty * times + params.presence_penalty
    if len(output) < params.min_tokens:
        for token in ends:
            scores[token] = -math.inf
    return torch.tensor(scores)


def opening_of(params: SamplingParams, **options: Any) -> Open:
    ends = frozenset({0, *params.stop_token_ids})
    fields = {"window": 4096, "ends": ends, **options}
    return Open(mint(), SessionSpec(fields.pop("tokens", PROMPT), len(PROMPT), params, **fields))


@settings(max_examples=examples(2))
@example(params=SamplingParams(seed=0, logit_bias={3: -100}), seed=0)  # whole numbers failed the pass
@given(params=shaped_params, seed=st.integers(0, 10**6))
def test_every_position_sees_the_guesses_before_it(params: SamplingParams, seed: int) -> None:
    """Guards counts that are kept from pass to pass against guesses, cuts and failed passes: each position is as if alone."""
    rng = random.Random(seed)
    generator = torch.Generator().manual_seed(seed)
    spec = opening_of(params).spec
    text = list(PROMPT)
    state = SequenceState(spec, text) if params.shaped else None
    kept = 0  # positions whose tokens have not changed since they were fed
    for _ in range(6):
        start = rng.randint(0, min(kept, len(text) - 1))
        guesses = [rng.randrange(VOCAB) for _ in range(rng.randint(0, 4))]
        if rng.random() < 0.2:  # a chunk that ends before the text
            shaped, num_known = shape(torch.empty(0, VOCAB), [Row(None, start, text[start:], 0, params, state)])
            assert (len(shaped), num_known) == (0, [0])
            kept = len(text)
        logits = torch.randn(1 + len(guesses), VOCAB, generator=generator) * 3
        row = Row(None, start, text[start:] + guesses, len(logits), params, state)
        untouched = logits.clone()
        for shaped_row, raw, i in zip(shape(logits, [row])[0], logits, itertools.count()):
            expected = reference(raw, params, PROMPT, text[len(PROMPT) :] + guesses[:i], set(spec.ends))
            torch.testing.assert_close(shaped_row, expected, rtol=1e-5, atol=1e-5)
        assert torch.equal(logits, untouched)
        kept = len(text)
        text += guesses[: rng.randint(0, len(guesses))]
        text.append(rng.randrange(VOCAB))
        if rng.random() < 0.5:
            cut = rng.randint(len(PROMPT), len(text) - 1)
            text[cut:] = [rng.randrange(VOCAB) for _ in range(rng.randint(1, 3))]
            kept = min(kept, cut)


def test_companions_keep_their_logits() -> None:
    """Guards rows without such parameters in the same pass: they are not even rounded."""
    logits = torch.randn(4, VOCAB, dtype=torch.bfloat16)
    plain, biased = SamplingParams(temperature=0, seed=1), SamplingParams(logit_bias={3: 1.0}, seed=1)
    state = SequenceState(opening_of(biased).spec, list(PROMPT))
    rows = [Row(None, 0, PROMPT, 2, plain), Row(None, 0, PROMPT, 1, biased, state), Row(None, 0, PROMPT, 1, plain)]
    shaped, num_known = shape(logits, rows)
    assert num_known == [2, 1, 1]
    assert torch.equal(shaped[[0, 1, 3]], logits[[0, 1, 3]].float())
    assert shaped[2, 3] == logits[2, 3].float() + 1
    assert shape(logits, [rows[0], rows[0]])[0] is logits


class Babbler(ToyModel):
    def collect(self, launched: Sequence[Row]) -> list[Scored]:
        return [Scored([random.randrange(self.vocab_size) for _ in range(row.num_scored)]) for row in launched]


@pytest.fixture(scope="module")
def tiers() -> Iterator[list[Tier]]:
    """Toys: the lowest babbles, two err and one says what the full one says; in each are drafters, one of them a fool."""
    models = [Babbler(VOCAB), ToyModel(VOCAB, agreement=0.6), ToyModel(VOCAB, agreement=0.8), ToyModel(VOCAB), ToyModel(VOCAB)]
    inside = [[*drafters(*INSIDE), Nonsense()] for _ in models]
    tiers = [
        Tier(name, level, models[level], new_state=state_maker(), drafters=inside[level], cache_tokens=4 * BLOCK)
        for level, name in enumerate(NAMES)
    ]
    yield from running(tiers)


REQUESTS = st.builds(
    opening_of,
    shaped_params,
    chain=st.sets(st.sampled_from(NAMES[:-1])).map(lambda names: tuple(sorted(names, key=NAMES.index, reverse=True))),
    drafters=st.sets(st.sampled_from([*INSIDE, "nonsense"])).map(tuple),
    draft_window=st.integers(1, 9),
    draft_branches=st.sampled_from([0, 4]),
)


@given(requests=st.lists(REQUESTS, min_size=1, max_size=5))
def test_text_is_the_full_models(tiers: list[Tier], requests: list[Open]) -> None:
    """Guards the promise for every parameter: any tiers, drafters, windows and companions give the full model's text."""
    requests = [replace(request, session=mint()) for request in requests]  # when Hypothesis tries it again
    for request, answer in zip(requests, answered(tiers[-1], *requests)[0], strict=True):
        params = request.spec.params
        assert [*PROMPT, *answer.tokens] == full_text(ToyModel(VOCAB), request.spec)
        assert len(answer.tokens) >= min(params.min_tokens, params.max_tokens)
        assert len(answer.logprobs) == (0 if params.logprobs is None else len(answer.tokens))
        own = [edge for edge in answer.edges if edge.verifier == "full"]
        assert sum(edge.emitted for edge in own) == len(answer.tokens)
        assert sum(edge.passes for edge in own) <= len(answer.tokens)
        assert all(edge.accepted <= edge.proposed for edge in own)


@pytest.mark.usefixtures("always_draft")
def test_penalised_drafts_are_accepted(tiers: list[Tier]) -> None:
    """Guards the lower tiers' own shaping: without it the text is right and no guess is."""
    params = SamplingParams(
        max_tokens=60, temperature=0.8, seed=3, presence_penalty=1.0, frequency_penalty=0.5, repetition_penalty=1.3,
        logit_bias={5: 2.0}, min_tokens=60, logprobs=1,
    )  # fmt: skip

    def edges() -> list[Edge]:
        [answer], _ = answered(tiers[-1], opening_of(params, chain=("twin",), draft_window=6))
        return [edge for edge in answer.edges if edge.verifier == "full"]

    all_accepted(edges, 30)


def all_accepted(ask: Callable[[], Iterable[Edge]], num_guess: int) -> None:
    """More than so many guesses are made, in some answers, for a tier as fast as its verifier comes too late at times."""
    edges: list[Edge] = []
    wait_until(lambda: edges.extend(ask()) or sum(edge.proposed for edge in edges) > num_guess)
    assert all(edge.accepted == edge.proposed for edge in edges)


PROCESSORS = {
    "bias": (SamplingParams(logit_bias={7: 4.0, 9: -3.0}), SequenceBiasLogitsProcessor({(7,): 4.0, (9,): -3.0})),
    "likelier": (SamplingParams(repetition_penalty=0.8), RepetitionPenaltyLogitsProcessor(0.8)),
    "less likely": (SamplingParams(repetition_penalty=1.3), RepetitionPenaltyLogitsProcessor(1.3)),
    "min_tokens": (SamplingParams(min_tokens=3), MinNewTokensLengthLogitsProcessor(len(PROMPT), 3, 0)),
}


@pytest.mark.parametrize("name", PROCESSORS)
def test_parameters_mean_what_they_mean_to_transformers(name: str) -> None:
    """Guards the reference of the tests above."""
    params, processor = PROCESSORS[name]
    logits = torch.randn(VOCAB, generator=torch.Generator().manual_seed(1))
    for output in ((), (4, 4), (5, 6, 7, 1)):
        expected = processor(torch.tensor([[*PROMPT, *output]]), logits[None].clone())[0]
        torch.testing.assert_close(reference(logits, params, PROMPT, output, {0}), expected)


# what is refused


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"frequency_penalty": float("nan")}, "frequency_penalty is nan"),
        ({"repetition_penalty": 0}, "repetition_penalty is 0"),
        ({"logit_bias": {1: 101.0}}, "logit_bias of token 1 is 101.0"),
        ({"logit_bias": {-1: 1.0}}, "logit_bias is -1"),
        ({"logit_bias": 3}, "logit_bias is 3"),
        ({"logit_bias": dict.fromkeys(range(2000), 1.0)}, "2000 tokens"),
        ({"logprobs": True}, "logprobs is True"),
        ({"prompt_logprobs": -1}, "prompt_logprobs is -1"),
        ({"ignore_eos": True, "structured": {"regex": "a"}}, "ignore_eos"),  # a text that could not end
        ({"structured": {"regex": "a" * 70_000}}, "70000 characters"),
        ({"structured": {"choice": ("a", "")}}, "not empty"),
        ({"structured": {"choice": "abc"}}, "list of texts"),
        ({"structured": {"choice": ("a",) * 2000}}, "2000 texts"),
        ({"structured": {"json_schema": {"a": object()}}}, "is not JSON"),
    ],
)
def test_bad_values_are_refused(options: dict[str, Any], words: str) -> None:
    """Guards against parameters that are ignored or fail later: one sentence with field, value and rule."""
    with pytest.raises(InvalidRequest, match=words):
        SamplingParams(**options | ({"structured": Structured(**options["structured"])} if "structured" in options else {}))


def test_parameters_are_values() -> None:
    """Guards hashing, on which caches rely: equal parameters are one, however they were written."""
    assert SamplingParams(logit_bias={2: 1.0, 1: 3}) == SamplingParams(logit_bias=((1, 3), (2, 1.0)))
    assert hash(SamplingParams(logit_bias={2: 1.0})) == hash(SamplingParams(logit_bias=((2, 1.0),)))
