"""Malformed requests over HTTP and gRPC, by the hundred: each gets the right error, and the server is as well as before."""

import http.client
import json
import random
import socket
import string
from collections.abc import Iterator
from typing import Any

import grpc
import psutil
import pytest
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message_factory import GetMessageClass
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

from cascade.params import SamplingParams
from cascade.v1 import serving_pb2 as pb
from deployments.gateway.http.messages import MessagesBody
from deployments.gateway.http.openai import ChatBody, CompletionBody, DetokenizeBody, TokenizeBody
from deployments.gateway.http.responses import ResponsesBody
from tests.cases import examples
from tests.http.test_http import expected
from tests.in_process import House, house
from tests.waiting import LONG_S

JSON = "application/json"
BODIES = (CompletionBody, ChatBody, ResponsesBody, MessagesBody, TokenizeBody, DetokenizeBody)
FIELDS = sorted({name for body in BODIES for name in body.model_fields})
PARAMS = SamplingParams(max_tokens=30, temperature=0.8, seed=3)
MANY = examples(0.2)
QUIET: dict[str, Any] = {"deadline": None, "database": None, "phases": [Phase.generate]}
QUIET["suppress_health_check"] = list(HealthCheck)

wild_text = st.text(max_size=30) | st.text(string.printable, max_size=30) | st.sampled_from(["\x00", "\ud800", "x" * 9999])
wild_number = st.integers() | st.floats() | st.sampled_from([0, -1, 2**31, 2**63, 2**64, 10**40, 1e308, -0.0])
wild = st.recursive(
    st.none() | st.booleans() | wild_number | wild_text,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(wild_text | st.sampled_from(FIELDS), inner, max_size=4),
    max_leaves=8,
)
bodies = st.dictionaries(st.sampled_from(FIELDS), wild, max_size=6) | wild
MESSAGES = {"messages": [{"role": "user", "content": "x"}]}
SOUND: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "x", "max_tokens": 2},
    "/v1/chat/completions": MESSAGES | {"max_tokens": 2},
    "/v1/responses": {"input": "x", "max_output_tokens": 2},
    "/v1/messages": MESSAGES | {"max_tokens": 2},
    "/v1/messages/count_tokens": MESSAGES,
    "/tokenize": {"prompt": "x"},
    "/detokenize": {"tokens": [5]},
}


@pytest.fixture(scope="module")
def served() -> Iterator[House]:
    """A server; after all the nonsense it must be as it was."""
    with house(pass_s=0.0, limits={"max_tokens": 64, "max_n": 2, "max_prompts": 4, "body_timeout_s": 1.0}) as built:
        before = expected(built, PARAMS)
        descriptors = psutil.Process().num_fds()
        yield built
        built.settle()
        assert expected(built, PARAMS) == before
        assert psutil.Process().num_fds() < descriptors + 40


def post(served: House, path: str, data: bytes, kind: str = JSON) -> tuple[int, bytes]:
    connection = http.client.HTTPConnection(served.url.removeprefix("http://"), timeout=LONG_S)
    try:
        connection.request("POST", path, data, {"Content-Type": kind})
        response = connection.getresponse()
        return response.status, response.read()
    finally:
        connection.close()


def check(status: int, content: bytes) -> None:
    """An answer, or a refusal in its form: never our own fault, never a traceback."""
    assert status in (200, 400, 404, 405, 413, 429), (status, content[:300])
    if status != 200:
        assert b"Traceback" not in content
        error = json.loads(content)["error"]
        assert set(error) in ({"message", "type", "param", "code"}, {"message", "type"})  # OpenAI's, Anthropic's
        assert 0 < len(error["message"]) < 600, error


@st.composite
def contents(draw: st.DrawFn, path: str) -> bytes:
    """Bodies of every shape, sound ones with fields gone wild, and bytes that are no JSON or cut off."""
    body = draw(bodies)
    mixed = SOUND[path] | body if draw(st.booleans()) and isinstance(body, dict) else body
    whole, noise = json.dumps(SOUND[path]).encode(), draw(st.binary(max_size=200))
    cut = whole[: draw(st.integers(0, len(whole) - 1))] + noise[:3]
    return draw(st.sampled_from([json.dumps(mixed).encode("utf-8", "surrogatepass"), noise, cut]))


@pytest.mark.parametrize("path", SOUND)
def test_wild_bodies_are_refused(served: House, path: str) -> None:
    """Guards every route against what is not meant for it: bodies, and kinds that they say to be of."""

    @seed(1)
    @settings(max_examples=3 * MANY, **QUIET)
    @given(contents(path), st.sampled_from([JSON, JSON, JSON, "text/plain", "\t", "multipart/form-data"]))
    def run(body: bytes, kind: str) -> None:
        check(*post(served, path, body, kind))

    run()


def test_broken_connections_are_survived(served: House) -> None:
    """Guards the HTTP parser and the places of requests against heads and bodies that are cut, wrong, or never end."""
    host, port = served.url.removeprefix("http://").split(":")
    dice = random.Random(4)
    body = json.dumps({"prompt": "x", "max_tokens": 60, "ignore_eos": True, "stream": True}).encode()
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
    whole = head % len(body) + body
    for _ in range(6 * MANY):
        data = bytearray(whole[: dice.randrange(1, len(whole) + 1)])
        for _ in range(dice.randrange(4)):
            data[dice.randrange(len(data))] = dice.randrange(256)
        with socket.create_connection((host, int(port)), timeout=LONG_S) as connection:
            connection.sendall(data)
            if dice.random() < 0.3:
                connection.shutdown(socket.SHUT_WR)
                answer = connection.recv(100)
                assert not answer or answer.startswith(b"HTTP/1.1 "), answer
    with socket.create_connection(tuple(served.grpc.split(":")), timeout=LONG_S) as connection:
        connection.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(200))
    assert post(served, "/v1/completions", json.dumps(SOUND["/v1/completions"]).encode())[0] == 200


line = st.text(max_size=20) | st.sampled_from(["user", "assistant", "tool", "c1", "f", "{}", "[", '{"type": "object"}', "auto"])
SCALARS: dict[int, st.SearchStrategy[Any]] = {
    FieldDescriptor.TYPE_STRING: line,
    FieldDescriptor.TYPE_BOOL: st.booleans(),
    FieldDescriptor.TYPE_UINT32: st.sampled_from([0, 1, 2, 5, 77, 2**31, 2**32 - 1]),
    FieldDescriptor.TYPE_UINT64: st.sampled_from([0, 3, 2**63, 2**64 - 1]),
    FieldDescriptor.TYPE_SINT32: st.sampled_from([-(2**31), -1, 0, 1, 2**31 - 1]),
    FieldDescriptor.TYPE_DOUBLE: st.floats() | st.sampled_from([0.0, 0.5, 1.0]),
}


@st.composite
def fields(draw: st.DrawFn, kind: Any) -> Any:
    """A message with a few of its fields set, to anything that their types allow."""
    message, by_name = kind(), kind.DESCRIPTOR.fields_by_name
    for name in draw(st.lists(st.sampled_from(sorted(by_name)), max_size=4, unique=True)):
        field = by_name[name]
        own, entry = getattr(message, name), field.message_type
        if entry is not None and entry.GetOptions().map_entry:
            key, value = (draw(SCALARS[part.type]) for part in entry.fields)
            own[key] = value
        elif entry is not None:
            inner = st.deferred(lambda entry=entry: fields(GetMessageClass(entry)))
            for item in draw(st.lists(inner, min_size=1, max_size=2 if field.is_repeated else 1)):
                (own.add() if field.is_repeated else own).MergeFrom(item)
        elif field.is_repeated:
            own.extend(draw(st.lists(SCALARS[field.type], max_size=3)))
        else:
            setattr(message, name, draw(SCALARS[field.type]))
    return message


def test_wild_requests_are_refused(served: House) -> None:
    """Guards every field of gRPC's requests: each is honoured, or refused with a sentence, never with the name of a class."""
    ends: dict[grpc.StatusCode, int] = {}
    with grpc.insecure_channel(served.grpc) as channel:

        @seed(7)
        @settings(max_examples=4 * MANY, **QUIET)
        @given(fields(pb.GenerateRequest) | fields(pb.ChatRequest), st.booleans(), st.just(b"") | st.binary(max_size=120))
        def run(request: Any, whole: bool, noise: bytes) -> None:
            chat = isinstance(request, pb.ChatRequest)
            if chat and not request.messages:
                request.messages.add(role="user", content="x")
            elif not chat and request.WhichOneof("input") is None:
                request.prompt = "x"
            request.sampling.max_tokens = 2
            name = ("CompleteChat" if chat else "Complete") if whole else "Chat" if chat else "Generate"
            call = (channel.unary_unary if whole else channel.unary_stream)(f"/cascade.v1.Cascade/{name}")
            try:
                answer = call(noise or request.SerializeToString(), timeout=LONG_S)
                assert answer if whole else list(answer)
                code, words = grpc.StatusCode.OK, ""
            except grpc.RpcError as error:
                code, words = error.code(), error.details()
                assert 0 < len(words) < 600
            assert not {"Traceback", "class", "The server failed"} & set(words.split())
            ends[code] = ends.get(code, 0) + 1

        run()
    assert set(ends) == {grpc.StatusCode.OK, grpc.StatusCode.INVALID_ARGUMENT}, ends
