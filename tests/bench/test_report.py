"""Every answer says what happened between the tiers, and the server when nothing does."""

import asyncio
import http.client
import json
import logging
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any
from urllib.parse import urlsplit

import pytest

from cascade.answer import Completion, Stats, Undrafted
from cascade.client import Client
from cascade.messages import Edge, SessionSpec
from cascade.params import SamplingParams, Speculation
from deployments.gateway.admission.access import ANONYMOUS
from deployments.gateway.admission.metrics import RouterMetrics
from deployments.gateway.admission.places import Places
from tests.doors import House, house, serving
from tests.http.test_http import PROMPT, ask
from tests.waiting import LONG_S, wait_until

served = serving()


@pytest.mark.usefixtures("always_draft")
def test_positions_and_reasons_are_reported(served: House) -> None:
    """Guards the way from the full tier to the client: counts by position, time to first token, the reason; over HTTP, too."""
    with Client(served.grpc) as client:
        everyone = Speculation(tiers=("tiny", "medium"), window=4)
        params = SamplingParams(max_tokens=60, seed=3, ignore_eos=True)
        answers: list[Stats] = []

        def accepted() -> int:  # guesses may come too late on a busy machine
            answers.append(client.generate(PROMPT, params, everyone).stats)
            return sum(edge.accepted for edge in answers[-1].edges if edge.verifier == "full")

        wait_until(accepted)
        drafted = answers[-1]
        alone = client.generate(PROMPT, SamplingParams(max_tokens=8, seed=3), Speculation("off")).stats
    assert all(sum(edge.accepted_by_position) <= edge.accepted for edge in drafted.edges)
    assert all(edge.accepted_by_position[0] <= edge.passes for edge in drafted.edges if edge.accepted)
    assert (drafted.undrafted, alone.undrafted) == (None, "disabled")
    assert (drafted.first_token_s or 0) > 0
    body = {"prompt": PROMPT, "max_tokens": 8, "seed": 3, "speculation": {"mode": "off"}}
    status, _, answer = ask(served, "/v1/completions", body)
    assert status == 200, answer
    said = answer["choices"][0]["cascade"]
    assert said["undrafted"] == "disabled"
    assert said["first_token_s"] > 0
    assert [edge["accepted_by_position"] for edge in said["edges"]] == [[]]
    assert b'ray_cascade_undrafted_answers_total{reason="disabled"}' in ask(served, "/metrics")[2]


def test_inactive_speculation_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    """Guards the log against silence and against a line for every request; requests without drafts by choice say nothing."""
    metrics = RouterMetrics(Places(4, 4), ("tiny", "full"))

    def answered(why: Undrafted | None) -> None:
        answer = Completion("", (), "stop", 1, Stats(1, 1, (Edge("", "full", 1),), undrafted=why))
        metrics.completed(answer, 1.0)

    with caplog.at_level(logging.INFO, "deployments.gateway.admission.metrics"):
        for why in (None, "no_replica", "disabled", "short", "late", "no_replica", None, None):
            answered(why)
    assert [record.levelname for record in caplog.records] == ["WARNING", "INFO"]
    answered("no_replica")
    assert "ray_cascade_speculation_active 0.0" in metrics.text().decode()


@pytest.mark.usefixtures("always_draft")
def test_branches_are_reported() -> None:
    """Guards what a tree was worth, on its way from the tiers to whoever asks: runner-ups, corrections, what was prepared."""
    params, tiers = SamplingParams(max_tokens=20, seed=3, ignore_eos=True), ("tiny", "medium")
    body = {"prompt": PROMPT, "max_tokens": 20, "seed": 3, "ignore_eos": True, "speculation": {"tiers": tiers}}
    with house(pass_s=0.002, pace=(1, 10, 50)) as built, Client(built.grpc) as client:
        tops: list[Edge] = []
        said: list[dict[str, Any]] = []

        def drafted() -> bool:  # guesses may come too late on a busy machine
            edges = client.generate(PROMPT, params, Speculation(tiers=tiers)).stats.edges
            tops[:] = [edge for edge in edges if edge.drafter == "medium" and edge.proposed]
            return bool(tops)

        def told() -> bool:
            edges = ask(built, "/v1/completions", body)[2]["choices"][0]["cascade"]["edges"]
            said[:] = [edge for edge in edges if edge["drafter"] == "medium" and edge["proposed"]]
            return bool(said)

        wait_until(drafted)
        wait_until(told)
        lines = client.generate(PROMPT, replace(params, max_tokens=8), Speculation(tiers=tiers, branches=0)).stats
        text = ask(built, "/metrics")[2].decode()
    [top] = tops
    assert sum(top.proposed_by_rank) == top.proposed
    assert top.runner_ups[0] >= top.runner_ups[1]
    assert top.prefetched <= top.corrected  # how many depends on the machine; tests/simulation has what depends on nothing
    assert top.proposed_by_position[0] >= top.accepted_by_position[0]
    assert all(edge.runner_ups == (0, 0) for edge in lines.edges)
    assert 'ray_cascade_corrections_total{drafter="medium",verifier="full"}' in text
    [edge] = said
    assert sum(edge["proposed_by_rank"]) == edge["proposed"]
    assert edge["prefetched"] <= edge["corrected"]


def test_time_to_the_first_token_begins_with_the_request(served: House, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against figures that leave out what the router does before it admits a request, such as to compile a grammar."""
    admit, slow_s = served.router.model.admit, 0.3

    async def slowly(*asked: Any) -> SessionSpec:
        await asyncio.sleep(slow_s)
        return await admit(*asked)

    monkeypatch.setattr(served.router.model, "admit", slowly)
    with Client(served.grpc) as client:
        seconds = client.generate(PROMPT, SamplingParams(max_tokens=4)).stats.first_token_s
    assert seconds is not None
    assert seconds >= slow_s
    answer = ask(served, "/v1/completions", {"prompt": PROMPT, "max_tokens": 4})[2]
    assert answer["choices"][0]["cascade"]["first_token_s"] >= slow_s


def test_answers_count_as_they_ended() -> None:
    """Guards operators: clients that left, aborted or had a deadline counted as failures of the server."""
    body = {"prompt": PROMPT, "max_tokens": 900, "ignore_eos": True, "stream": True}
    with house(pass_s=0.01) as built:
        status, _, _ = ask(built, "/v1/completions", body, X_Request_Timeout_Seconds="0.2")
        assert status in (200, 504)
        address = urlsplit(built.url)
        for rounds in range(2):  # over HTTP and gRPC
            if rounds:
                with Client(built.grpc) as client:
                    stream = client.stream(PROMPT, SamplingParams(max_tokens=900, ignore_eos=True))
                    next(stream)
                    stream.close()
            else:
                connection = http.client.HTTPConnection(address.netloc, timeout=LONG_S)
                connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
                connection.getresponse().read(10)
                connection.close()
            built.settle()
        with Client(built.grpc, timeout=LONG_S) as client, ThreadPoolExecutor() as pool:
            asked = pool.submit(ask, built, "/v1/completions", body, X_Request_Id="to-end")

            async def abort() -> int:
                return built.router.admission.abort(ANONYMOUS, "to-end")

            wait_until(lambda: built.call(abort()))
            asked.result(LONG_S)
            client.generate(PROMPT, SamplingParams(max_tokens=3, ignore_eos=True))
        built.settle()
        lines = ask(built, "/metrics")[2].decode().splitlines()
    said = {line for line in lines if line.startswith("ray_cascade_answers_total") and not line.endswith(" 0.0")}
    ends = {"deadline_exceeded": 1, "left": 2, "aborted": 1, "length": 1}
    assert said == {f'ray_cascade_answers_total{{outcome="{end}"}} {count}.0' for end, count in ends.items()}
