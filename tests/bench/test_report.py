"""Every answer says what happened between the tiers, and the server when nothing does."""

import asyncio
import http.client
import json
import logging
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from cascade.answer import Completion, Stats, Undrafted
from cascade.client import Client
from cascade.messages import SessionSpec
from cascade.params import SamplingParams, Speculation
from deployments.gateway.admission.access import ANONYMOUS
from deployments.gateway.admission.metrics import RouterMetrics
from deployments.gateway.admission.places import Places
from tests.http.test_http import PROMPT, ask
from tests.in_process import House, house, serving
from tests.waiting import LONG_S, wait_until

served = serving()


def test_reasons_are_reported(served: House) -> None:
    """Guards the reason why nothing was drafted, and the time to the first token, over both protocols and in the metrics."""
    with Client(served.grpc) as client:
        alone = client.generate(PROMPT, SamplingParams(max_tokens=8, seed=3), Speculation("off")).stats
    body = {"prompt": PROMPT, "max_tokens": 8, "seed": 3, "speculation": {"mode": "off"}}
    report = ask(served, "/v1/completions", body)[2]["choices"][0]["cascade"]
    assert alone.undrafted == report["undrafted"] == "disabled"
    assert (alone.first_token_s or 0) > 0 < report["first_token_s"]
    assert [edge["accepted_by_position"] for edge in report["edges"]] == [[]]
    assert b'ray_cascade_undrafted_answers_total{reason="disabled"}' in ask(served, "/metrics")[2]


def test_inactive_speculation_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    """Guards the log against silence and against a line for every request; requests without drafts by choice say nothing."""
    metrics = RouterMetrics(Places(4, 4), ("tiny", "full"))

    def answered(why: Undrafted | None) -> None:
        metrics.completed(Completion("", (), "stop", 1, Stats(1, 1, undrafted=why)), 1.0)

    with caplog.at_level(logging.INFO, "deployments.gateway.admission.metrics"):
        for why in (None, "no_replica", "disabled", "short", "late", "no_replica", None, None):
            answered(why)
    assert [record.levelname for record in caplog.records] == ["WARNING", "INFO"]
    answered("no_replica")
    assert "ray_cascade_speculation_active 0.0" in metrics.text().decode()


def test_time_to_the_first_token_begins_with_the_request(served: House, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against figures that leave out what the router does before it admits a request, such as to compile a grammar."""
    admit, slow_s = served.router.model.admit, 0.3

    async def slowly(*request: Any) -> SessionSpec:
        await asyncio.sleep(slow_s)
        return await admit(*request)

    monkeypatch.setattr(served.router.model, "admit", slowly)
    with Client(served.grpc) as client:
        assert (client.generate(PROMPT, SamplingParams(max_tokens=4)).stats.first_token_s or 0) >= slow_s
    answer = ask(served, "/v1/completions", {"prompt": PROMPT, "max_tokens": 4})[2]
    assert answer["choices"][0]["cascade"]["first_token_s"] >= slow_s


def test_answers_count_as_they_ended() -> None:
    """Guards operators: clients that left, aborted or had a deadline counted as failures of the server."""
    body = {"prompt": PROMPT, "max_tokens": 900, "ignore_eos": True, "stream": True}
    with house(pass_s=0.01) as built, Client(built.grpc, timeout=LONG_S) as client, ThreadPoolExecutor() as pool:
        assert ask(built, "/v1/completions", body, X_Request_Timeout_Seconds="0.2")[0] in (200, 504)
        connection = http.client.HTTPConnection(built.url.removeprefix("http://"), timeout=LONG_S)
        connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
        connection.getresponse().read(10)
        connection.close()
        stream = client.stream(PROMPT, SamplingParams(max_tokens=900, ignore_eos=True))
        next(stream)
        stream.close()
        built.settle()
        aborted = pool.submit(ask, built, "/v1/completions", body, X_Request_Id="to-end")

        async def abort() -> int:
            return built.router.admission.abort(ANONYMOUS, "to-end")

        wait_until(lambda: built.call(abort()))
        aborted.result(LONG_S)
        client.generate(PROMPT, SamplingParams(max_tokens=3, ignore_eos=True))
        built.settle()
        lines = ask(built, "/metrics")[2].decode().splitlines()
    counts = {line for line in lines if line.startswith("ray_cascade_answers_total") and not line.endswith(" 0.0")}
    ends = {"deadline_exceeded": 1, "left": 2, "aborted": 1, "length": 1}
    assert counts == {f'ray_cascade_answers_total{{outcome="{end}"}} {count}.0' for end, count in ends.items()}
