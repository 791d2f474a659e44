"""Every answer says what happened between the tiers, and the server when nothing does."""

import logging
from collections.abc import Iterator

import pytest
from doors import House, house
from test_http import PROMPT, ask

from cascade.answer import Completion, Stats, Undrafted
from cascade.client import Client
from cascade.messages import Edge
from cascade.params import SamplingParams, Speculation
from deployments.gate import Gate
from deployments.meters import Meters


@pytest.fixture(scope="module")
def served() -> Iterator[House]:
    with house() as built:
        yield built
        built.settle()


def test_grpc_reports_positions_and_reasons(served: House) -> None:
    """Guards the way from the full tier to the client: counts by position, time to first token, the reason."""
    with Client(served.grpc) as client:
        drafted = client.generate(
            PROMPT, SamplingParams(max_tokens=200, seed=3), Speculation(schedule="lockstep", window=4)
        ).stats
        alone = client.generate(PROMPT, SamplingParams(max_tokens=8, seed=3), Speculation("off")).stats
    top = [edge for edge in drafted.edges if edge.verifier == "full"]
    assert sum(edge.accepted for edge in top) > 0
    assert all(sum(edge.accepted_by_position) <= edge.accepted for edge in drafted.edges)
    assert all(edge.accepted_by_position[0] <= edge.passes for edge in drafted.edges if edge.accepted)
    assert (drafted.undrafted, alone.undrafted) == (None, "disabled")
    assert drafted.first_token_s is not None
    assert drafted.first_token_s > 0


def test_http_reports_the_same(served: House) -> None:
    """Guards the extension of the final piece."""
    body = {"prompt": PROMPT, "max_tokens": 8, "seed": 3, "speculation": {"mode": "off"}}
    status, _, answer = ask(served, "/v1/completions", body)
    assert status == 200, answer
    said = answer["choices"][0]["cascade"]
    assert said["undrafted"] == "disabled"
    assert said["first_token_s"] > 0
    assert [edge["accepted_by_position"] for edge in said["edges"]] == [[]]
    assert b'cascade_undrafted_answers_total{reason="disabled"}' in ask(served, "/metrics")[2]


def test_inactive_speculation_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    """Guards the log against silence and against a line for every request; requests without drafts by choice say nothing."""
    meters = Meters(Gate(4, 4), ("tiny", "full"))

    def answered(why: Undrafted | None) -> None:
        meters.completed(Completion("", (), "stop", 1, Stats(1, 1, (Edge("", "full", 1),), undrafted=why)))

    with caplog.at_level(logging.INFO, "deployments.meters"):
        for why in (None, "no_replica", "disabled", "short", "late", "no_replica", None, None):
            answered(why)
    assert [record.levelname for record in caplog.records] == ["WARNING", "INFO"]
    answered("no_replica")
    assert "cascade_speculation_active 0.0" in meters.text().decode()
