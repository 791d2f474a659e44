"""What agents and other servers' clients send beside the question, and what they read of errors."""

import decimal
import gzip
import json
import logging
import re
import uuid
from typing import Any, Literal

import pytest
from pydantic import BaseModel

from cascade.client import Client
from cascade.engine.grammar import Grammars
from cascade.errors import ConfigError, InvalidRequest
from cascade.params import SamplingParams, Structured
from tests.chat.test_turns import SAID
from tests.http.test_http import PROMPT, ask
from tests.in_process import House
from tests.talkers import conversing

ASKED: dict[str, Any] = {"role": "user", "content": "one two"}
WEATHER: dict[str, Any] = {"name": "get_weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}}
LONG = "long " * 5000
CUT = 26  # tokens, within the arguments of a call


served = conversing(access={"allowed_origins": ["https://page.example"]})  # a page elsewhere may ask


def completed(served: House, path: str, body: dict[str, Any], **headers: str) -> tuple[dict[str, str], Any]:
    status, replied, answer = ask(served, path, body, **headers)
    assert status == 200, answer
    return replied, answer


@pytest.mark.parametrize(
    ("path", "field", "body"),
    [
        ("/v1/completions", "prompt", {"prompt": LONG}),
        ("/v1/chat/completions", "messages", {"messages": [{"role": "user", "content": LONG}]}),
        ("/v1/chat/completions", "messages", {"messages": [{"role": "user", "content": LONG}], "max_tokens": 5}),
        ("/v1/responses", "input", {"input": LONG}),
        ("/v1/messages", "messages", {"messages": [{"role": "user", "content": LONG}], "max_tokens": 5}),
    ],
)
def test_too_long_a_prompt_is_known_by_its_error(served: House, path: str, field: str, body: dict[str, Any]) -> None:
    """Guards agents, which shorten a conversation when they read this, and blamed a max_tokens that nobody had given."""
    status, _, answer = ask(served, path, body)
    most = served.router.model.context_len
    sentence = answer["error"]["message"]
    assert status == 400
    assert f"maximum context length is {most} tokens" in sentence
    assert f" tokens > {most - 1} maximum" in sentence
    assert sentence.startswith("prompt is too long: ")
    assert "max_tokens" not in sentence
    if path != "/v1/messages":
        assert (answer["error"]["code"], answer["error"]["param"]) == ("context_length_exceeded", field)


@pytest.mark.parametrize(
    ("path", "field", "body"),
    [
        ("/v1/completions", "max_tokens", {"prompt": "x", "temperature": 0}),
        ("/v1/chat/completions", "max_tokens", {"messages": [ASKED], "temperature": 0}),
        ("/v1/chat/completions", "max_completion_tokens", {"messages": [ASKED], "temperature": 0}),
        ("/v1/responses", "max_output_tokens", {"input": "one two"}),
        ("/v1/messages", "max_tokens", {"messages": [ASKED]}),
    ],
)
def test_limits_beyond_the_context_are_cut(served: House, path: str, field: str, body: dict[str, Any]) -> None:
    """Guards agents that ask for 32,000 tokens of any model: they were refused. The header says what became of it."""
    stop = {"logit_bias": {str(min(served.router.model.tokenizer.end_ids)): 100}} if path == "/v1/completions" else {}
    headers, _ = completed(served, path, {**body, **stop, field: 1_000_000})
    assert headers["warning"] == f'299 - "Cut to what the context leaves: {field}"'
    assert "warning" not in completed(served, path, {**body, **stop, field: 5})[0]
    with Client(served.grpc) as client, pytest.raises(InvalidRequest, match="max_tokens is 1000000, together"):
        client.generate("x", SamplingParams(max_tokens=1_000_000))


def test_claude_codes_billing_line_is_not_for_the_model(served: House) -> None:
    """Guards the reuse of prefixes: the first block of the system's text has a nonce, so no two prompts began alike."""
    rules = [{"type": "text", "text": "the quick brown fox jumps over the lazy dog and " * 12}]
    body = {"messages": [ASKED], "max_tokens": 4, "context_management": {"edits": []}}
    plain = ask(served, "/v1/messages/count_tokens", {"messages": [ASKED], "system": rules})[2]
    cached = []
    for nonce in ("1f3", "a07"):
        system = [{"type": "text", "text": f"x-anthropic-billing-header: cc_version=2.1.1; cch={nonce};"}, *rules]
        headers, answer = completed(served, "/v1/messages", {**body, "system": system})
        cached.append(answer["usage"]["cache_read_input_tokens"])
        assert headers["warning"] == '299 - "No effect here: context_management, x-anthropic-billing-header"'
        assert ask(served, "/v1/messages/count_tokens", {"messages": [ASKED], "system": system})[2] == plain
    assert cached[1] > plain["input_tokens"] * 0.8


def test_tools_that_are_no_functions_are_left_out(served: House) -> None:
    """Guards Codex and Claude Code, whose own tools made every request 400: the rest is answered, and they are named."""
    foreign = [
        {"type": "custom", "name": "apply_patch", "format": {"type": "grammar", "syntax": "lark", "definition": "start: /x/"}},
        {"type": "web_search", "external_web_access": False},
    ]
    call = {"input": SAID["hermes"], "max_output_tokens": 200, "temperature": 0, "client_metadata": {"x": "y"}}
    headers, answer = completed(served, "/v1/responses", {**call, "tools": [*foreign, {"type": "function", **WEATHER}]})
    assert headers["warning"] == ('299 - "No effect here: client_metadata, tools of type custom, tools of type web_search"')
    assert [item["name"] for item in answer["output"] if item["type"] == "function_call"] == ["get_weather"]
    _, answer = completed(served, "/v1/responses", {**call, "tools": foreign, "tool_choice": "auto"})
    assert [item["type"] for item in answer["output"]] == ["message"]
    search = {"type": "web_search_20250305", "name": "web_search", "max_uses": 8}
    headers, _ = completed(served, "/v1/messages", {"messages": [ASKED], "max_tokens": 9, "tools": [search]})
    assert headers["warning"] == '299 - "No effect here: tools of type web_search_20250305"'


def test_a_call_that_was_cut_goes_back(served: House) -> None:
    """Guards the next turn after a call that `max_tokens` or `stop` cut: the server refused what it had written."""
    says = {"role": "user", "content": SAID["hermes"]}
    for cut in ({"max_tokens": CUT}, {"max_tokens": 90, "stop": "Rome"}):
        request = {"messages": [says], "tools": [{"type": "function", "function": WEATHER}], "temperature": 0, **cut}
        turn = completed(served, "/v1/chat/completions", request)[1]["choices"][0]["message"]
        [call] = turn["tool_calls"]
        with pytest.raises(ValueError, match=r"Expecting|Unterminated|Invalid"):
            json.loads(call["function"]["arguments"])
        result = {"role": "tool", "tool_call_id": call["id"], "content": "no JSON"}
        completed(served, "/v1/chat/completions", {**request, "messages": [says, turn, result, ASKED]})
    tools = [{"type": "function", **WEATHER}]
    request = {"input": SAID["hermes"], "tools": tools, "temperature": 0, "max_output_tokens": CUT}
    output = completed(served, "/v1/responses", request)[1]["output"]
    assert output[-1]["status"] == "incomplete"
    turns = [{"role": "user", "content": SAID["hermes"]}, *output, {"role": "user", "content": "x"}]
    completed(served, "/v1/responses", {**request, "input": turns})
    request = {"tools": [{"name": "get_weather", "input_schema": WEATHER["parameters"]}], "temperature": 0, "max_tokens": CUT}
    content = completed(served, "/v1/messages", {**request, "messages": [says]})[1]["content"]
    assert content[-1]["type"] == "tool_use"
    completed(served, "/v1/messages", {**request, "messages": [says, {"role": "assistant", "content": content}, ASKED]})
    completed(served, "/v1/messages", {**request, "messages": [says, {"role": "assistant", "content": []}, ASKED]})


def test_empty_lists_are_none(served: House) -> None:
    """Guards clients that write out every field: `tool_calls: []` of a message, `tools: []` of a request."""
    turn = {"role": "assistant", "content": "x", "tool_calls": []}
    dumped = turn | dict.fromkeys(("refusal", "annotations", "audio", "function_call"))  # as OpenAI's client has it
    plain = [ASKED, {"role": "assistant", "content": "x"}, ASKED]
    ids = ask(served, "/tokenize", {"messages": plain})[2]["tokens"]
    assert ask(served, "/tokenize", {"messages": [ASKED, dumped, ASKED], "tools": []})[2]["tokens"] == ids
    body = {"messages": [ASKED, dumped, ASKED], "tools": [], "max_tokens": 4}
    assert completed(served, "/v1/chat/completions", body)[1]["usage"]["prompt_tokens"] == len(ids)
    with Client(served.grpc) as client:
        assert client.chat([ASKED, turn], SamplingParams(max_tokens=1), tools=[]).calls == ()


def test_seeds_survive_javascript(served: House) -> None:
    """Guards *Compare* and resuming: JavaScript rounds numbers above 2^53, so drawn seeds are below; given ones come back."""
    for seed in (None, -1):
        for _ in range(8):
            answer = completed(served, "/v1/completions", {"prompt": "x", "max_tokens": 1, "seed": seed})[1]
            assert 0 <= answer["choices"][0]["cascade"]["seed"] < 2**53
    given = 2**63 - 1
    body = {"prompt": "x", "max_tokens": 9, "seed": given, "ignore_eos": True, "history": True}
    whole = completed(served, "/v1/completions", body)[1]["choices"][0]
    assert whole["cascade"]["seed"] == given
    part = {"resume": {"token_ids": [whole["cascade"]["token_ids"][:4]]}, "stream": True}
    raw = ask(served, "/v1/completions", body | part)[2].decode()
    pieces = [json.loads(line.removeprefix("data: ")) for line in raw.splitlines() if line.startswith("data: {")]
    assert {piece["choices"][0].get("cascade", {}).get("seed", given) for piece in pieces} == {given}
    assert whole["text"].endswith("".join(piece["choices"][0]["text"] for piece in pieces))
    with Client(served.grpc) as client:
        assert client.generate("x", SamplingParams(max_tokens=1, seed=given)).seed == given
        assert 0 <= client.generate("x", SamplingParams(max_tokens=1, seed=-1)).seed < 2**53
    status, _, answer = ask(served, "/v1/completions", body | part | {"seed": -1})
    assert (status, answer["error"]["param"]) == (400, "seed")


def test_a_prompt_is_scored_without_an_answer(served: House) -> None:
    """Guards `echo` with `max_tokens: 0` and `logprobs`, by which harnesses score texts: it was refused."""
    request = {"prompt": [PROMPT, "import os"], "echo": True, "logprobs": 2, "temperature": 0}
    single = completed(served, "/v1/completions", {**request, "max_tokens": 1})[1]
    none = completed(served, "/v1/completions", {**request, "max_tokens": 0})[1]
    for with_token, without in zip(single["choices"], none["choices"], strict=True):
        assert without["finish_reason"] == "length"
        assert with_token["text"].startswith(without["text"])
        for name, values in without["logprobs"].items():
            assert values == with_token["logprobs"][name][:-1]
    assert [choice["text"] for choice in none["choices"]] == request["prompt"]
    assert none["usage"]["completion_tokens"] == 0
    raw = ask(served, "/v1/completions", {**request, "max_tokens": 0, "stream": True})[2].decode()
    pieces = [json.loads(line.removeprefix("data: ")) for line in raw.splitlines() if line.startswith("data: {")]
    texts = ["".join(piece["choices"][0]["text"] for piece in pieces if piece["choices"][0]["index"] == i) for i in range(2)]
    assert texts == request["prompt"]
    status, _, answer = ask(served, "/v1/completions", {"prompt": "x", "max_tokens": 0})
    assert (status, answer["error"]["param"]) == (400, "max_tokens")


def test_bodies_may_be_zipped(served: House) -> None:
    """Guards clients and proxies that send gzip, within the limit of bodies; other codings are told by the header's name."""
    body = json.dumps({"prompt": "x", "max_tokens": 1}).encode()
    zipped = gzip.compress(body[:9]) + gzip.compress(body[9:])
    assert ask(served, "/v1/completions", zipped, Content_Encoding="gzip")[0] == 200
    assert ask(served, "/v1/completions", body, Content_Encoding="identity")[0] == 200
    bomb = gzip.compress(bytes(served.router.admission.limits.max_body_bytes + 1))
    for sent, coding, code, words in (
        (zipped[:-9], "gzip", 400, "not a complete gzip file"),
        (body, "gzip", 400, "not a complete gzip file"),
        (bomb, "gzip", 413, "once it is unpacked"),
        (body, "br", 415, "Content-Encoding is 'br'"),
    ):
        status, _, answer = ask(served, "/v1/completions", sent, Content_Encoding=coding)
        assert (status, words in answer["error"]["message"]) == (code, True), answer


def test_browsers_may_ask_from_allowed_origins(served: House) -> None:
    """Guards pages of other origins: a browser asks first, without a key, and reads no answer without these headers."""
    asks = {"Origin": "https://page.example", "Access_Control_Request_Headers": "authorization"}
    status, headers, _ = ask(served, "/v1/completions", method="OPTIONS", **asks, Access_Control_Request_Method="POST")
    assert (status, headers["access-control-allow-origin"]) == (200, "https://page.example")
    for body, code in (({"prompt": "x", "max_tokens": 1}, 200), ({"prompt": ""}, 400)):
        status, headers, _ = ask(served, "/v1/completions", body, Origin="https://page.example")
        assert (status, headers["access-control-allow-origin"]) == (code, "https://page.example")
        assert "access-control-allow-origin" not in ask(served, "/v1/completions", body, Origin="https://evil.example")[1]


def test_refusals_are_in_the_log(served: House, caplog: pytest.LogCaptureFixture) -> None:
    """Guards operators, who saw a counter rise and not whose requests were refused, nor why: one line a second at most."""
    served.router.admission._log_after = 0.0
    with caplog.at_level(logging.INFO, "deployments.gateway.admission.admission"):
        for _ in range(3):
            ask(served, "/v1/completions", {"prompt": "x", "temperature": -1}, X_Request_Id="mine-7")
    [record, *more] = [record for record in caplog.records if "Refused" in record.message]
    assert all(later.created - record.created >= 0.9 for later in more)
    for field in ("code=invalid_request", "param=temperature", "key=anonymous", "request_id=mine-7"):
        assert field in record.message


class Order(BaseModel):
    """As people write schemas down: `UUID`, `set` and `Decimal` have formats, keywords and patterns of their own."""

    id: uuid.UUID
    tags: set[Literal["a", "b"]]
    price: decimal.Decimal


DECIMAL = r"^(?!^[-+.]*$)[+-]?0*\d*\.?\d*$"  # as Pydantic has it from 2.12 on, where it validates


@pytest.mark.parametrize("mode", ["validation", "serialization"])
def test_schemas_of_pydantic_are_taken(served: House, mode: Any) -> None:
    """Guards `model_json_schema()`: a set and a decimal made the request 400. The text has the form all the same."""
    schema = Order.model_json_schema(mode=mode)
    schema["properties"]["price"] = {"type": "string", "pattern": DECIMAL}
    form = {"type": "json_schema", "json_schema": {"name": "order", "schema": schema}}
    tool = {"type": "function", "function": {"name": "order", "strict": True, "parameters": schema}}
    ask_ = {"messages": [ASKED], "max_tokens": 60, "temperature": 1, "seed": 3}
    for more in ({"response_format": form}, {"tools": [tool], "tool_choice": "required"}):
        headers, answer = completed(served, "/v1/chat/completions", {**ask_, **more})
        assert headers["warning"] == '299 - "No effect here: uniqueItems"'
        choice = answer["choices"][0]
        calls = choice["message"].get("tool_calls")
        text = calls[0]["function"]["arguments"] if calls else choice["message"]["content"]
        if choice["finish_reason"] != "length":
            Order.model_validate_json(text)
        else:
            assert text.startswith("{")


def test_decimals_are_held_to_their_pattern(served: House) -> None:
    """Guards the pattern without look-ahead: the same texts."""
    tokenizer, decimal = served.router.model.tokenizer, Structured(json_schema={"type": "string", "pattern": DECIMAL})
    for text, fits in (("1.5", True), ("-.7", True), ("007", True), ("-.", False), ("", False), ("x", False)):
        assert (re.search(DECIMAL, text) is not None) == fits
        assert Grammars(tokenizer).matcher(decimal).allows(tokenizer.encode_part(json.dumps(text))) == fits


def test_a_grpc_client_is_told_of_the_port_of_http(served: House) -> None:
    """Guards the first mistake with two ports: gRPC's own words were those of a server that is not there."""
    with Client(served.url.removeprefix("http://")) as client, pytest.raises(ConfigError, match="an HTTP port"):
        client.generate("x")
