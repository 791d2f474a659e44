"""Conversations over gRPC: what HTTP gives and refuses, gRPC gives and refuses, whole and in pieces."""

import json
from collections.abc import Iterator
from typing import Any

import grpc
import pytest
from openai import OpenAI

from cascade.chat.template import Style
from cascade.client import AsyncClient, Client
from cascade.client.chat import Turn, TurnPiece
from cascade.errors import InvalidRequest
from cascade.params import SamplingParams, Speculation, Structured
from cascade.v1 import serving_pb2 as pb
from cascade.v1 import serving_pb2_grpc
from tests.chat.templates import Family
from tests.chat.test_tools import SAID, STOP, TOOLS, WEATHER, joined
from tests.doors import House
from tests.http.test_http import ask
from tests.talkers import talking
from tests.waiting import LONG_S

MOST = 120  # tokens that an answer may have
ASKED: dict[str, Any] = {"role": "user", "content": "one two three"}
CALLS: dict[str, Any] = {"role": "user", "content": "I look it up." + SAID["hermes"]}
CALLED: dict[str, Any] = {
    "role": "assistant",
    "content": None,
    "tool_calls": [{"id": "c1", "type": "function", "function": {"name": "get_weather", "arguments": '{"city": "Rome"}'}}],
}
RESULT: dict[str, Any] = {"role": "tool", "tool_call_id": "c1", "content": "sun"}
NAMED: dict[str, Any] = {"type": "function", "function": {"name": "get_weather"}}
CONVERSATIONS: dict[str, tuple[list[dict[str, Any]], dict[str, Any], dict[str, Any]]] = {  # messages, options, sampling
    "words": ([{"role": "system", "content": "Be brief."}, ASKED | {"name": "ann"}], {}, {}),
    "sampled": ([ASKED], {}, {"temperature": 1.0, "seed": 7, "top_k": 40, "max_tokens": 30}),
    "as long as there is room for": ([ASKED], {}, {"ignore_eos": True}),
    "gone on with": ([ASKED, {"role": "assistant", "content": "one two"}], {"continue_final_message": True}, {}),
    "without a turn": ([ASKED], {"add_generation_prompt": False}, {"max_tokens": 5}),
    "a call": ([CALLS], {"tools": TOOLS}, {}),
    "no call": ([CALLS], {"tools": TOOLS, "tool_choice": "none"}, {}),
    "enforced": ([ASKED], {"tools": TOOLS, "tool_choice": "required"}, {"temperature": 1.0, "seed": 5}),
    "one enforced": ([ASKED], {"tools": TOOLS, "tool_choice": NAMED, "parallel_tool_calls": False}, {"seed": 6}),
    "a result": ([ASKED, CALLED, RESULT, ASKED], {"tools": TOOLS}, {}),
    "a call that is cut": ([CALLS], {"tools": TOOLS}, {"max_tokens": 14}),
    "structured": ([ASKED], {}, {"structured": Structured(regex="[a-c]{3,9}"), "seed": 2}),
}


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[House]:
    """Parrots that know conversations and tools."""
    with talking(tmp_path_factory.mktemp("hermes"), "hermes", pass_s=0.001, limits={"max_tokens": MOST}) as built:
        yield built


@pytest.fixture
def client(served: House) -> Iterator[Client]:
    """After it nothing may be left anywhere."""
    with Client(served.grpc) as client:
        yield client
    served.settle()


def params(sampling: dict[str, Any]) -> SamplingParams:
    return SamplingParams(**{"max_tokens": MOST, "temperature": 0.0, "seed": 3, **sampling})


def body(messages: Any, options: Any, sampling: dict[str, Any]) -> dict[str, Any]:
    """The same over HTTP."""
    asked = {"temperature": 0.0, "seed": 3, "max_tokens": MOST, **sampling}
    if (structured := asked.get("structured")) is not None:
        value = getattr(structured, structured.kind)
        asked["structured"] = {structured.kind: json.loads(value) if structured.kind == "json_schema" else value}
    return {"messages": messages, **options, **asked, "history": True}


def everywhere(house: House, messages: Any, sampling: dict[str, Any], **options: Any) -> Turn:
    """A turn that all ways to ask for it agree on: over HTTP and gRPC, whole and in pieces, with drafts and without."""
    asked = body(messages, options, sampling)
    status, _, answer = ask(house, "/v1/chat/completions", asked)
    assert status == 200, answer
    with OpenAI(base_url=f"{house.url}/v1", api_key="none", max_retries=0) as openai:
        given: Any = {"model": house.model, "messages": [], "stream": True, "stream_options": {"include_usage": True}}
        *pieces, last = openai.chat.completions.create(**given, extra_body=asked)
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


@pytest.mark.parametrize("name", CONVERSATIONS)
def test_both_protocols_say_the_same(served: House, name: str) -> None:
    """Guards the promise that gRPC offers what HTTP does: words, calls, reason, usage and tokens, whole and in pieces."""
    messages, options, sampling = CONVERSATIONS[name]
    turn = everywhere(served, messages, sampling, **options)
    assert turn.content == {"words": ASKED["content"], "no call": CALLS["content"]}.get(name, turn.content)


@pytest.mark.parametrize("name", ["words", "gone on with", "without a turn", "no call", "a result"])
def test_both_protocols_ask_what_the_template_writes(served: House, client: Client, name: str) -> None:
    """Guards the prompt on its way through both protocols: to the token it is what `apply_chat_template` gives."""
    messages, options, _ = CONVERSATIONS[name]
    goes_on = options.get("continue_final_message", False)
    style = Style(prompts=options.get("add_generation_prompt", not goes_on), goes_on=goes_on)
    tools = None if options.get("tool_choice") == "none" else options.get("tools")
    family = Family(served.router.model.tokenizer.chat_template)
    ids = family.prompt(messages, tools, style, source=served.router.model.tokenizer.source)
    asked = {key: options[key] for key in ("add_generation_prompt", "continue_final_message") if key in options}
    _, _, answer = ask(served, "/tokenize", {"messages": messages, "tools": tools, **asked})
    assert answer["tokens"] == ids
    status, _, answer = ask(served, "/v1/chat/completions", body(messages, options, {"max_tokens": 1}))
    assert (status, answer["usage"]["prompt_tokens"]) == (200, len(ids))
    turn = client.chat(messages, params({"max_tokens": 1, "prompt_logprobs": 1}), **options)
    assert [token.id for token in turn.completion.prompt] == ids


def check_pieces(pieces: list[TurnPiece], turn: Turn) -> None:
    """Joined, the pieces of a streamed turn are the whole one."""
    last = pieces[-1].turn
    assert last is not None
    for name in ("content", "reasoning_content", "finish_reason", "reasoning_tokens"):
        assert getattr(last, name) == getattr(turn, name)
    assert [(call.name, call.arguments) for call in last.calls] == [(call.name, call.arguments) for call in turn.calls]
    assert (last.completion.text, last.completion.token_ids) == (turn.completion.text, turn.completion.token_ids)
    assert "".join(piece.content for piece in pieces) == (turn.content or "")
    assert "".join(piece.reasoning_content for piece in pieces) == (turn.reasoning_content or "")
    assert "".join(piece.chunk.text for piece in pieces) == turn.completion.text
    assert [call.index for piece in pieces for call in piece.calls if call.id] == list(range(len(turn.calls)))


def test_calls_stream_and_are_answered(client: Client) -> None:
    """Guards deltas of calls, which come bit by bit, and turns that go back as they came with the result after them."""
    pieces = list(client.stream_chat([CALLS], params({}), tools=TOOLS))
    assert sum(bool(piece.calls) for piece in pieces) > 1
    turn = pieces[-1].turn
    assert turn is not None
    assert turn.completion.text == CALLS["content"]
    [call] = turn.calls
    assert json.loads(call.arguments) == {"city": "Rome", "days": 3}
    answered = [CALLS, turn.message, {"role": "tool", "tool_call_id": call.id, "content": "sun"}, ASKED]
    assert client.chat(answered, params({}), tools=TOOLS).content == ASKED["content"]


def test_without_a_limit_an_answer_has_the_room_there_is(served: House) -> None:
    """Guards the default of `max_tokens`, which is 128 for prompts: chats have the room that is left, as over HTTP."""
    sampling = pb.Sampling(temperature=0, ignore_eos=True, min_tokens=100)
    asked = pb.ChatRequest(messages=[pb.ChatMessage(role="user", content="x")], sampling=sampling)
    with grpc.insecure_channel(served.grpc) as channel:
        response = serving_pb2_grpc.CascadeStub(channel).CompleteChat(asked)
    assert response.finish.completion_tokens == MOST
    assert not response.HasField("text")
    with Client(served.grpc) as client:
        assert client.chat([ASKED]).finish_reason == "stop"


def tool(name: str, **more: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, **more}}


def called(arguments: str) -> dict[str, Any]:
    """A request whose assistant has called with these."""
    return {"messages": [CALLED | {"tool_calls": [{"id": "1", "function": {"name": "f", "arguments": arguments}}]}]}


BAD: dict[str, tuple[dict[str, Any], str]] = {  # changes to a sound request, words of the sentence
    "no content": ({"messages": [{"role": "user"}]}, "messages.0: content is missing"),
    "no messages": ({"messages": []}, "messages: list should have at least 1 item"),
    "a user's call": ({"messages": [CALLED | {"role": "user"}]}, "only the assistant calls tools"),
    "too many": ({"messages": [ASKED] * 5000}, "messages: list should have at most 4096 items"),
    "nothing to choose from": ({"tool_choice": "required"}, "tool_choice is given without tools"),
    "a choice that is not there": ({"tools": [STOP], "tool_choice": NAMED}, "tool_choice names 'get_weather': tools have stop"),
    "no schema": (
        {"tools": [STOP, tool("f", parameters={"type": "array"})]},
        "tools.1.function.parameters: the schema must be that of an object",
    ),
    "a schema that cannot be enforced": (
        {"tools": [tool("f", parameters={"not": {}}, strict=True)], "tool_choice": "required"},
        "tools.0.function.parameters cannot be compiled",
    ),
    "enforced twice": (
        {"tools": [WEATHER], "tool_choice": "required", "structured": {"regex": "a"}},
        "tools and response_format or structured are both enforced",
    ),
    "no name for a result": ({"messages": [ASKED, CALLED, {"role": "tool", "content": "x"}]}, "tool_call_id is needed"),
    "too large": (
        {"tools": [tool(f"f{i}", parameters={"required": ["x" * 5000]}) for i in range(14)], "tool_choice": "required"},
        "tools need a grammar",
    ),
    "endless": ({"tools": TOOLS, "tool_choice": "required", "ignore_eos": True}, "ignore_eos"),
    "nothing to go on with": ({"continue_final_message": True}, "the last message must be the assistant's"),
    "a variable": ({"chat_template_kwargs": {"mood": "calm"}}, "chat_template_kwargs has 'mood'"),
    "too long": ({"max_tokens": MOST + 1}, f"max_tokens is {MOST + 1}: this server writes at most {MOST}"),
}
SAMPLED = ("structured", "max_tokens", "ignore_eos")
OVER_HTTP: dict[str, tuple[dict[str, Any], str]] = {  # what cannot be said over gRPC
    "another kind": ({"tools": [{"type": "browser"}]}, "tools.0.type is 'browser'"),
    "two forms": ({"tools": TOOLS, "tool_choice": "required", "response_format": {"type": "json_object"}}, "leave one out"),
}


def refused_alike(served: House, asked: dict[str, Any], words: str, *, grpc_too: bool = True) -> None:
    """Both protocols, gRPC whole and in pieces, refuse ``asked`` with the same sentence, which has these ``words``."""
    status, _, answer = ask(served, "/v1/chat/completions", {"seed": 3, **asked})
    message = answer["error"]["message"]
    assert (status, words in message, len(message) < 400) == (400, True, True), answer
    if not grpc_too:
        return
    sampling = {key: asked[key] for key in SAMPLED if key in asked}
    if "structured" in sampling:
        sampling["structured"] = Structured(**sampling["structured"])
    options = {key: value for key, value in asked.items() if key not in (*SAMPLED, "messages")}
    with Client(served.grpc) as client:
        for call in (client.chat, lambda *asked, **options: list(client.stream_chat(*asked, **options))):
            with pytest.raises(InvalidRequest) as caught:
                call(asked["messages"], params(sampling), **options)
            assert str(caught.value) == message.replace("The body", "The request")


@pytest.mark.parametrize("name", BAD | OVER_HTTP)
def test_both_protocols_refuse_alike(served: House, name: str) -> None:
    """Guards the sentences, with field, value and what to do: what is wrong is wrong in both protocols, for the same reason."""
    changes, words = (BAD | OVER_HTTP)[name]
    refused_alike(served, {"messages": [ASKED], **changes}, words, grpc_too=name in BAD)
    served.settle()


def unknown() -> pb.ChatRequest:
    """A newer client's: a message has a field that is not known here."""
    message = pb.ChatMessage.FromString(b"\xfa\x07\x01x" + pb.ChatMessage(role="user").SerializeToString())
    return pb.ChatRequest(messages=[message])


USER = pb.ChatMessage(role="user", content="x")
RAW: dict[str, tuple[pb.ChatRequest, str]] = {
    "nothing at all": (pb.ChatRequest(), "messages: list should have at least 1 item"),
    "unknown": (unknown(), "There are unknown fields in messages (numbers 127)"),
    "a choice of nothing": (
        pb.ChatRequest(messages=[USER], tool_choice=pb.ToolChoice()),
        "tool_choice has neither mode nor function: set one of them",
    ),
    "no JSON": (
        pb.ChatRequest(messages=[USER], tools=[pb.Tool(function=pb.Function(name="f", parameters="{"))]),
        "tools.0.function.parameters: it must be the text of a JSON object",
    ),
    "deep JSON": (
        pb.ChatRequest(messages=[USER], chat_template_kwargs='{"a": ' + "[" * 100_000),
        "chat_template_kwargs: it must be the text of a JSON object",
    ),
}


@pytest.mark.parametrize("name", RAW)
def test_what_the_protocol_can_say_wrong_is_refused(served: House, name: str) -> None:
    """Guards fields that are JSON in a text, unions with nothing set, and clients that know more than the server."""
    asked, words = RAW[name]
    with grpc.insecure_channel(served.grpc) as channel, pytest.raises(grpc.RpcError) as caught:
        serving_pb2_grpc.CascadeStub(channel).CompleteChat(asked, timeout=LONG_S)
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert words in caught.value.details()


@pytest.mark.parametrize(
    "messages",
    ["hello", [{"role": "user", "content": "x", "mood": "calm"}], [{"role": "user", "content": 5}], [["user", "x"]]],
    ids=str,
)
def test_what_cannot_be_sent_is_said(client: Client, messages: Any) -> None:
    """Guards callers against protobuf's own errors."""
    with pytest.raises(InvalidRequest, match="The request cannot be sent"):
        client.chat(messages)


async def test_event_loops_have_conversations(served: House) -> None:
    """Guards the asynchronous client: the same turns, whole and in pieces."""
    async with AsyncClient(served.grpc) as client:
        turn = await client.chat([CALLS], params({}), tools=TOOLS)
        pieces = [piece async for piece in client.stream_chat([CALLS], params({}), tools=TOOLS)]
    check_pieces(pieces, turn)
    served.settle()
