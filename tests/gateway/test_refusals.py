"""Refusals over HTTP: what is no text, no JSON object, or contradicts itself gets a sentence that helps, and harms nobody."""

import json
from typing import Any
from urllib.request import Request, urlopen

import pytest

from cascade.cli.scrape import Scrape
from cascade.client import Client
from cascade.errors import KINDS, InvalidRequest, Overloaded
from cascade.params import Handling, SamplingParams
from deployments.gateway.admission.status import refusal
from tests.doors import House
from tests.http.test_http import ask
from tests.waiting import LONG_S

HALF = "\\ud800"  # as JSON spells it: no text has it
TEXT = {"prompt": "ab", "max_tokens": 4}
CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 4}


def test_every_error_is_told_as_its_own_class() -> None:
    """Guards against errors that are told as the class they derive from, and Retry-After: whole seconds, enough of them."""
    assert len({refusal(kind("why")).body["error"]["code"] for kind in KINDS}) == len(KINDS)
    assert refusal(Overloaded("full", 1.2)).metadata == (("retry-after", "2"),)


def test_bugs_are_not_told() -> None:
    """Guards against what an exception's text may hold: paths, prompts, code."""
    refused = refusal(RuntimeError("secret in /etc/passwd"))
    assert "secret" not in str(refused.body)
    assert refused.kind.http == 500


def said(answer: Any) -> str:
    return str(answer["error"]["message"])


def test_half_characters_break_nothing(served: House) -> None:
    """Guards links: half a character in cache_salt could not be sent, broke the link between router and tier, and with it
    every request that the two had, nine times over.
    """
    params = SamplingParams(max_tokens=60, temperature=0, ignore_eos=True)
    with Client(served.grpc) as client:
        expected = client.generate("ab", params)
        stream = client.stream("ab", params)
        pieces = [next(stream)]
        for field in ("cache_salt", "user", "stop", "model"):
            body = json.dumps(TEXT | {field: "HALF"}).replace("HALF", HALF).encode()
            status, _, answer = ask(served, "/v1/completions", body)
            assert (status, "half a character" in said(answer)) == (400, True), answer
        pieces += stream
    assert "".join(piece.text for piece in pieces) == expected.text
    served.settle()
    with pytest.raises(InvalidRequest, match=r"cache_salt is .*half a character"):
        Handling(cache_salt="\ud800")


def test_whole_characters_may_be_spelled_in_halves(served: House) -> None:
    """Guards characters beyond the first 65,536, which JSON spells as two halves: they are text."""
    body = b'{"prompt": "\\ud83d\\ude00", "max_tokens": 2, "user": "\\\\ud800"}'
    assert ask(served, "/v1/completions", body)[0] == 200
    assert ask(served, "/tokenize", b'{"prompt": "\\ud83d\\ude00"}')[2] == ask(served, "/tokenize", {"prompt": "😀"})[2]


def test_bodies_without_their_type_are_told_so(served: House) -> None:
    """Guards `curl -d` without a header, which everybody forgets once: the sentence says what is missing."""
    for kind in ("application/x-www-form-urlencoded", "text/plain"):
        status, _, answer = ask(served, "/v1/completions", json.dumps(TEXT).encode(), Content_Type=kind)
        assert (status, "Content-Type: application/json" in said(answer)) == (400, True), answer
    status, _, answer = ask(served, "/v1/completions", b"")
    assert (status, said(answer), answer["error"]["param"]) == (400, "The body is missing: add it", None)
    status, _, answer = ask(served, "/v1/completions", b"[]")
    assert (status, "no JSON object" in said(answer)) == (400, True), answer


BAD: list[tuple[str, dict[str, Any], str, str]] = [  # path, body, param, words
    ("completions", {"stop": ["x"] * 17}, "stop", "stop: list should have at most 16 items"),
    ("completions", {"stop": 5}, "stop", "stop is 5: input should be a valid string"),
    ("completions", {"prompt": [5, -1]}, "prompt.1", "prompt.1 is -1: input should be greater than"),
    ("completions", {"structured": {"json_schema": {}, "regex": "a"}}, "structured", "structured is 'json_schema and regex'"),
    (
        "chat/completions",
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
        "messages.0.content.0.type",
        "messages.0.content.0.type is 'image_url': input should be 'text'",
    ),
    (
        "chat/completions",
        {"response_format": {"type": "json_object", "json_schema": {"name": "a", "schema": {"type": "object"}}}},
        "response_format",
        "json_schema is needed with the type 'json_schema', and with no other",
    ),
]


def test_sentences_name_the_place(served: House) -> None:
    """Guards values of several kinds, blamed as 'input should be a valid string' whatever was meant, and a schema ignored."""
    for path, body, param, words in BAD:
        status, _, answer = ask(served, f"/v1/{path}", (CHAT if "chat" in path else TEXT) | body)
        assert (status, answer["error"]["param"] or "", words in said(answer)) == (400, param, True), answer


def test_refusals_of_both_protocols_are_counted(served: House) -> None:
    """Guards what monitors see: refusals over gRPC were in no counter."""

    def refused() -> float:
        return Scrape.parse(ask(served, "/metrics")[2].decode()).total("refused_total")

    before = refused()
    ask(served, "/v1/completions", {"prompt": ""})
    with Client(served.grpc) as client, pytest.raises(InvalidRequest):
        client.generate("")
    assert refused() == before + 2


def test_headers_are_named(served: House) -> None:
    """Guards deadlines that are none: the sentence blamed the body."""
    status, _, answer = ask(served, "/v1/completions", TEXT, X_Request_Timeout_Seconds="soon")
    assert (status, said(answer).startswith("X-Request-Timeout-Seconds is 'soon': ")) == (400, True), answer


def test_load_balancers_may_ask_for_heads(served: House) -> None:
    """Guards probes by HEAD, which were refused as if the server were ill."""
    for path in ("/", "/health"):
        with urlopen(Request(served.url + path, method="HEAD"), timeout=LONG_S) as answer:
            assert (answer.status, answer.read()) == (200, b"")
