"""Conversations over gRPC are those over HTTP: prompts, answers, usage, whole and in pieces."""

import json
from functools import partial
from typing import Any

import grpc
import pytest
from openai import OpenAI

from cascade.chat.template import Style
from cascade.client import Client
from cascade.client.chat import Turn, TurnPiece
from cascade.client.rpc import stub_of
from cascade.params import SamplingParams, Speculation, Structured
from cascade.v1 import serving_pb2 as pb
from tests.chat.test_prompts import Family
from tests.http.test_http import ask
from tests.in_process import House, serving
from tests.talkers import talking

DAYS = {"$defs": {"days": {"type": "integer", "minimum": 1, "maximum": 9}}}
FIELDS = {"properties": {"city": {"type": "string", "maxLength": 12}, "days": {"$ref": "#/$defs/days"}}, **DAYS}
CITY: dict[str, Any] = {"type": "object", **FIELDS, "required": ["city", "days"], "additionalProperties": False}
WEATHER: dict[str, Any] = {"type": "function", "function": {"name": "get_weather", "parameters": CITY}}
STRICT: dict[str, Any] = {"type": "function", "function": WEATHER["function"] | {"strict": True}}
STOP: dict[str, Any] = {"type": "function", "function": {"name": "stop"}}
TOOLS: Any = [WEATHER, STOP]
SAID = {  # a call in the format of each family
    "hermes": '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Rome", "days": 3}}\n</tool_call>',
    "mistral": '[TOOL_CALLS] [{"name": "get_weather", "arguments": {"city": "Rome", "days": 3}}]',
    "mistral11": '[TOOL_CALLS]get_weather[ARGS]{"city": "Rome", "days": 3}',
    "llama3": '{"name": "get_weather", "parameters": {"city": "Rome", "days": 3}}',
}
MOST = 120  # tokens of an answer, unless a test says otherwise


def user(content: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": content}]


def params(sampling: dict[str, Any]) -> SamplingParams:
    return SamplingParams(**{"max_tokens": MOST, "temperature": 0.0, "seed": 3, **sampling})


def body(messages: Any, options: Any, sampling: dict[str, Any]) -> dict[str, Any]:
    """The same over HTTP."""
    fields = {"temperature": 0.0, "seed": 3, "max_tokens": MOST, **sampling}
    if (structured := fields.get("structured")) is not None:
        value = getattr(structured, structured.kind)
        fields["structured"] = {structured.kind: json.loads(value) if structured.kind == "json_schema" else value}
    return {"messages": messages, **options, **fields, "history": True}


def everywhere(house: House, messages: Any, sampling: dict[str, Any], **options: Any) -> Turn:
    """A turn that all ways to ask for it agree on."""
    given = body(messages, options, sampling)
    status, _, answer = ask(house, "/v1/chat/completions", given)
    assert status == 200, answer
    with OpenAI(base_url=f"{house.url}/v1", api_key="none", max_retries=0) as openai:
        streamed: Any = {"model": house.model, "messages": [], "stream": True, "stream_options": {"include_usage": True}}
        *pieces, last = openai.chat.completions.create(**streamed, extra_body=given)
    with Client(house.grpc) as client:
        turn = client.chat(messages, params(sampling), Speculation("off"), **options)
        drafted = Speculation(tiers=("tiny", "medium"))
        check_pieces(list(client.stream_chat(messages, params(sampling), drafted, **options)), turn)
    [choice], usage, stats = answer["choices"], answer["usage"], turn.completion.stats
    message, (content, calls, reason) = choice["message"], joined(pieces)
    thoughts = "".join(getattr(piece.choices[0].delta, "reasoning_content", None) or "" for piece in pieces)
    assert message.get("reasoning") == message.get("reasoning_content")
    assert (message.get("reasoning", ""), message["content"] or "", choice["finish_reason"]) == (thoughts, content, reason)
    assert (turn.reasoning_content or "", turn.content or "", turn.finish_reason) == (thoughts, content, reason)
    made = [(call["function"]["name"], call["function"]["arguments"]) for call in message.get("tool_calls", ())]
    assert made == [(call.name, call.arguments) for call in turn.calls] == [tuple(call[1:]) for call in calls]
    assert last.usage.completion_tokens == usage["completion_tokens"] == stats.completion_tokens
    assert usage["prompt_tokens"] == stats.prompt_tokens
    assert usage.get("completion_tokens_details", {}).get("reasoning_tokens") == turn.reasoning_tokens
    assert choice["cascade"]["token_ids"] == list(turn.completion.token_ids)
    return turn


def joined(pieces: list[Any]) -> tuple[str, list[list[Any]], str]:
    """Content, calls (id, name, arguments) and the reason of an answer that OpenAI's client streamed."""
    content, calls = "", []
    assert pieces[0].choices[0].delta.role == "assistant"
    for piece in pieces:
        delta = piece.choices[0].delta
        content += delta.content or ""
        for call in delta.tool_calls or ():
            if call.index == len(calls):
                assert call.type == "function"
                calls.append([call.id, call.function.name, ""])
            calls[call.index][2] += call.function.arguments
    return content, calls, pieces[-1].choices[0].finish_reason


def check_pieces(pieces: list[TurnPiece], turn: Turn) -> None:
    """Joined, the pieces of a streamed turn are the whole one."""
    last = pieces[-1].turn
    for name in ("content", "reasoning_content", "finish_reason", "reasoning_tokens"):
        assert getattr(last, name) == getattr(turn, name)
    assert [(call.name, call.arguments) for call in last.calls] == [(call.name, call.arguments) for call in turn.calls]
    assert (last.completion.text, last.completion.token_ids) == (turn.completion.text, turn.completion.token_ids)
    assert "".join(piece.content for piece in pieces) == (turn.content or "")
    assert "".join(piece.reasoning_content for piece in pieces) == (turn.reasoning_content or "")
    assert "".join(piece.chunk.text for piece in pieces) == turn.completion.text
    assert [call.index for piece in pieces for call in piece.calls if call.id] == list(range(len(turn.calls)))


ASKED: dict[str, Any] = {"role": "user", "content": "one two three"}
CALLS: dict[str, Any] = {"role": "user", "content": "I look it up." + SAID["hermes"]}
CALLED: dict[str, Any] = {
    "role": "assistant",
    "content": None,
    "tool_calls": [{"id": "c1", "type": "function", "function": {"name": "get_weather", "arguments": '{"city": "Rome"}'}}],
}
RESULT: dict[str, Any] = {"role": "tool", "tool_call_id": "c1", "content": "sun"}
NAMED = [{"role": "system", "content": "Be brief."}, ASKED | {"name": "ann"}]
BEGUN = [ASKED, {"role": "assistant", "content": "one two"}]
ANSWERED = [ASKED, CALLED, RESULT, ASKED]
CONVERSATIONS: dict[str, tuple[list[dict[str, Any]], dict[str, Any], dict[str, Any]]] = {  # messages, options, sampling
    "words": (NAMED, {}, {}),
    "sampled": ([ASKED], {}, {"temperature": 1.0, "seed": 7, "top_k": 40, "max_tokens": 30}),
    "as long as there is room for": ([ASKED], {}, {"ignore_eos": True}),
    "gone on with": (BEGUN, {"continue_final_message": True}, {}),
    "without a turn": ([ASKED], {"add_generation_prompt": False}, {"max_tokens": 5}),
    "a result": (ANSWERED, {"tools": TOOLS}, {}),
    "a call that is cut": ([CALLS], {"tools": TOOLS}, {"max_tokens": 14}),
    "structured": ([ASKED], {}, {"structured": Structured(regex="[a-c]{3,9}"), "seed": 2}),
}


served = serving(make=partial(talking, "hermes"), pass_s=0.001, limits={"max_tokens": MOST})


@pytest.mark.parametrize("name", CONVERSATIONS)
def test_both_protocols_say_the_same(served: House, name: str) -> None:
    """Guards the promise that gRPC offers what HTTP does: words, calls, reason, usage and tokens, whole and in pieces."""
    messages, options, sampling = CONVERSATIONS[name]
    turn = everywhere(served, messages, sampling, **options)
    assert turn.content == {"words": ASKED["content"]}.get(name, turn.content)
    served.settle()


@pytest.mark.parametrize("name", ["words", "gone on with", "without a turn", "a result"])
def test_both_protocols_ask_what_the_template_writes(served: House, name: str) -> None:
    """Guards the prompt on its way through both protocols: to the token it is what `apply_chat_template` gives."""
    messages, options, _ = CONVERSATIONS[name]
    goes_on = options.get("continue_final_message", False)
    style = Style(prompts=options.get("add_generation_prompt", not goes_on), goes_on=goes_on)
    tokenizer = served.router.model.tokenizer
    ids = Family(tokenizer.chat_template).prompt(messages, options.get("tools"), style, source=tokenizer.source)
    assert ask(served, "/tokenize", {"messages": messages, **options})[2]["tokens"] == ids
    status, _, answer = ask(served, "/v1/chat/completions", body(messages, options, {"max_tokens": 1}))
    assert (status, answer["usage"]["prompt_tokens"]) == (200, len(ids))
    with Client(served.grpc) as client:
        turn = client.chat(messages, params({"max_tokens": 1, "prompt_logprobs": 1}), **options)
    assert [token.id for token in turn.completion.prompt] == ids


def test_calls_stream_and_are_answered(served: House) -> None:
    """Guards deltas of calls, which come bit by bit, and turns that go back as they came with the result after them."""
    with Client(served.grpc) as client:
        pieces = list(client.stream_chat([CALLS], params({}), tools=TOOLS))
        assert sum(bool(piece.calls) for piece in pieces) > 1
        turn = pieces[-1].turn
        assert turn.completion.text == CALLS["content"]
        [call] = turn.calls
        assert json.loads(call.arguments) == {"city": "Rome", "days": 3}
        answered = [CALLS, turn.message, {"role": "tool", "tool_call_id": call.id, "content": "sun"}, ASKED]
        assert client.chat(answered, params({}), tools=TOOLS).content == ASKED["content"]


def test_without_a_limit_an_answer_has_the_room_there_is(served: House) -> None:
    """Guards the default of `max_tokens`, which is 128 for prompts: chats have the room that is left, as over HTTP."""
    sampling = pb.Sampling(temperature=0, ignore_eos=True, min_tokens=100)
    request = pb.ChatRequest(messages=[pb.ChatMessage(role="user", content="x")], sampling=sampling)
    with grpc.insecure_channel(served.grpc) as channel:
        response = stub_of(channel).CompleteChat(request)
    assert response.finish.completion_tokens == MOST
    assert not response.HasField("text")
    with Client(served.grpc) as client:
        assert client.chat([ASKED]).finish_reason == "stop"
