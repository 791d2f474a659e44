"""Audits: what was sent is judged token by token by the tier alone, and makes way for everybody else."""

import math
import random
from collections.abc import Sequence
from dataclasses import replace

import pytest

from benchmarks.toy import ToyModel, full_text
from cascade.draft import Draft
from cascade.messages import YIELDED, Close, Commit, Failed, Open, Proposal, mint
from cascade.params import Structured
from cascade.scorer import UNIT, gap_byte
from cascade.tier.tier import Tier
from deployments.ops.auditor import Audit, Divergence
from tests.tier.test_tier import (  # noqa: F401  # fixtures
    PROMPT,
    CountingModel,
    Inbox,
    models,
    opening,
    settle,
    tiers,
    written,
)
from tests.waiting import LONG_S, wait_until

VOCAB = 32


def verdict(tier: Tier, audit: Audit) -> Failed | None:
    """What went wrong; the rest is in ``audit``."""
    inbox, asked = Inbox(), audit.ask()
    tier.post([asked], inbox)
    while not audit.complete:
        message = inbox.messages.get(timeout=LONG_S)
        if isinstance(message, Failed):
            return message
        assert isinstance(message, Proposal)
        if (commit := audit.hear(message)) is not None:
            tier.post([commit])
    tier.post([Close(asked.session)])
    return None


def expected(request: Open, text: Sequence[int]) -> list[Divergence]:
    """Wherever the toy says another token after the text as it was sent."""
    model, found = ToyModel(), list[Divergence]()
    for place in range(len(request.tokens), len(text)):
        own, next_, *_ = model.ranked(tuple(text[place - model.order : place]), place, request.params, 2)
        if own.token != text[place]:
            gap = gap_byte(next_.gap)
            found.append(Divergence(place, gap * UNIT if gap < 255 else math.inf, next_.token == text[place]))
    return found


@pytest.mark.parametrize("temperature", [0.0, 0.8, 1.5])
def test_texts_of_the_tier_pass(tiers: list[Tier], temperature: float) -> None:  # noqa: F811
    """Guards against false alarms: drafted texts of the full tier, resumed ones too, have no divergence."""
    for seed, length, known in ((1, 200, 0), (2, 1, 0), (3, 30, 7)):
        request = opening(seed, temperature, length)
        whole = full_text(ToyModel(), request)
        request = replace(request, tokens=tuple(whole[: len(PROMPT) + known]))
        written(tiers[-1], replace(request, session=mint()))
        audit = Audit(request, tuple(whole))
        assert verdict(tiers[-1], audit) is None
        assert (audit.num_judged, audit.divergences) == (length - known, [])
    settle(tiers)


def test_corrupted_tokens_are_found(tiers: list[Tier]) -> None:  # noqa: F811
    """Guards against silence, and against one wrong token that makes all others wrong: each is judged after what was sent."""
    rng = random.Random(5)
    for seed in range(6):
        request = opening(seed, 0.9, 100)
        text = full_text(ToyModel(), request)
        for place in rng.sample(range(len(PROMPT), len(text)), 1 + seed):
            text[place] = (text[place] + 1 + rng.randrange(VOCAB - 1)) % VOCAB
        audit, wanted = Audit(request, tuple(text)), expected(request, text)
        assert verdict(tiers[-1], audit) is None
        assert [(one.position, one.margin) for one in audit.divergences] == [(one.position, one.margin) for one in wanted]
        for one, exact in zip(audit.divergences, wanted, strict=True):
            assert one.second == exact.second or one.margin > 1  # one so far after may not have been told
        assert len(wanted) >= 1
    settle(tiers)


def test_audits_use_and_leave_nothing(tiers: list[Tier]) -> None:  # noqa: F811
    """Guards the audit against keys and values of the session that it judges, and memory against texts that nobody needs."""
    tier, request = tiers[-1], opening(4, 0.7, 100)
    [answer], _ = written(tier, request)
    settle(tiers)
    blocks = tier.kv_admission.block_manager
    before = blocks.free, blocks.reused, set(blocks._kept)
    assert verdict(tier, Audit(request, (*PROMPT, *answer.tokens))) is None
    settle(tiers)
    assert (blocks.free, blocks.reused, set(blocks._kept)) == before


def test_audits_make_way(tiers: list[Tier], models: list[CountingModel]) -> None:  # noqa: F811
    """Guards clients against audits: one that runs ends when a request comes, none begins beside one, and it goes on later."""
    tier, request = tiers[-1], opening(6, 0.7, 60)
    models[-1].pass_s = 0.05
    inbox, audit = Inbox(), Audit(request, tuple(full_text(ToyModel(), request)))
    asked = audit.ask()
    tier.post([asked], inbox)
    for _ in range(3):
        said = inbox.messages.get(timeout=LONG_S)
        assert isinstance(said, Proposal)
        assert len(said.draft.trunk) == 1  # nothing ahead of what is judged
        commit = audit.hear(said)
        assert commit is not None
        tier.post([commit])
    tier.post([request], Inbox())
    while not isinstance(failed := inbox.messages.get(timeout=LONG_S), Failed):
        pass
    assert (failed.reason, failed.fault) == (YIELDED, False)
    refused = verdict(tier, audit)
    assert refused is not None
    assert refused.reason == YIELDED
    tier.post([Close(request.session)])
    settle(tiers)
    assert audit.num_judged == 3
    assert verdict(tier, audit) is None
    assert (audit.num_judged, audit.divergences) == (60, [])
    settle(tiers)


def test_audits_stand_beside_each_other(tiers: list[Tier]) -> None:  # noqa: F811
    """Guards audits of several routers against each other: they would make way in turns."""
    request, inbox = opening(7, 0.7, 30), Inbox()
    audits = [Audit(request, tuple(full_text(ToyModel(), request))) for _ in range(2)]
    idle = audits[0].ask()
    tiers[-1].post([idle], inbox)
    wait_until(lambda: tiers[-1].num_sessions)
    assert verdict(tiers[-1], audits[1]) is None
    assert audits[1].divergences == []
    assert not inbox.failures
    tiers[-1].post([Close(idle.session)])
    settle(tiers)


def test_grammars_judge_up_to_the_first_divergence() -> None:
    """Guards against alarms after a token that the grammar may not allow: there it says nothing."""
    plain = opening(1, 0.5, 20)
    shaped = replace(plain, params=replace(plain.params, structured=Structured(regex="a*")))
    for request, last in ((plain, False), (shaped, True)):
        audit = Audit(request, (*PROMPT, 9, 9, 9))
        end = len(PROMPT)
        said = Draft((8, 9, 7), bytes(3), bytes([4, 3, 5]), (-1, -1, -1))
        assert audit.hear(Proposal("s", end, said)) == Commit("s", end, (9,))
        assert audit.divergences == [Divergence(end, 0.25, True)]
        assert audit.complete is last


def test_what_came_before_a_correction_is_not_judged() -> None:
    """Guards against alarms by tokens that follow upon another one than was sent, and tokens that are told twice."""
    end = len(PROMPT)
    audit = Audit(opening(1, 0.5, 20), (*PROMPT, 1, 9, 3, 4))
    assert audit.hear(Proposal("s", end, Draft((1, 2), bytes(2)))) == Commit("s", end, (1, 9))
    assert audit.divergences == [Divergence(end + 1, math.inf, False)]
    assert audit.hear(Proposal("s", end, Draft((1, 2, 5), bytes(3)))) is None
    assert audit.hear(Proposal("s", end + 2, Draft((3,), bytes(1)))) == Commit("s", end + 2, (3,))
    assert audit.hear(Proposal("s", end + 2, Draft((3,), bytes(1)))) is None
    assert audit.hear(Proposal("s", end + 2, Draft((3, 4, 7), bytes(3)))) == Commit("s", end + 3, (4,))
    assert audit.complete
    assert audit.num_judged == 4
    assert len(audit.divergences) == 1
