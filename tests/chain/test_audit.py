"""Audits: what was sent is judged position by position by the tier alone, and makes way for everybody else."""

import math
import random
import time
from collections.abc import Sequence
from dataclasses import replace

import pytest

from cascade.chain.audit import Audit
from cascade.chain.session import MAX_PROMPT_SCORED
from cascade.chain.tier import Tier
from cascade.messages import AUDIT_YIELDS, Close, Divergence, Failed, Open, Proposal, mint
from cascade.params import Structured
from cascade.scorer import RunnerUp, Scored
from cascade.simulation.toy import ToyModel, full_text
from tests.chain.test_tier import (  # noqa: F401  # fixtures
    PROMPT,
    CountingModel,
    Inbox,
    models,
    opening,
    settle,
    text_of,
    tiers,
)

VOCAB = 32


def audit_of(request: Open, text: Sequence[int]) -> Open:
    """Of all that is behind what the request was opened with."""
    return replace(request, session=mint(), tokens=tuple(text), audit=len(request.tokens), chain=())


def verdict(tier: Tier, audit: Open) -> Proposal | Failed:
    inbox = Inbox()
    tier.post([audit], inbox)
    message = inbox.messages.get(timeout=20)
    tier.post([Close(audit.session)])
    assert isinstance(message, Proposal | Failed)
    return message


def expected(request: Open, text: Sequence[int]) -> list[tuple[int, int, int]]:
    """Position, sent and own token wherever the toy says another token behind the text as it was sent."""
    model, first = ToyModel(), len(request.tokens)
    own = [model.own(tuple(text[place - model.order : place]), place, request.params) for place in range(first, len(text))]
    return [(place, text[place], own[place - first]) for place in range(first, len(text)) if text[place] != own[place - first]]


@pytest.mark.parametrize("temperature", [0.0, 0.8, 1.5])
def test_texts_of_the_tier_pass(tiers: list[Tier], temperature: float) -> None:  # noqa: F811
    """Guards against false alarms: drafted texts of the full tier, resumed ones too, have no divergence, in pieces or whole."""
    for seed, length, known in ((1, 3 * MAX_PROMPT_SCORED, 0), (2, 1, 0), (3, 30, 7)):
        request = opening(seed, temperature, length)
        whole = full_text(ToyModel(), request)
        request = replace(request, tokens=tuple(whole[: len(PROMPT) + known]))
        text, _ = text_of(tiers[-1], replace(request, session=mint()))
        assert [*whole[: len(PROMPT)], *text[len(PROMPT) :]] == whole
        said = verdict(tiers[-1], audit_of(request, whole))
        assert isinstance(said, Proposal)
        assert (said.start, said.divergences) == (len(whole), ())
    settle(tiers)


def test_corrupted_tokens_are_found(tiers: list[Tier]) -> None:  # noqa: F811
    """Guards against silence, and against one wrong token that makes all others wrong: each is judged behind what was sent."""
    rng = random.Random(5)
    for seed in range(6):
        request = opening(seed, 0.9, 200)
        text = full_text(ToyModel(), request)
        for place in rng.sample(range(len(PROMPT), len(text)), 1 + seed):
            text[place] = (text[place] + 1 + rng.randrange(VOCAB - 1)) % VOCAB
        said = verdict(tiers[-1], audit_of(request, text))
        assert isinstance(said, Proposal)
        assert [(one.position, one.sent, one.own) for one in said.divergences] == expected(request, text)
        assert len(said.divergences) >= 1
        for one in said.divergences:
            ranked = ToyModel().ranked(tuple(text[one.position - 3 : one.position]), one.position, request.params, 2)
            assert one.margin == pytest.approx(ranked[1].gap)
            assert one.second == (ranked[1].token == one.sent)
    settle(tiers)


def test_audits_use_and_leave_nothing(tiers: list[Tier]) -> None:  # noqa: F811
    """Guards the audit against keys and values of the session that it judges, and memory against texts that nobody needs."""
    tier, request = tiers[-1], opening(4, 0.7, 100)
    text, _ = text_of(tier, request)
    settle(tiers)
    blocks = tier.kv_admission.block_manager
    before = blocks.free, blocks.reused, set(blocks._kept)
    assert isinstance(verdict(tier, audit_of(request, text)), Proposal)
    settle(tiers)
    assert (blocks.free, blocks.reused, set(blocks._kept)) == before


def test_audits_make_way(tiers: list[Tier], models: list[CountingModel]) -> None:  # noqa: F811
    """Guards clients against audits: one that runs ends when a request comes, and none begins beside a request."""
    tier, request = tiers[-1], opening(6, 0.7, 60)
    text = full_text(ToyModel(), request)
    models[-1].pass_s = 0.05
    inbox, audit = Inbox(), audit_of(opening(6, 0.7, 1000), full_text(ToyModel(), opening(6, 0.7, 1000)))
    tier.post([audit], inbox)
    while not tier.num_sessions:
        time.sleep(0.001)
    answers = Inbox()
    tier.post([request], answers)
    failed = inbox.messages.get(timeout=20)
    assert isinstance(failed, Failed)
    assert failed.reason == AUDIT_YIELDS
    assert not failed.fault
    refused = verdict(tier, audit_of(request, text))
    assert isinstance(refused, Failed)
    assert refused.reason == AUDIT_YIELDS
    tier.post([Close(request.session)])
    settle(tiers)
    assert isinstance(verdict(tier, audit_of(request, text)), Proposal)
    settle(tiers)


def test_grammars_judge_up_to_the_first_divergence() -> None:
    """Guards against alarms behind a token that the grammar may not allow: there it says nothing."""
    plain = opening(1, 0.5, 20)
    shaped = replace(plain, params=replace(plain.params, structured=Structured(regex="a*")))
    for request, count in ((plain, 3), (shaped, 1)):
        session = Audit(audit_of(request, [*PROMPT, 9, 9, 9, 9]), "full", 2, VOCAB)
        work = session.work(100)
        assert (work.start, work.tokens, work.num_own) == (0, [*PROMPT, 9, 9, 9], 4)
        session.advance(work, Scored([9, 8, 7, 6], runner_ups=[(), (RunnerUp(9, 0.25),), (RunnerUp(1, 0.5),), ()]))
        assert session.stalled
        said = session.proposal()
        assert said is not None
        every = [
            Divergence(6, 9, 8, 0.25, True),
            Divergence(7, 9, 7, 0.5, False),
            Divergence(8, 9, 6, math.inf, False),
        ]
        assert list(said.divergences) == every[:count]
        assert said.start == (9 if count == 3 else 7)
        assert session.proposal() is None


def test_pieces_cover_the_text() -> None:
    """Guards positions at the seams of passes, and own tokens that a grammar could not tell."""
    request = opening(2, 1.0, 400)
    text = [*PROMPT, *range(300)]
    session, judged = Audit(audit_of(request, text), "full", 2, 1000), list[int]()
    rng = random.Random(3)
    while not session.stalled:
        work = session.work(rng.randint(1, 200))
        assert work.start == session.kv_len
        first = work.start + len(work.tokens) - work.num_own + 1
        known = rng.randint(1, work.num_own) if work.num_own else 0
        judged += range(first, first + known)
        session.advance(work, Scored(text[first : first + known]))
    assert judged == list(range(len(PROMPT), len(text)))
