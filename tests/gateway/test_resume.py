"""Answers whose stream broke go on at any router with the same text: over HTTP, and what is refused.

Over gRPC, with every parameter, they do in `tests/client/test_conformance.py`.
"""

import json
from collections.abc import Iterator, Sequence
from typing import Any

import grpc
import pytest

from cascade.client.exchange import encode_request
from cascade.client.rpc import stub_of
from cascade.params import SamplingParams, Structured
from tests.chat.test_turns import SAID, TOOLS, user
from tests.client.test_conformance import LIKELY
from tests.http.test_http import PROMPT, ask
from tests.in_process import House, serving
from tests.talkers import conversing

served = serving()


@pytest.fixture(scope="module")
def stub(served: House) -> Iterator[Any]:
    with grpc.insecure_channel(served.grpc) as channel:
        yield stub_of(channel)


parrots = conversing(pass_s=0.0005, limits={"max_tokens": 60})


# HTTP


def events(served: House, path: str, body: dict[str, Any]) -> list[Any]:
    """Of a streamed answer, by hand."""
    status, _, raw = ask(served, path, body | {"stream": True, "history": True, "stream_options": {"include_usage": True}})
    assert status == 200, raw
    *pieces, last = raw.decode().removesuffix("\n\n").split("\n\n")
    assert last == "data: [DONE]"
    return [json.loads(event.removeprefix("data: ")) for event in pieces]


def choices(pieces: Sequence[Any]) -> dict[int, dict[str, Any]]:
    answers: dict[int, dict[str, Any]] = {}
    for choice in (choice for event in pieces for choice in event["choices"]):
        answer = answers.setdefault(choice["index"], {"text": "", "ids": [], "ends": [], "logprobs": [], "finish": None})
        answer["text"] += choice.get("text", "") + (choice.get("delta", {}).get("content") or "")
        answer["ids"] += choice.get("cascade", {}).get("token_ids", [])
        answer["logprobs"].append(choice["logprobs"])
        answer["finish"] = choice["finish_reason"] or answer["finish"]
    for answer in answers.values():
        logprobs = [logprob for logprob in answer.pop("logprobs") if logprob]
        keys = logprobs[0] if logprobs else ()
        answer["logprobs"] = {key: [value for logprob in logprobs for value in logprob[key]] for key in keys}
    return answers


def counted(pieces: Sequence[Any]) -> dict[str, Any]:
    """The last event's usage, but for what the full tier had kept of the prompt: a second request finds more."""
    return {name: count for name, count in pieces[-1]["usage"].items() if name != "prompt_tokens_details"}


def test_choices_go_on_over_http(served: House) -> None:
    """Guards several answers in one stream: each goes on after its own tokens, ended ones too, and usage counts all."""
    body = {"prompt": [PROMPT, "x = "], "n": 2, "logprobs": 2, "echo": True, "max_tokens": 20, "temperature": 0.9, "seed": 4}
    body |= {"logit_bias": LIKELY, "stop": [" y x"]}
    pieces = events(served, "/v1/completions", body)
    expected, usage = choices(pieces), counted(pieces)
    seeded = [choice for event in pieces for choice in event["choices"] if "seed" in choice.get("cascade", {})]
    first = {choice["index"]: choice["cascade"]["seed"] for choice in seeded}
    assert [first[index] - first[0] for index in range(4)] == [0, 1] * 2
    assert len({answer["finish"] for answer in expected.values()} | {len(answer["ids"]) for answer in expected.values()}) > 2
    for cut in range(1, len(pieces) - 1, 4):
        had = choices(pieces[:cut])
        token_ids = [had.get(index, {"ids": []})["ids"] for index in sorted(expected)]  # they come in any order
        if all(answer["finish"] for answer in had.values()) and len(had) == len(expected):
            continue
        rest = events(served, "/v1/completions", body | {"seed": first[0], "resume": {"token_ids": token_ids}})
        behind = [event for event in pieces[:cut] if all(token_ids[choice["index"]] for choice in event["choices"])]
        assert choices([*behind, *rest]) == expected, cut
        assert counted(rest) == usage


def test_chats_go_on_over_http(parrots: House) -> None:
    """Guards deltas: the role comes once, and a call that was begun is not begun again."""
    messages = user("I look it up." + SAID["hermes"])
    body = {"messages": messages, "tools": TOOLS, "temperature": 0.0, "max_tokens": 60, "seed": 5}

    def message(pieces: Sequence[Any]) -> tuple[Any, ...]:
        deltas = [choice["delta"] for event in pieces for choice in event["choices"]]
        calls = [call for delta in deltas for call in delta.get("tool_calls", ())]
        names = [call["function"]["name"] for call in calls if "name" in call["function"]]
        text = "".join(delta.get("content") or "" for delta in deltas)
        ends = [choice["finish_reason"] for event in pieces for choice in event["choices"] if choice["finish_reason"]]
        roles = [delta["role"] for delta in deltas if "role" in delta]
        return text, names, "".join(call["function"]["arguments"] for call in calls), ends, roles, counted(pieces)

    pieces = events(parrots, "/v1/chat/completions", body)
    assert message(pieces)[1] == ["get_weather"]
    for cut in range(2, len(pieces) - 2, 3):
        [had] = choices(pieces[:cut]).values()
        rest = events(parrots, "/v1/chat/completions", body | {"resume": {"token_ids": [had["ids"]]}})
        assert message([*pieces[:cut], *rest]) == message(pieces)
    parrots.settle()


def test_ids_of_answers_are_kept(served: House) -> None:
    """Guards clients that know an answer by its id: with the same request id it is that of the broken stream."""
    body = {"prompt": PROMPT, "stream": True, "max_tokens": 8, "seed": 1, "history": True}
    for had in ({}, {"resume": {"token_ids": [[1]]}}):
        assert ask(served, "/v1/completions", body | had, X_Request_Id="mine")[2].startswith(
            b'data: {"id":"cmpl-mine","object"'
        )


# refusals

REFUSED: list[tuple[dict[str, Any], list[int], str]] = [
    ({}, [5, 4096], "Token id 4096 is out of range: ids go from 0 to 4095"),
    ({"max_tokens": 2}, [5, 6, 7], "resume has 3 tokens of an answer: max_tokens is 2"),
    ({"max_tokens": 2}, [5, 6], "nothing is left to be written"),
    ({"stop_token_ids": (6,)}, [5, 6], "nothing is left to be written"),
    ({"stop": (" name",)}, [322, 306, 563, 626, 273, 538], "nothing is left to be written"),
    ({"seed": None}, [5], "seed is missing"),
    ({"structured": Structured(regex="[a-c]+")}, [322], "structured.regex does not allow"),
]


@pytest.mark.parametrize(("chosen", "had", "words"), REFUSED)
def test_what_cannot_be_gone_on_with_is_refused(
    served: House, stub: Any, chosen: dict[str, Any], had: list[int], words: str
) -> None:
    """Guards against answers that no stream ever was: one sentence says why."""
    request = encode_request(PROMPT, SamplingParams(**{"seed": 1, **chosen}), None)
    request.resume.token_ids[:] = had
    with pytest.raises(grpc.RpcError) as caught:
        list(stub.Generate(request))
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert words in caught.value.details()
    served.settle()


def test_only_streams_go_on(served: House, stub: Any) -> None:
    """Guards parameters that would be ignored, by whole answers and by routers that know less."""
    request = encode_request(PROMPT, SamplingParams(seed=1), None)
    request.resume.token_ids[:] = [5]
    with pytest.raises(grpc.RpcError, match="resume is set: only streams can be resumed, so call Generate"):
        stub.Complete(request)
    request.resume.MergeFromString(b"\xf8\x06\x01")
    with pytest.raises(grpc.RpcError, match="unknown fields in resume"):
        list(stub.Generate(request))
