"""What is refused, over every protocol: the right status, a sentence that names field and value, and harm to nobody."""

import json
from typing import Any, TypeAlias
from urllib.request import Request, urlopen

import grpc
import pytest

from cascade.cli.top import Scrape
from cascade.client import Client
from cascade.client.rpc import stub_of
from cascade.errors import KINDS, InvalidRequest, Overloaded
from cascade.params import Handling, SamplingParams, Structured
from cascade.v1 import serving_pb2 as pb
from deployments.gateway.admission.admission import metadata, refusal
from tests.chat.test_turns import MOST, STOP, TOOLS, WEATHER
from tests.http.test_http import ask
from tests.in_process import House
from tests.talkers import conversing
from tests.waiting import LONG_S

Table: TypeAlias = list[tuple[dict[str, Any], str | None, str]]  # changes of a sound body, `param`, words of the sentence

HALF = "\\ud800"  # as JSON spells it: no text has it
USER: dict[str, Any] = {"role": "user", "content": "x"}
IMAGE = {"type": "image_url", "image_url": {"url": "x"}}
CALL = {"id": "c1", "type": "function", "function": {"name": "get_weather", "arguments": "{}"}}
CALLED: dict[str, Any] = {"role": "assistant", "content": None, "tool_calls": [CALL]}
TEXT: dict[str, Any] = {"prompt": "x", "max_tokens": 4}
CHAT: dict[str, Any] = {"messages": [USER], "max_tokens": 4, "seed": 3}
ANTHROPICS: dict[str, Any] = {"messages": [USER], "max_tokens": 4}
RESUMED: dict[str, Any] = {"seed": 1, "resume": {"token_ids": [[5]]}}
OPENED: dict[str, Any] = {"chat_template_kwargs": {"thinking": True}}

served = conversing(limits={"max_tokens": MOST})


def tool(name: str, **more: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, **more}}


def required(*tools: dict[str, Any]) -> dict[str, Any]:
    return {"tools": [*tools], "tool_choice": "required"}


TEXTS: Table = [  # over both protocols, whose fields have the same names
    ({"prompt": ""}, "prompt", "empty"),
    ({"max_tokens": 0}, "max_tokens", "max_tokens is 0"),
    ({"max_tokens": MOST + 1}, "max_tokens", f"this server writes at most {MOST}"),
    ({"temperature": -1}, "temperature", "temperature is -1"),
    ({"temperature": float("nan")}, "temperature", "temperature is nan"),
    ({"min_p": float("inf")}, "min_p", "min_p is inf"),
    ({"top_p": 0}, "top_p", "top_p is 0"),
    ({"seed": 2**64 - 1}, "seed", "seed is"),
    ({"stop": [""]}, "stop", "stop"),
    ({"min_tokens": 7, "max_tokens": 6}, "min_tokens", "min_tokens is 7"),
    ({"logprobs": 21}, "logprobs", "logprobs is 21"),
    ({"logit_bias": {9999: 1.0}}, "logit_bias", "logit_bias is 9999: it must be token ids from 0 to"),
    ({"logit_bias": {1: 101}}, "logit_bias", "logit_bias"),
    ({"stop_token_ids": [9999]}, "stop_token_ids", "stop_token_ids is 9999"),
    ({"structured": {"regex": "("}}, "structured.regex", "structured.regex cannot be compiled"),
    ({"structured": {}}, "structured", "structured is"),
    ({"speculation": {"tiers": ["huge"]}}, "speculation.tiers", "huge"),
    ({"speculation": {"tiers": ["full"]}}, "speculation.tiers", "'full': it must be one of"),
    ({"speculation": {"mode": "fast"}}, "speculation.mode", "fast"),
    ({"speculation": {"branches": 33}}, "speculation.branches", "branches is 33"),
    ({"priority": 5000}, "priority", "priority is 5000"),
    ({"adapter": "nobody"}, "adapter", "adapter is 'nobody'"),
]
TEXTS_OVER_HTTP: Table = [
    ({"prompt": []}, "prompt", "empty list"),
    ({"prompt": [9999]}, "prompt", "Token id 9999 is out of range"),
    ({"prompt": [5, -1]}, "prompt.1", "prompt.1 is -1: input should be greater than"),
    ({"max_tokens": "5"}, "max_tokens", "max_tokens is '5'"),
    ({"top_k": -2}, "top_k", "top_k is -2"),
    ({"seed": -2}, "seed", "seed is -2"),
    ({"stop": ["x"] * 17}, "stop", "stop: list should have at most 16 items"),
    ({"stop": 5}, "stop", "stop is 5: input should be a valid string"),
    ({"logit_bias": {"x": 1}}, "logit_bias.x", "'x'"),
    ({"skip_special_tokens": False}, "skip_special_tokens", "skip_special_tokens is False"),
    ({"n": 17}, "n", "n is 17"),
    ({"stream_options": {}}, "stream_options", "stream_options"),
    ({"best_off": 2}, "best_off", "best_off is not a known field"),
    ({"truncate_prompt_tokens": 5}, "truncate_prompt_tokens", "truncate_prompt_tokens is not a known field"),
    (RESUMED, "resume", "resume is given without stream: set stream to true"),
    (RESUMED | {"stream": True, "n": 2}, "resume.token_ids", "resume.token_ids has 1 lists: the request has 2 choices"),
    (RESUMED | {"stream": True, "resume": {"token_ids": [5]}}, "resume.token_ids.0", "resume.token_ids.0"),
    (RESUMED | {"stream": True, "resume": {"token_ids": [[-1]]}}, "resume.token_ids.0.0", "resume.token_ids.0.0"),
    ({"structured": {"json_schema": {}, "regex": "a"}}, "structured", "structured is 'json_schema and regex'"),
    ({"structured": {"regex": "a"}, "response_format": {"type": "json_object"}}, "structured", "give one"),
    ({"logit_bias": {"05": 1, "5": -1}}, "logit_bias", "'05'"),
    ({"stream": True, "stream_options": {"include_obfuscation": True}}, "stream_options.include_obfuscation", "is True"),
    ({"structured": {"regex": "a"}, "structured_outputs": {"regex": "a"}}, "structured_outputs", "is not a known field"),
]
CHATS: Table = [  # over both protocols
    ({"messages": [{"role": "user"}]}, "messages.0.content", "messages.0: content is missing"),
    ({"messages": []}, "messages", "messages: list should have at least 1 item"),
    ({"messages": [CALLED | {"role": "user"}]}, "messages.0.tool_calls", "only the assistant calls tools"),
    ({"messages": [USER] * 5000}, "messages", "messages: list should have at most 4096 items"),
    ({"tool_choice": "required"}, "tool_choice", "tool_choice is given without tools"),
    ({"tools": [STOP], "tool_choice": tool("get_weather")}, "tool_choice", "tool_choice names 'get_weather': tools have stop"),
    ({"tools": [STOP, tool("f", parameters={"type": "array"})]}, "tools.1.function.parameters", "must be that of an object"),
    (required(tool("f", parameters={"not": {}}, strict=True)), "tools.0.function.parameters", "parameters cannot be compiled"),
    (required(WEATHER) | {"structured": {"regex": "a"}}, "tools", "response_format or structured cannot both be enforced"),
    ({"messages": [USER, CALLED, {"role": "tool", "content": "x"}]}, "messages.2.tool_call_id", "tool_call_id is needed"),
    (required(*[tool(f"f{i}", parameters={"required": ["x" * 5000]}) for i in range(14)]), "structured", "tools need"),
    (required(*TOOLS) | {"ignore_eos": True}, "ignore_eos", "ignore_eos"),
    ({"continue_final_message": True}, "continue_final_message", "the last message must be the assistant's"),
    ({"chat_template_kwargs": {"mood": "calm"}}, "chat_template_kwargs", "chat_template_kwargs has 'mood'"),
    ({"max_tokens": MOST + 1}, "max_tokens", f"max_tokens is {MOST + 1}: this server writes at most {MOST}"),
    ({"include_reasoning": False, "separate_reasoning": False}, "separate_reasoning", "are both false: leave one out"),
    (OPENED | {"structured": {"grammar": 'start: "a"'}}, "structured", "has no place before structured.grammar"),
    (OPENED | {"structured": {"regex": "("}}, "structured.regex", "structured.regex cannot be compiled"),
]
CHATS_OVER_HTTP: Table = [
    ({"messages": [{"role": "user", "content": None}]}, "messages.0.content", "messages.0: content is missing"),
    ({"tools": [{"type": "browser"}]}, "tools.0.type", "tools.0.type is 'browser'"),
    (required(*TOOLS) | {"response_format": {"type": "json_object"}}, "tools", "leave one out"),
    ({"max_completion_tokens": 3}, "max_tokens", "differ"),
    ({"top_logprobs": 2}, "top_logprobs", "top_logprobs"),
    ({"reasoning_effort": "low", "chat_template_kwargs": {"reasoning_effort": "high"}}, "reasoning_effort", "leave one out"),
    ({"messages": [USER | {"content": [IMAGE]}]}, "messages.0.content.0.type", "is 'image_url': input should be 'text'"),
    ({"response_format": {"type": "text", "json_schema": {"name": "a"}}}, "response_format", "json_schema is needed with"),
]
TURNS: list[tuple[dict[str, Any], str]] = [  # over the Responses API, and those with messages over Anthropic's
    ({"previous_response_id": "resp_1"}, "nothing is kept here between requests"),
    ({"tools": [{"name": "web_search"}]}, "tools.0.type"),
    ({"input": [{"type": "item_reference", "id": "msg_1"}]}, "item_reference"),
    ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}, "input_text"),
    ({"n": 2}, "n is not a known field"),
    ({"stream": True, "stream_options": {"include_usage": True}}, "include_usage is not a known field"),
    ({"text": {"format": {"type": "text", "schema": {}}}}, "schema is needed with the type 'json_schema', and with no other"),
    (ANTHROPICS | {"tool_choice": {"type": "any", "name": "f"}}, "name is needed with the type"),
    (ANTHROPICS | {"thinking": {"type": "disabled"}, **OPENED}, "thinking differs from chat_template_kwargs: leave one out"),
]
OTHERS: list[tuple[str, Any, int, str]] = [  # path, body, status, words
    ("/v1/completions", b"{", 400, "not JSON"),
    ("/v1/completions", b"[" * 100_000, 400, "bod"),
    ("/v1/completions", b"[]", 400, "no JSON object"),
    ("/v1/completions", b"", 400, "The body is missing: add it"),
    ("/v1/completions", b'{"prompt": "x",}', 400, "The body is not JSON: "),
    ("/v1/completions", b'{"prompt": "x", "seed": 1, "seed": 2}', 400, "'seed' is given twice"),
    ("/v1/completions", b'{"prompt": "x", "structured": {"regex": "a", "regex": "b"}}', 400, "'regex' is given twice"),
    ("/v1/completions", b'{"prompt": "x", "seed": ' + b"1" * 5000 + b"}", 400, "a number has too many digits"),
    ("/v1/completions", '{"prompt": "é"}'.encode("latin-1"), 400, "it is not in UTF-8"),
    ("/v1/completions", '{"prompt": "\\ud800"}'.encode("utf-16"), 400, "it is not in UTF-8"),
    ("/v1/completions", b'{"prompt": "\xed\xa0\x80"}', 400, "it is not in UTF-8"),
    ("/v1/completions", {}, 400, "prompt is missing"),
    ("/v1/completions", TEXT | {"model": "gpt-4"}, 404, "gpt-4"),
    ("/detokenize", {"tokens": [9999]}, 400, "Token id 9999"),
    ("/tokenize", {"prompt": "x", "continue_final_message": True}, 400, "without messages"),
    ("/v2/completions", TEXT, 404, "/v2/completions"),
    ("/v1/completions", None, 405, "Method Not Allowed"),
]


def words_of(value: object) -> str:
    """Names of cases are their sentences."""
    return value[:40] if isinstance(value, str) and " " in value else ""


def refused(served: House, path: str, body: Any, words: str, status: int = 400, **headers: str) -> dict[str, Any]:
    """The error of a refusal over HTTP, which has OpenAI's form: never a traceback, one sentence with these ``words``."""
    code, got, answer = ask(served, path, body, **headers)
    assert (code, set(answer)) == (status, {"error"}), answer
    error: dict[str, Any] = answer["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert words in error["message"], error
    assert len(error["message"]) < 400
    assert "Traceback" not in json.dumps(answer)
    assert got["x-request-id"]
    return error


@pytest.mark.parametrize(("path", "body", "status", "words"), OTHERS, ids=words_of)
def test_requests_that_are_none_are_refused(served: House, path: str, body: Any, status: int, words: str) -> None:
    """Guards every refusal before a field is looked at."""
    refused(served, path, body, words, status)


@pytest.mark.parametrize(("changes", "param", "words"), TEXTS + TEXTS_OVER_HTTP, ids=words_of)
def test_wrong_texts_are_refused(served: House, changes: dict[str, Any], param: str | None, words: str) -> None:
    """Guards clients against parameters that are ignored, and those that look at `param`: over both protocols alike."""
    body = TEXT | changes
    assert refused(served, "/v1/completions", body, words)["param"] == param
    if (changes, param, words) in TEXTS:
        outer = {key: body.pop(key) for key in ("prompt", "speculation", "priority") if key in body}
        check_raw(served, pb.GenerateRequest(sampling=body, **outer), words)


@pytest.mark.parametrize(("changes", "param", "words"), CHATS + CHATS_OVER_HTTP, ids=words_of)
def test_wrong_chats_are_refused(served: House, changes: dict[str, Any], param: str | None, words: str) -> None:
    """Guards the sentences of conversations: what is wrong is wrong in both protocols, for the same reason."""
    error = refused(served, "/v1/chat/completions", CHAT | changes, words)
    assert error["param"] == param
    if (changes, param, words) in CHATS:
        options = {"messages": [USER], **changes}
        messages = options.pop("messages")
        sampling = {key: options.pop(key) for key in ("structured", "max_tokens", "ignore_eos") if key in options}
        if "structured" in sampling:
            sampling["structured"] = Structured(**sampling["structured"])
        params = SamplingParams(**{"max_tokens": 4, "seed": 3, **sampling})
        with Client(served.grpc) as client:
            for call in (client.chat, lambda *chat, **options: list(client.stream_chat(*chat, **options))):
                with pytest.raises(InvalidRequest) as caught:
                    call(messages, params, **options)
                assert str(caught.value) == error["message"].replace("The body", "The request")


@pytest.mark.parametrize(("changes", "words"), TURNS, ids=words_of)
def test_wrong_turns_are_refused(served: House, changes: dict[str, Any], words: str) -> None:
    """Guards `/v1/responses` and `/v1/messages`: what is there is honoured or refused, never ignored."""
    if "messages" not in changes:
        refused(served, "/v1/responses", {"input": "x", **changes}, words)
    else:
        status, _, answer = ask(served, "/v1/messages", changes)
        assert (status, words in answer["error"]["message"]) == (400, True), answer


def unknown(message: Any) -> Any:
    """The same message of a newer client, with a field that is not known here."""
    return type(message).FromString(message.SerializeToString() + b"\xf8\x06\x01")


SOUND, SHORT = pb.ChatMessage(role="user", content="x"), pb.Sampling(max_tokens=4)
CUT = pb.Tool(function=pb.Function(name="f", parameters="{"))
RAW: list[tuple[pb.GenerateRequest | pb.ChatRequest, str]] = [  # what only gRPC can say
    (pb.GenerateRequest(), "neither prompt nor token_ids"),
    (pb.GenerateRequest(token_ids=pb.TokenIds(), sampling=SHORT), "empty"),
    (pb.GenerateRequest(token_ids=pb.TokenIds(ids=[4_000_000_000]), sampling=SHORT), "4000000000"),
    (pb.GenerateRequest(token_ids=pb.TokenIds(ids=[1] * 5000), sampling=SHORT), "maximum context length is"),
    (unknown(pb.GenerateRequest(prompt="x")), "unknown fields in the request"),
    (pb.GenerateRequest(token_ids=unknown(pb.TokenIds(ids=[5]))), "unknown fields in token_ids"),
    (pb.GenerateRequest(prompt="x", sampling=unknown(pb.Sampling())), "unknown fields in sampling"),
    (pb.GenerateRequest(prompt="x", speculation=unknown(pb.Speculation())), "unknown fields in speculation"),
    (pb.ChatRequest(), "messages: list should have at least 1 item"),
    (pb.ChatRequest(messages=[unknown(SOUND)]), "unknown fields in messages (numbers 111)"),
    (pb.ChatRequest(messages=[SOUND], tool_choice=pb.ToolChoice()), "tool_choice has neither mode nor function: set one"),
    (pb.ChatRequest(messages=[SOUND], tools=[CUT]), "tools.0.function.parameters: it must be the text of a JSON object"),
    (pb.ChatRequest(messages=[SOUND], chat_template_kwargs="[" * 100_000), "chat_template_kwargs: it must be the text of a"),
]


@pytest.mark.parametrize(("request_", "words"), RAW, ids=words_of)
def test_what_the_protocol_can_say_wrong_is_refused(served: House, request_: Any, words: str) -> None:
    """Guards fields that are JSON in a text, unions with nothing set, and clients that know more than the server."""
    check_raw(served, request_, words)


def check_raw(served: House, request: pb.GenerateRequest | pb.ChatRequest, words: str) -> None:
    """That gRPC refuses ``request``, whole and in pieces, with a sentence that has these ``words``."""
    with grpc.insecure_channel(served.grpc) as channel:
        stub = stub_of(channel)
        chat = isinstance(request, pb.ChatRequest)
        whole, pieces = (stub.CompleteChat, stub.Chat) if chat else (stub.Complete, stub.Generate)
        for call in (whole, lambda request, timeout: list(pieces(request, timeout=timeout))):
            with pytest.raises(grpc.RpcError) as caught:
                call(request, timeout=LONG_S)
            assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
            assert words in caught.value.details()


def test_what_changes_nothing_is_named_over_grpc(served: House) -> None:
    """Guards the law over gRPC, which has no header `Warning`: what is not honoured is named in the trailing metadata."""
    named = pb.ChatMessage(role="user", content="x", name="Ann")
    sets = pb.Structured(json_schema='{"type": "array", "items": {"enum": [1, 2]}, "maxItems": 2, "uniqueItems": true}')
    with grpc.insecure_channel(served.grpc) as channel:
        stub = stub_of(channel)
        for call, request, names in (
            (stub.CompleteChat, pb.ChatRequest(messages=[named], sampling=SHORT), "messages.name"),
            (stub.Complete, pb.GenerateRequest(prompt="x", sampling=pb.Sampling(max_tokens=4, structured=sets)), "uniqueItems"),
            (stub.Complete, pb.GenerateRequest(prompt="x", sampling=SHORT), ""),
        ):
            _, state = call.with_call(request, timeout=LONG_S)
            warning = dict(state.trailing_metadata()).get("warning", "")
            assert warning == (names and f"No effect here: {names}")


def test_headers_are_named(served: House) -> None:
    """Guards `curl -d` without a header, which everybody forgets once, and deadlines that are none: the body was blamed."""
    for kind in ("application/x-www-form-urlencoded", "text/plain"):
        refused(served, "/v1/completions", TEXT, "Content-Type: application/json", Content_Type=kind)
    refused(served, "/v1/completions", TEXT, "X-Request-Timeout-Seconds is 'soon': ", X_Request_Timeout_Seconds="soon")


def test_every_error_is_told_as_its_own_class_and_bugs_are_not() -> None:
    """Guards Retry-After, whole seconds and enough of them, and what an exception's text may hold: paths, prompts, code."""
    assert len({refusal(kind("why")).code for kind in KINDS}) == len(KINDS)
    assert metadata(Overloaded("full", 1.2)) == (("retry-after", "2"),)
    shown = refusal(RuntimeError("secret in /etc/passwd"))
    assert "secret" not in str(shown)
    assert shown.http == 500


def test_half_characters_break_nothing(served: House) -> None:
    """Guards links: half a character in cache_salt broke the link between router and tier, with every request on it."""
    params, messages = SamplingParams(max_tokens=60, temperature=0), [{"role": "user", "content": "one two three four"}]
    with Client(served.grpc) as client:
        expected = client.chat(messages, params)
        stream = client.stream_chat(messages, params)
        pieces = [next(stream)]
        for field in ("cache_salt", "user", "stop", "model"):
            body = json.dumps(TEXT | {field: "HALF"}).replace("HALF", HALF).encode()
            refused(served, "/v1/completions", body, "half a character")
        pieces += stream
    assert "".join(piece.content for piece in pieces) == expected.content
    served.settle()
    with pytest.raises(InvalidRequest, match=r"cache_salt is .*half a character"):
        Handling(cache_salt="\ud800")


def test_whole_characters_may_be_spelled_in_halves(served: House) -> None:
    """Guards characters beyond the first 65,536, which JSON spells as two halves: they are text."""
    body = b'{"prompt": "\\ud83d\\ude00", "max_tokens": 2, "user": "\\\\ud800"}'
    assert ask(served, "/v1/completions", body)[0] == 200
    assert ask(served, "/tokenize", b'{"prompt": "\\ud83d\\ude00"}')[2] == ask(served, "/tokenize", {"prompt": "😀"})[2]


def test_refusals_of_both_protocols_are_counted(served: House) -> None:
    """Guards what monitors see: refusals over gRPC were in no counter."""

    def count() -> float:
        return Scrape.parse(ask(served, "/metrics")[2].decode()).total("refused_total")

    before = count()
    ask(served, "/v1/completions", {"prompt": ""})
    with Client(served.grpc) as client, pytest.raises(InvalidRequest):
        client.generate("")
    assert count() == before + 2


def test_load_balancers_may_ask_for_heads(served: House) -> None:
    """Guards probes by HEAD, which were refused as if the server were ill."""
    for path in ("/", "/health"):
        with urlopen(Request(served.url + path, method="HEAD"), timeout=LONG_S) as answer:
            assert (answer.status, answer.read()) == (200, b"")
