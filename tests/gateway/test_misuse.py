"""The servers under misuse: endless heads, huge words, a controller that hangs, a crowd, answers that nobody takes."""

import asyncio
import contextlib
import socket
import threading
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any, NoReturn

import grpc
import pytest
from pydantic import ValidationError

from cascade.client import Client
from cascade.client.rpc import stub_of
from cascade.errors import Overloaded, Unavailable
from cascade.params import SamplingParams
from cascade.v1 import serving_pb2 as pb
from deployments.gateway.http.events import ClientLeft, Events
from deployments.gateway.http.openai import ChatBody, CompletionBody, SamplingBody
from deployments.links import replica_status
from tests.http.test_http import ask
from tests.in_process import House, deployment, serving
from tests.waiting import LONG_S, wait_until

LONG = "x" * 20_000
CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "x"}]}


served = serving(pass_s=0.005, max_running=1, max_waiting=0, limits={"body_timeout_s": 0.5})


def ends(connection: socket.socket) -> bool:
    """Whether the server closes the connection without a word."""
    connection.settimeout(LONG_S)
    try:
        return connection.recv(1) == b""
    except ConnectionResetError:
        return True


def test_heads_have_to_come(served: House) -> None:
    """Guards file descriptors: connections that never sent a whole head, the first or a later one, stayed for ever."""
    host, port = served.url.removeprefix("http://").split(":")
    whole = b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n"
    with contextlib.ExitStack() as stack:
        connections = [stack.enter_context(socket.create_connection((host, int(port)))) for _ in range(3)]
        for start, connection in zip((b"", whole[:-2], b"GET"), connections, strict=True):
            connection.sendall(start)
        assert all(map(ends, connections))
    with socket.create_connection((host, int(port))) as connection:
        body = b'{"prompt": "x", "max_tokens": 60, "ignore_eos": true}'  # an answer may take longer than a head
        head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
        connection.sendall(head % len(body) + body)
        answer = connection.recv(4096)
        while not answer.endswith(b"}"):
            answer += connection.recv(4096)
        assert b'"completion_tokens":60' in answer
        connection.sendall(whole[:20])
        assert ends(connection)


def test_sentences_fit_into_headers(served: House) -> None:
    """Guards the sentence: one that repeated a long value was larger than what gRPC takes in a header, and another came."""
    with grpc.insecure_channel(served.grpc) as channel:
        stub = stub_of(channel)
        for request in (
            pb.GenerateRequest(prompt="x", sampling=pb.Sampling(stop=[LONG])),
            pb.GenerateRequest(prompt="x", speculation=pb.Speculation(tiers=["日" * 9999])),
            pb.GenerateRequest(prompt="x", sampling=pb.Sampling(structured=pb.Structured(regex="(" + LONG))),
        ):
            for call in (lambda request=request: stub.Complete(request), lambda request=request: list(stub.Generate(request))):
                with pytest.raises(grpc.RpcError) as caught:
                    call()
                assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
                assert len(caught.value.details()) < 600


def test_a_controller_that_hangs_holds_up_nobody(served: House, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards requests against questions about replicas: each held a thread of those that tokenize, until there were none."""
    free, calls = threading.Event(), list[str]()

    def hang() -> dict[str, int]:
        calls.append("")
        free.wait()
        return {deployment("full"): 1}

    monkeypatch.setattr(replica_status, "count_replicas", hang)
    monkeypatch.setattr(replica_status, "COUNT_TIMEOUT_S", 0.5)
    try:
        with Client(served.grpc, patience_s=0) as client, ThreadPoolExecutor(40) as pool:
            answers = [pool.submit(client.describe) for _ in range(40)]
            wait_until(lambda: bool(calls))
            assert client.generate("x " * 1500, SamplingParams(max_tokens=2)).token_ids
            assert ask(served, "/metrics")[0] == 200
            for answer in answers:
                with pytest.raises(Unavailable, match="controller does not say"):
                    answer.result(LONG_S)
            assert len(calls) == 1
            monkeypatch.setattr(replica_status, "context", lambda: SimpleNamespace(deployment="router", app_name=""))
            monkeypatch.setattr(replica_status.serve, "get_deployment_handle", lambda *where: hang())
            monkeypatch.setattr(replica_status, "SIBLINGS_TIMEOUT_S", 0.1)
            with grpc.insecure_channel(served.grpc) as channel:
                assert {stub_of(channel).Abort(pb.AbortRequest(request_id="x")).aborted for _ in range(3)} == {0}
            assert len(calls) == 2
    finally:
        free.set()
    with Client(served.grpc) as client:
        assert [tier.replicas for tier in client.describe().tiers] == [0, 0, 1]


def test_a_crowd_is_sent_away_before_any_work(served: House, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards the answers being written: prompts were tokenized, and grammars compiled, of requests that had no place."""

    def work(*args: object) -> NoReturn:
        raise AssertionError("a request without a place is not read")

    params = SamplingParams(max_tokens=2000, ignore_eos=True)
    with Client(served.grpc) as client, contextlib.closing(client.stream("x", params)) as stream:  # type: ignore[type-var]
        next(stream)
        monkeypatch.setattr(served.router.model.tokenizer, "encode", work)
        with pytest.raises(Overloaded):
            client.generate("x")
        with pytest.raises(Overloaded):
            client.chat(CHAT["messages"])
        for path, body in (("completions", {"prompt": "x"}), ("chat/completions", CHAT)):
            assert ask(served, f"/v1/{path}", body)[0] == 429
    served.settle()


def test_long_lists_of_ids_do_not_stop_the_others(served: House, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards streams: a million ids were decoded in the event loop, for a second in which nobody got anything."""
    decode: Callable[..., str] = served.router.model.tokenizer.decode
    threads = list[str]()

    def note(ids: list[int]) -> str:
        threads.append(threading.current_thread().name)
        return decode(ids)

    monkeypatch.setattr(served.router.model.tokenizer, "decode", note)
    assert ask(served, "/detokenize", {"tokens": [40] * 5000})[0] == 200
    assert threads != ["house"]


async def test_events_end_with_a_client_that_takes_no_head() -> None:
    """Guards tiers: an answer whose head could not be sent was left to the garbage collector."""
    closed = list[bool]()

    async def events() -> AsyncIterator[bytes]:
        try:
            yield b"1"
            yield b"2"
        finally:
            closed.append(True)

    async def receive() -> NoReturn:
        await asyncio.Event().wait()
        raise AssertionError

    async def send(message: Any) -> None:
        raise ClientLeft

    source: Any = events()
    response = Events(source, await anext(source), contextlib.ExitStack(), {})
    with pytest.raises(ClientLeft):
        await response({}, receive, send)  # type: ignore[arg-type]
    assert closed == [True]


def chat_with(schema: dict[str, Any]) -> dict[str, Any]:
    tool = {"type": "function", "function": {"name": "f", "parameters": schema}}
    return CHAT | {"tools": [tool], "tool_choice": "none", "max_tokens": 2}


def test_schemas_are_taken_at_once_and_not_fetched(served: House) -> None:
    """Guards the router, which looked at 3 MB of schema for half a minute, and the network after it against what it names."""
    large = {"type": "object", "properties": {f"a{number}": {"type": "string"} for number in range(100_000)}}
    assert ask(served, "/v1/chat/completions", chat_with(large))[0] == 200
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(0.2)
        place = f"http://127.0.0.1:{server.getsockname()[1]}/schema"
        for schema in ({"$schema": place}, {"$ref": place}, {"$id": place, "$dynamicRef": place}):
            assert ask(served, "/v1/chat/completions", chat_with(schema))[0] == 200
            with pytest.raises(TimeoutError):
                server.accept()


MANY = 20_000
USER: dict[str, Any] = {"role": "user", "content": "x"}
CROWDS: list[tuple[type[SamplingBody], dict[str, Any], str]] = [  # kind of body, body, words
    (CompletionBody, {"prompt": [[1]] * MANY + [5]}, "prompt"),
    (CompletionBody, {"prompt": [1] * MANY + ["x"]}, "prompt"),
    (CompletionBody, {"prompt": "x", **{f"a{n}": n for n in range(MANY)}}, f"has {MANY + 1} fields"),
    (CompletionBody, {"prompt": "x", "logit_bias": {f"a{n}": "x" for n in range(MANY)}}, f"has {MANY} tokens"),
    (CompletionBody, {"prompt": "x", "speculation": {"tiers": [1] * MANY}}, "speculation.tiers"),
    (CompletionBody, {"prompt": "x", "structured": {"choice": [1] * MANY}}, "structured.choice"),
    (ChatBody, {"messages": [{}] * 4000}, "messages"),
    (ChatBody, {"messages": [{"role": "user", "content": [{}] * MANY}]}, "messages.0.content"),
    (ChatBody, {"messages": [USER, {"role": "assistant", "tool_calls": [{}] * 1000}]}, "messages.1.tool_calls"),
    (ChatBody, {"messages": [USER], "tools": [{"a": n} for n in range(100)]}, "tools"),
]


def test_a_crowd_of_mistakes_is_one(served: House) -> None:
    """Guards the router: each wrong item was a mistake of its own, and 2 MB of them took 20 seconds and 1.4 GB."""
    for kind, body, words in CROWDS:
        with pytest.raises(ValidationError) as caught:
            kind.model_validate(body)
        assert caught.value.error_count() < 10, words
        status, _, answer = ask(served, "/v1/completions" if kind is CompletionBody else "/v1/chat/completions", body)
        assert (status, words in answer["error"]["message"]) == (400, True), answer
