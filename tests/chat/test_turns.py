"""Conversations over gRPC are those over HTTP: prompts, answers, usage, whole and in pieces."""

import json
from functools import partial
from typing import Any

import grpc
import pytest

from cascade.chat.template import Style
from cascade.client import Client
from cascade.client.rpc import stub_of
from cascade.params import Structured
from cascade.v1 import serving_pb2 as pb
from tests.chat.everywhere import MOST, SAID, TOOLS, body, everywhere, params
from tests.chat.templates import Family
from tests.http.test_http import ask
from tests.in_process import House, serving
from tests.talkers import talking

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
