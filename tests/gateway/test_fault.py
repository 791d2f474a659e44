"""Requests that are to blame for a failed pass: told so at once, in each protocol's form, and nobody else notices."""

import logging

import pytest

from cascade.client import Client
from cascade.errors import InvalidRequest
from cascade.messages import Failed, Message
from cascade.params import SamplingParams, Speculation, Structured
from cascade.planner.chains import ALONE, Planner
from cascade.session.session import Session
from cascade.tier.drafting import Drafting
from cascade.tier.slot import Slot
from tests.doors import House
from tests.http.test_http import ask
from tests.planner.test_chains import ALLOWED
from tests.tier.test_tier import opening

HARD = "(a{1,9999}){1,9999}" * 40  # its first step is easy, those after it are not
WORDS = "structured takes more work than a token may: ask for something simpler"


def test_grammars_that_take_too_much_work_are_refused_at_once(served: House, caplog: pytest.LogCaptureFixture) -> None:
    """Guards against 503 after eight seconds of sessions that all failed for the same reason, each with a traceback.

    A request that shares the passes goes on, with its drafts, to the same text.
    """
    params = SamplingParams(max_tokens=60, temperature=0, ignore_eos=True)
    drafted = Speculation(tiers=("tiny", "medium"))
    tiers = [node.tier for node in served.net.nodes.values()]
    with Client(served.grpc) as client:
        expected = client.generate("ab", params, drafted)
    caplog.clear()  # a first answer may be over before drafts come, and the log says so
    with Client(served.grpc) as client, caplog.at_level(logging.INFO):
        stream = client.stream("ab", params, drafted)
        pieces = [next(stream)]
        asked = {"prompt": "x", "max_tokens": 50, "structured": {"regex": HARD}, "speculation": {"tiers": ["tiny"]}}
        status, _, answer = ask(served, "/v1/completions", asked)
        assert (status, WORDS in answer["error"]["message"]) == (400, True), answer
        with pytest.raises(InvalidRequest, match=WORDS):
            client.generate("x", SamplingParams(max_tokens=50, structured=Structured(regex=HARD)), drafted)
        pieces += stream
    assert "".join(piece.text for piece in pieces) == expected.text
    assert not [record for record in caplog.records if record.exc_info or record.levelno >= logging.WARNING]
    assert all(tier.stats.failures == 0 and tier.healthy for tier in tiers)
    assert not any(tier._loop._drafting._failures for tier in tiers)
    served.settle()


def test_who_is_too_much_for_a_drafter_goes_on_without_it() -> None:
    """Guards the drafts of others: a tier that cannot serve one session is as well as before. That one asks the next tier."""
    sent: list[Message] = []
    drafting: Drafting[None] = Drafting(lambda tier, message: sent.append(message), Planner())
    sessions = [Session(opening(number, 0.0, 50, chain=ALLOWED), "full", 2, 32) for number in range(2)]
    hard, easy = (Slot(session, None, 0.0, 0.0) for session in sessions)
    for slot in (hard, easy):
        drafting.begin(slot, 2, 0.0)
    failed = Failed(hard.session.drafter_session, "too hard", "medium", fault=True)
    assert drafting.receive(hard, failed, 1.0) == ("medium", "too hard")
    assert (hard.attached, easy.attached) == (ALLOWED[1:], ALLOWED)
    failed = Failed(hard.session.drafter_session, "too hard", "tiny", fault=True)
    assert drafting.receive(hard, failed, 1.0) == ("tiny", "too hard")
    assert (hard.attached, hard.chain, easy.attached) == (ALONE, ALONE, ALLOWED)
    assert drafting.draft(hard, 100.0) is None
    assert drafting.draft(easy, 1.0) is None
    assert [type(message).__name__ for message in sent] == ["Open", "Open", "Close", "Open", "Close"]
