"""OpenAI's Responses API and Anthropic's Messages API, asked by their own clients: the turns of chat completions."""

import json
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import anthropic
import pytest
from anthropic import Anthropic
from openai import OpenAI

from deployments.gateway.http.messages import MessagesBody
from tests.chat.test_turns import SAID, user
from tests.http.test_http import ask
from tests.in_process import House
from tests.talkers import conversing

SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}}
TOOL: dict[str, Any] = {"type": "function", "name": "get_weather", "parameters": SCHEMA}
CUSTOM: dict[str, Any] = {"name": "get_weather", "input_schema": SCHEMA}
ROME = {"city": "Rome", "days": 3}
THOUGHT = {"type": "thinking", "thinking": "hm", "signature": ""}
SAMPLING: dict[str, Any] = {"temperature": 0.0, "seed": 3, "speculation": {"tiers": ["tiny", "medium"]}}
TURNS = {  # said: what it thinks, says, calls
    "<think>hm, two</think>Here it is.": ("hm, two", "Here it is.", []),
    "I look it up." + SAID["hermes"]: ("", "I look it up.", [ROME]),
    "<think>hm</think>" + SAID["hermes"] + SAID["hermes"]: ("hm", "", [ROME, ROME]),
}


served = conversing()


@pytest.fixture
def responses(served: House) -> Iterator[Any]:
    """OpenAI's client; after it nothing may be left anywhere."""
    with OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0) as client:
        yield client.responses
    served.settle()


@pytest.fixture
def messages(served: House) -> Iterator[Any]:
    """Anthropic's client, likewise."""
    with Anthropic(base_url=served.url, api_key="none", max_retries=0) as client:
        yield client.messages
    served.settle()


def of_response(answer: Any) -> tuple[str, str, list[Any]]:
    """What a response thinks, says and calls."""
    by_kind: dict[str, list[Any]] = {"reasoning": [], "message": [], "function_call": []}
    for item in answer.output:
        by_kind[item.type].append(item)
        assert item.status == "completed"
    thoughts = "".join(item.content[0].text for item in by_kind["reasoning"])
    return thoughts, answer.output_text, [json.loads(item.arguments) for item in by_kind["function_call"]]


def of_message(answer: Any) -> tuple[str, str, list[Any]]:
    blocks = answer.content
    thoughts = "".join(block.thinking for block in blocks if block.type == "thinking")
    words = "".join(block.text for block in blocks if block.type == "text")
    return thoughts, words, [block.input for block in blocks if block.type == "tool_use"]


@pytest.mark.parametrize("prompt", TURNS)
def test_responses_are_turns_of_chats(served: House, responses: Any, prompt: str) -> None:
    """Guards `/v1/responses`: items have what chats have, whole, streamed, and as the client puts the stream together."""
    request = {"model": served.model, "input": prompt, "tools": [TOOL], "max_output_tokens": 200, "extra_body": SAMPLING}
    whole = responses.create(**request)
    assert of_response(whole) == TURNS[prompt]
    assert whole.status == "completed"
    events = list(responses.create(stream=True, **request))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert [event.type for event in events[:2]] == ["response.created", "response.in_progress"]
    last = events[-1]
    assert last.type == "response.completed"
    assert of_response(last.response) == TURNS[prompt]
    assert last.response.usage.output_tokens == whole.usage.output_tokens
    assert whole.usage.total_tokens == whole.usage.input_tokens + whole.usage.output_tokens
    assert bool(whole.usage.output_tokens_details.reasoning_tokens) == bool(TURNS[prompt][0])
    for index, item in enumerate(last.response.output):
        own = [event for event in events if getattr(event, "output_index", None) == index]
        assert (own[0].type, own[-1].type) == ("response.output_item.added", "response.output_item.done")
        assert own[-1].item == item
        pieces = "".join(event.delta for event in own if event.type.endswith(".delta"))
        assert pieces == (item.arguments if item.type == "function_call" else item.content[0].text)
    with responses.stream(**request) as stream:
        assert of_response(stream.get_final_response()) == TURNS[prompt]


@pytest.mark.parametrize("prompt", TURNS)
def test_messages_are_turns_of_chats(served: House, messages: Any, prompt: str) -> None:
    """Guards `/v1/messages` likewise."""
    request = {"model": served.model, "messages": user(prompt), "tools": [CUSTOM], "max_tokens": 200, "extra_body": SAMPLING}
    whole = messages.create(**request)
    assert of_message(whole) == TURNS[prompt]
    assert whole.stop_reason == ("tool_use" if TURNS[prompt][2] else "end_turn")
    events = list(messages.create(stream=True, **request))
    assert (events[0].type, [event.type for event in events[-2:]]) == ("message_start", ["message_delta", "message_stop"])
    kinds = [event.type for event in events[1:-2]]
    assert kinds.count("content_block_start") == kinds.count("content_block_stop") == len(whole.content)
    with messages.stream(**request) as stream:
        final = stream.get_final_message()
    assert of_message(final) == TURNS[prompt]
    assert (final.stop_reason, final.usage.output_tokens) == (whole.stop_reason, whole.usage.output_tokens)
    counted = messages.count_tokens(model=served.model, messages=user(prompt), tools=[CUSTOM])
    usage = whole.usage
    assert counted.input_tokens == events[0].message.usage.input_tokens == usage.input_tokens + usage.cache_read_input_tokens


def test_calls_are_answered(served: House, responses: Any, messages: Any) -> None:
    """Guards agents, whose next request has thoughts, calls and results: the prompt is that of the same chat."""
    prompt = "<think>hm</think>I look it up." + SAID["hermes"]
    first = responses.create(model=served.model, input=prompt, tools=[TOOL], extra_body=SAMPLING)
    [call] = [item for item in first.output if item.type == "function_call"]
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "sun"}
    again = [*user(prompt), *(item.model_dump() for item in first.output), result, *user("so?")]
    second = responses.create(model=served.model, input=again, instructions="Be brief.", tools=[TOOL], extra_body=SAMPLING)
    called = {"id": call.call_id, "type": "function", "function": {"name": "get_weather", "arguments": call.arguments}}
    turn = {"role": "assistant", "content": "I look it up.", "reasoning_content": "hm", "tool_calls": [called]}
    results = [{"role": "tool", "tool_call_id": call.call_id, "content": "sun"}]
    system = [{"role": "system", "content": "Be brief."}]
    tools = [{"type": "function", "function": {"name": "get_weather", "parameters": SCHEMA}}]
    chat = {"messages": [*system, *user(prompt), turn, *results, *user("so?")], "tools": tools, **SAMPLING}
    wanted = ask(served, "/v1/chat/completions", chat)[2]
    assert second.output_text == wanted["choices"][0]["message"]["content"] == "so?"
    assert second.usage.input_tokens == wanted["usage"]["prompt_tokens"]

    request: dict[str, Any] = {"model": served.model, "tools": [CUSTOM], "max_tokens": 200, "extra_body": SAMPLING}
    message = messages.create(messages=user(prompt), **request)
    [block] = [block for block in message.content if block.type == "tool_use"]
    answered = [{"type": "tool_result", "tool_use_id": block.id, "content": "sun"}, {"type": "text", "text": "so?"}]
    back: Any = message.model_dump()["content"]
    turns: Any = [*user(prompt), {"role": "assistant", "content": back}, {"role": "user", "content": answered}]
    reply = messages.create(messages=turns, system=[{"type": "text", "text": "Be brief."}], **request)
    assert of_message(reply) == ("", "so?", [])
    arguments = json.dumps(block.input)
    turn["tool_calls"] = [{**called, "id": block.id, "function": {"name": "get_weather", "arguments": arguments}}]
    results[0]["tool_call_id"] = block.id
    tokens = ask(served, "/tokenize", {key: chat[key] for key in ("messages", "tools")})[2]["count"]
    assert reply.usage.input_tokens + (reply.usage.cache_read_input_tokens or 0) == tokens


def test_choices_and_forms_are_kept(served: House, responses: Any, messages: Any) -> None:
    """Guards tool choices and structured text, which are enforced over all APIs alike."""
    schema = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"], "additionalProperties": False}
    form = {"format": {"type": "json_schema", "name": "x", "schema": schema}}
    response = responses.create(model=served.model, input="x", text=form, extra_body=SAMPLING)
    assert json.loads(response.output_text)["a"] in (1, 2)
    config: Any = {"format": {"type": "json_schema", "schema": schema}}
    request: dict[str, Any] = {"model": served.model, "messages": user("x"), "max_tokens": 60, "extra_body": SAMPLING}
    assert json.loads(of_message(messages.create(output_config=config, **request))[1])["a"] in (1, 2)
    for choice in ("required", {"type": "function", "name": "get_weather"}):
        asked_so = {"input": "x", "tools": [TOOL], "tool_choice": choice, "max_output_tokens": 60}
        [item, *_] = responses.create(model=served.model, extra_body=SAMPLING, **asked_so).output
        assert (item.type, item.name) == ("function_call", "get_weather")
    for chosen in ({"type": "any"}, {"type": "tool", "name": "get_weather"}):
        single = {**chosen, "disable_parallel_tool_use": True}
        assert messages.create(tools=[CUSTOM], tool_choice=single, **request).content[0].type == "tool_use"
    assert not of_message(messages.create(tools=[CUSTOM], tool_choice={"type": "none"}, **request))[2]


def test_calls_that_are_no_json_are_handed_on(served: House, messages: Any) -> None:
    """Guards answers of models that write `{city: Rome}`: they ended in an error of the server's own."""
    prompt = '<tool_call>{"name": "get_weather", "arguments": {city: Rome}}</tool_call>'
    request: dict[str, Any] = {"model": served.model, "messages": user(prompt), "max_tokens": 200, "extra_body": SAMPLING}
    assert of_message(messages.create(tools=[CUSTOM], **request))[2] == [{"INVALID_JSON": "{city: Rome}"}]


def test_numbers_that_json_lacks_come_back(served: House) -> None:
    """Guards what a response repeats of its request."""
    raw = b'{"input": "x", "max_output_tokens": 2, "metadata": {"a": NaN, "b": 1e999}}'
    status, _, answer = ask(served, "/v1/responses", raw)
    assert (status, answer["metadata"]) == (200, {"a": None, "b": None})


def test_ends_are_told(served: House, responses: Any, messages: Any) -> None:
    """Guards why a turn ended: its limit, a stop string, and which."""
    cut = responses.create(model=served.model, input="one two three four", max_output_tokens=2, extra_body=SAMPLING)
    assert (cut.status, cut.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    request: dict[str, Any] = {"model": served.model, "messages": user("one two three four"), "extra_body": SAMPLING}
    assert messages.create(max_tokens=2, **request).stop_reason == "max_tokens"
    stopped = messages.create(max_tokens=50, stop_sequences=["zzz", "three"], **request)
    assert (stopped.stop_reason, stopped.stop_sequence, of_message(stopped)[1]) == ("stop_sequence", "three", "one two ")
    request["messages"] += [{"role": "assistant", "content": "one two"}]
    assert of_message(messages.create(max_tokens=50, **request))[1] == " three four"


def test_thinking_is_switched(served: House, messages: Any) -> None:
    """Guards `thinking`, which sets the variable of the template, and leaves thoughts out where nobody wants them."""
    request: dict[str, Any] = {"model": served.model, "max_tokens": 100, "extra_body": SAMPLING}
    messages_ = user("<think>\nhm</think>So it is.")  # the template may have written the first two
    on = messages.create(messages=messages_, thinking={"type": "enabled", "budget_tokens": 1024}, **request)
    assert of_message(on) == ("hm", "So it is.", [])
    off = messages.create(messages=user("<think>\n</think>\nSo it is."), thinking={"type": "disabled"}, **request)
    assert of_message(off) == ("", "So it is.", [])
    quiet = messages.create(messages=messages_, thinking={"type": "adaptive", "display": "omitted"}, **request)
    assert of_message(quiet) == ("", "So it is.", [])


def test_a_prompt_that_was_here_is_cached(served: House, responses: Any, messages: Any) -> None:
    """Guards counts of cached tokens over all APIs, which only the full tier knows."""
    long = "the quick brown fox jumps over the lazy dog and " * 12
    request = {"prompt": long, "max_tokens": 2, "seed": 3}
    counts = [ask(served, "/v1/completions", request)[2]["usage"]["prompt_tokens_details"]["cached_tokens"] for _ in range(2)]
    assert counts[0] == 0 < counts[1]
    for _ in range(2):
        first = responses.create(model=served.model, input=long, max_output_tokens=2, extra_body=SAMPLING).usage
    assert 0 < first.input_tokens_details.cached_tokens < first.input_tokens
    usage = messages.create(model=served.model, messages=user(long), max_tokens=2, extra_body=SAMPLING).usage
    assert usage.cache_read_input_tokens > 0
    assert usage.cache_read_input_tokens + usage.input_tokens == first.input_tokens


def test_anthropics_errors_have_its_form(served: House, messages: Any) -> None:
    """Guards errors of `/v1/messages`: Anthropic's shape and types, whoever refuses, and in mid-stream."""
    request: dict[str, Any] = {"model": served.model, "messages": user("x"), "max_tokens": 5}
    image = [{"type": "image", "source": {"type": "url", "url": "x"}}]
    for change, kind in (
        ({"model": "nobody"}, anthropic.NotFoundError),
        ({"messages": user("long " * 5000)}, anthropic.BadRequestError),
        ({"messages": [{"role": "user", "content": image}]}, anthropic.BadRequestError),
        ({"messages": [{"role": "user", "content": [THOUGHT]}]}, anthropic.BadRequestError),
        ({"extra_body": {"strange": 1}}, anthropic.BadRequestError),
    ):
        with pytest.raises(kind) as error:
            messages.create(**request | change)
        body: Any = error.value.body
        assert body["type"] == "error"
        assert body["error"]["type"] == ("not_found_error" if kind is anthropic.NotFoundError else "invalid_request_error")
        assert 0 < len(body["error"]["message"]) < 600
    status, _, answer = ask(served, "/v1/messages", method="GET")
    assert (status, answer["type"]) == (405, "error")


def test_what_changes_nothing_is_named(served: House) -> None:
    """Guards the header by which fields without effect are told."""
    effort = {"input": "x", "store": True, "max_tool_calls": 2, "truncation": "auto", "text": {"verbosity": "low"}}
    effort["reasoning"] = {"effort": "low", "summary": "auto"}
    marked = {"system": [{"type": "text", "text": "z", "cache_control": {"type": "ephemeral"}}], "cache_control": {"type": "x"}}
    thinking = {"messages": user("x"), "thinking": {"type": "enabled", "budget_tokens": 1024}}
    called = {"type": "tool_use", "id": "c1", "name": "get_weather", "input": {}}
    failed = {"type": "tool_result", "tool_use_id": "c1", "content": "no", "is_error": True}
    turns = [{"role": "assistant", "content": [called]}, {"role": "user", "content": [failed]}]
    schema = {"name": "x", "description": "y", "schema": {"type": "object"}}
    form = {"messages": [{**user("x")[0], "name": "Ann"}], "response_format": {"type": "json_schema", "json_schema": schema}}
    for path, body, names in (
        ("/v1/responses", effort, "store, max_tool_calls, truncation, text.verbosity, reasoning.summary, reasoning_effort"),
        ("/v1/messages", {"messages": user("x"), "metadata": {"user_id": "u"}, **marked}, "metadata, cache_control"),
        ("/v1/messages", {"messages": user("x"), "tools": [{**CUSTOM, "eager_input_streaming": True}]}, ""),
        ("/v1/messages", thinking, "thinking.budget_tokens"),
        ("/v1/messages", {"messages": [*user("x"), *turns], "tools": [CUSTOM]}, "is_error"),
        ("/v1/chat/completions", form, "response_format.json_schema.description, messages.name"),
    ):
        limit = {"max_tokens": 2} if "messages" in body else {"max_output_tokens": 2}
        status, headers, _ = ask(served, path, {**body, **limit})
        assert (status, headers.get("warning")) == (200, f'299 - "No effect here: {names}"' if names else None)


@pytest.mark.parametrize(("kind", "thinks"), [("enabled", True), ("enabled", False), ("disabled", True), ("disabled", False)])
def test_thinking_that_cannot_be_switched_is_named(kind: str, thinks: bool) -> None:
    """Guards `thinking` of models whose chat template has no variable for it: it was ignored without a word."""
    template: Any = SimpleNamespace(switches=(), thinks=thinks)
    body = MessagesBody.model_validate({"messages": user("x"), "max_tokens": 1, "thinking": {"type": kind}})
    assert body.ignored(template) == (["thinking"] if (kind == "enabled") != thinks else [])
