"""Audits of a whole server: no answer is doubted, a corrupted one is found, and what cannot be audited is counted."""

from collections.abc import Sequence
from dataclasses import replace

import pytest

from cascade.bench.scrape import Scrape, scrape
from cascade.client import Client
from cascade.messages import Message, Proposal
from cascade.params import SamplingParams, Speculation
from tests.client.test_conformance import ADAPTER, CHOSEN, DRAFTED, PLAIN, RULED, Adapted
from tests.doors import House, house, serving
from tests.http.test_http import PROMPT
from tests.waiting import wait_until

GREEDY = SamplingParams(max_tokens=30, temperature=0, seed=1, ignore_eos=True)
ALL = {"share": 1.0, "max_waiting": 1000}


served = serving(model=Adapted, full={"engine_kwargs": {"lora_modules": {ADAPTER: "red/adapter"}}}, audit=ALL)


def audited(served: House) -> Scrape:
    """What the server counts when no audit is left to be made."""
    wait_until(lambda: not served.router._auditor.busy)
    return scrape(served.url)


@pytest.mark.parametrize("name", CHOSEN | DRAFTED)
def test_no_answer_is_doubted(served: House, name: str) -> None:
    """Guards against false alarms, with every parameter, alone and drafted, from the beginning and from the middle on."""
    chosen = PLAIN | CHOSEN.get(name, {})
    drafts = Speculation(**DRAFTED.get(name, {}))
    before = audited(served)
    num_answers = num_tokens = 0
    with Client(served.grpc) as client:
        for mode in (Speculation("off"), drafts):
            answer = client.generate(PROMPT, SamplingParams(**chosen), mode)
            num_answers += 1
            num_tokens += len(answer.token_ids)
    change = audited(served).since(before)
    assert change.total("audited_answers_total") == num_answers
    assert change.total("audited_tokens_total") == num_tokens
    for counter in ("audit_differing_answers_total", "audit_divergences_total", "audits_skipped_total"):
        assert change.total(counter) == 0, counter


def test_texts_that_depend_on_drafts_are_skipped(served: House) -> None:
    """Guards rules of other noise against alarms: their texts are not the full tier's own."""
    before = audited(served)
    with Client(served.grpc) as client:
        client.generate(PROMPT, SamplingParams(**PLAIN), Speculation(**RULED["rule"]))
    change = audited(served).since(before)
    assert (change.total("audited_answers_total"), change.total("audits_skipped_total")) == (0, 1)
    assert change.samples["audits_skipped_total", (("reason", "rule"),)] == 1


def test_a_corrupted_answer_is_found(served: House, caplog: pytest.LogCaptureFixture) -> None:
    """Guards the whole way of an alarm: a token that changes between the full tier and the router is seen where it is.

    What the full tier had written after the right one may be sent as well, and differ."""
    downlink, spoilt = served.router._full.downlink, list[int]()
    deliver = downlink._deliver

    def corrupting(messages: Sequence[Message]) -> object:
        return deliver([corrupted(message) for message in messages])

    def corrupted(message: Message) -> Message:
        if not spoilt and isinstance(message, Proposal) and len(message.draft):
            token, *rest = message.draft.tokens
            spoilt.append((token + 1) % 4096)
            return replace(message, draft=replace(message.draft, tokens=(spoilt[0], *rest)))
        return message

    before = audited(served)
    downlink._deliver = corrupting
    try:
        with Client(served.grpc) as client:
            answer = client.generate(PROMPT, GREEDY, Speculation("off"))
    finally:
        downlink._deliver = deliver
    assert answer.token_ids[0] == spoilt[0]
    change = audited(served).since(before)
    assert change.total("audited_answers_total") == change.total("audit_differing_answers_total") == 1
    assert change.total("audit_divergences_total") == change.total("audit_margin_nats_count") >= 1
    assert "An audit found another token at place 0" in caplog.text


def test_a_busy_server_skips_audits() -> None:
    """Guards clients, and memory, against audits that wait: they run when nothing else does, and not for ever."""
    audit = {"share": 1.0, "max_waiting": 1, "max_wait_s": 1.5}
    with house(audit=audit) as served, Client(served.grpc) as client:
        busy = client.stream(PROMPT, replace(GREEDY, max_tokens=1500), Speculation("off"))
        next(busy)  # its reader takes no more: it is there until it is closed
        for _ in range(4):
            client.generate(PROMPT, replace(GREEDY, max_tokens=2), Speculation("off"))
        counted = audited(served)
        busy.close()
        client.generate(PROMPT, GREEDY, Speculation("off"))
        quiet = audited(served).since(counted)
        served.settle()
    reasons = {labels[0][1]: count for (name, labels), count in counted.samples.items() if name == "audits_skipped_total"}
    assert reasons.keys() <= {"queue", "load"}
    assert reasons["load"] >= 1
    assert (sum(reasons.values()), counted.total("audited_answers_total")) == (4, 0)
    assert (quiet.total("audits_skipped_total"), quiet.total("audited_answers_total")) == (0, 1)
