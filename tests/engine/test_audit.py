"""Audits with real models: in float32 on a CPU no answer differs, whatever drafted it, and a changed token always does."""

import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cascade.answer import Answer
from cascade.engine.grammar import Grammars
from cascade.engine.model import Model
from cascade.engine.sampling.state import state_maker
from cascade.engine.tokenizer import Tokenizer
from cascade.messages import Failed, Open, mint
from cascade.params import SamplingParams, Structured
from cascade.tier.tier import Tier
from deployments.ops.auditor import Audit
from tests import small
from tests.architectures import VOCAB, build
from tests.engine.test_adapters import adapted, folder  # noqa: F401  # a fixture
from tests.tier.test_audit import verdict
from tests.tier.test_tier import Inbox, Silent, finish, running, settle

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing.*:FutureWarning"),  # peft's own
]
TEXT = "def mean(values):\n    total = 0\n    for value in values:\n"
KINDS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "filtered": {"temperature": 1.4, "top_k": 20, "top_p": 0.9, "min_p": 0.02},
    "penalties": {"presence_penalty": 0.7, "frequency_penalty": 0.4, "repetition_penalty": 1.3},
    "biased": {"logit_bias": {5: 2.0, 17: -3.0}, "min_tokens": 20},
    "grammar": {"structured": Structured(regex="( [a-z]{1,6}){8,20}"), "max_tokens": 60},
    "json": {"structured": Structured(json_schema={"type": "array", "items": {"type": "integer"}}), "presence_penalty": 0.5},
    "logprobs": {"logprobs": 3, "prompt_logprobs": 2},
    "long": {"max_tokens": 120, "ignore_eos": True},
}


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_pretrained(small.paths()[-1])


@pytest.fixture(scope="module")
def tiers(tokenizer: Tokenizer) -> Iterator[list[Tier]]:
    matcher, paths = Grammars(tokenizer).matcher, small.paths()
    models = [Model.from_pretrained(path, dtype="float32", device="cpu") for path in (paths[0], paths[-1])]
    yield from running(
        [
            Tier(name, i, one, new_state=state_maker(matcher))
            for i, (name, one) in enumerate(zip(("tiny", "full"), models, strict=True))
        ]
    )


def opening(ids: tuple[int, ...], ends: frozenset[int], **chosen: Any) -> Open:
    params = SamplingParams(**{"max_tokens": 40, "seed": 3, "temperature": 0.8} | chosen)
    ends = frozenset() if params.ignore_eos else ends
    return Open(mint(), ids, len(ids), params, ends, chain=("tiny",), window=4096, draft_window=12, draft_branches=4)


def written(tiers: list[Tier], *requests: Open) -> list[list[int]]:
    """Their outputs, all at once."""
    inbox = Inbox()
    answers = {one.session: Answer(one, Silent()) for one in requests}
    kept = list(answers.values())
    tiers[-1].post(requests, inbox)
    finish(tiers[-1], inbox, answers)
    settle(tiers)
    return [answer.tokens for answer in kept]


def judged(tiers: list[Tier], request: Open, output: list[int]) -> Audit:
    audit = Audit(request, (*request.tokens[: request.prompt_len], *output))
    assert verdict(tiers[-1], audit) is None
    settle(tiers)
    return audit


def test_no_answer_differs(tiers: list[Tier], tokenizer: Tokenizer) -> None:
    """Guards the number zero, by which an operator knows a bug: whole answers of all kinds, and those that go on.

    Guards against audits that agree with everything, too: a changed token is found where it is.
    """
    ids = tuple(tokenizer.encode(TEXT))
    requests = [opening(ids, tokenizer.end_ids, **chosen) for chosen in KINDS.values()]
    outputs = written(tiers, *requests)
    begun = [
        replace(request, session=mint(), tokens=(*ids, *output[: len(output) // 2]))
        for request, output in zip(requests, outputs, strict=True)
    ]
    assert written(tiers, *begun) == outputs
    rng = random.Random(0)
    for request, resumed, output in zip(requests, begun, outputs, strict=True):
        for one in (request, resumed):
            said = judged(tiers, one, output)
            assert (said.num_judged, said.divergences) == (len(output) - len(one.tokens) + len(ids), [])
        place = rng.randrange(len(output))
        changed = [*output[:place], (output[place] + 7) % 4096, *output[place + 1 :]]
        first, *_ = judged(tiers, request, changed).divergences
        assert (first.position, first.margin >= 0) == (len(ids) + place, True)


def test_adapters_are_audited(folder: Path) -> None:  # noqa: F811
    """Guards adapters: an answer is judged by the weights that wrote it, and told from one of others."""
    models = [Model(build("llama")), adapted(folder)]
    assert models[1].vocab_size == VOCAB
    house = running([Tier(name, i, one) for i, (name, one) in enumerate(zip(("tiny", "full"), models, strict=True))])
    tiers = next(house)
    request = opening((5, 9, 2, 44, 17), frozenset(), adapter="red")
    [output] = written(tiers, request)
    assert judged(tiers, request, output).divergences == []
    plain = replace(request, params=replace(request.params, adapter=""))
    assert judged(tiers, plain, output).divergences != []
    assert next(house, None) is None


def test_failed_is_no_verdict(tiers: list[Tier]) -> None:
    """Guards the count of audited answers against those that the tier does not take."""
    request = opening((1, 2, 10**6), frozenset())
    assert isinstance(verdict(tiers[-1], Audit(request, (*request.tokens, 5))), Failed)
