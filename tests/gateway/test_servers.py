"""The router's own servers, gRPC and HTTP: keys, limits, overload, deadlines, slow readers, aborts, draining, probes."""

import asyncio
import base64
import contextlib
import logging
import socket
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from cascade.client import AsyncClient, Client
from cascade.client.client import KeyInfo
from cascade.client.rpc import stub_of
from cascade.errors import DeadlineExceeded, Overloaded, PermissionDenied, Unauthenticated, Unavailable
from cascade.params import Handling, SamplingParams
from cascade.v1 import serving_pb2 as pb
from tests.http.test_http import ask
from tests.in_process import House, house, serving
from tests.waiting import LONG_S, until, wait_until

ALICE, BOB = "alice-0123456789abcdef", "bob-0123456789abcdefgh"
LONG = SamplingParams(max_tokens=4000, temperature=1.0, seed=1, ignore_eos=True)
PROMPT = "a secret prompt"
SMALL_WINDOW = [("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 4096)]  # so that unread answers soon fill it


# room for two answers, and two that wait; slow tiers; keys
small = serving(
    env={"DOOR_KEYS": f"alice={ALICE},bob={BOB}"},
    pass_s=0.005,
    max_running=2,
    max_waiting=2,
    limits={"max_body_bytes": 4096, "body_timeout_s": 0.5, "max_tokens": 4050},
    access={"keys_env": "DOOR_KEYS", "limits": {"bob": {"tokens_per_minute": 60}}},
)


@pytest.fixture
def alice(small: House) -> Iterator[Client]:
    with Client(small.grpc, api_key=ALICE) as client:
        yield client
    small.settle()


def bearer(key: str) -> tuple[tuple[str, str], ...]:
    return (("authorization", f"Bearer {key}"),)


@contextlib.contextmanager
def busy(served: House, num: int, *metadata: tuple[str, str]) -> Iterator[list[Any]]:
    """That many long answers being written, or waiting."""
    request = pb.GenerateRequest(prompt=PROMPT, sampling=pb.Sampling(max_tokens=4000, seed=1, ignore_eos=True))
    with grpc.insecure_channel(served.grpc) as channel:
        stub = stub_of(channel)
        calls = [stub.Generate(request, metadata=(*bearer(ALICE), *metadata)) for _ in range(num)]
        wait_until(lambda: served.router.admission.places.num_admitted >= num)
        yield calls
        for call in calls:
            call.cancel()
    served.settle()


def test_no_key_no_answer(small: House, alice: Client) -> None:
    """Guards every route of both protocols against strangers; only whether it is well is told to all."""
    password = base64.b64encode(f"me:{ALICE}".encode()).decode()
    short = {"prompt": "x", "max_tokens": 2}
    routes = (("/v1/models", None), ("/v1/completions", short), ("/tokenize", {"prompt": "x"}), ("/metrics", None), ("/", None))
    for path, body in (*routes, ("/openapi.json", None)):
        for headers in ({}, {"Authorization": "Bearer wrong"}):
            status, got, answer = ask(small, path, body, **headers)
            assert (status, answer["error"]["code"]) == (401, "invalid_api_key")
            assert got["www-authenticate"].startswith("Basic" if path == "/" else "Bearer")  # a browser asks for the key
        for sent in (f"Bearer {ALICE}", f"Basic {password}"):
            assert ask(small, path, body, Authorization=sent)[0] == 200
    assert ask(small, "/health")[0] == 200
    with Client(small.grpc) as stranger:
        messages = [{"role": "user", "content": "x"}]
        chats = (lambda: stranger.chat(messages), lambda: list(stranger.stream_chat(messages)))
        for call in (lambda: stranger.generate("x"), lambda: list(stranger.stream("x")), stranger.describe, *chats):
            with pytest.raises(Unauthenticated, match="API key"):
                call()
    assert alice.generate("x", SamplingParams(max_tokens=4)).token_ids


def test_rate_of_a_key_is_told(small: House) -> None:
    """Guards the others against a key that asks too much: 429 and when to come again, in both protocols."""
    with Client(small.grpc, api_key=BOB) as bob:
        bob.generate("x " * 40, SamplingParams(max_tokens=40, ignore_eos=True))
        with pytest.raises(Overloaded, match="60 tokens a minute"):
            bob.generate(PROMPT, SamplingParams(max_tokens=4))
    status, headers, answer = ask(small, "/v1/completions", {"prompt": "x"}, Authorization=f"Bearer {BOB}")
    assert (status, answer["error"]["type"]) == (429, "rate_limit_error")
    assert int(headers["retry-after"]) >= 1
    small.settle()


def test_full_server_says_so_at_once(small: House) -> None:
    """Guards latency under load, in both protocols; and that the places come back."""
    with busy(small, 4):
        status, headers, answer = ask(small, "/v1/completions", {"prompt": "x"}, Authorization=f"Bearer {ALICE}")
        assert (status, answer["error"]["code"], headers["retry-after"]) == (429, "overloaded", "1")
        assert answer["error"]["message"] == "The server is full: 2 answers are being written and 2 wait"
        with grpc.insecure_channel(small.grpc) as channel, pytest.raises(grpc.RpcError) as caught:
            stub_of(channel).Complete(pb.GenerateRequest(prompt="x"), metadata=bearer(ALICE))
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert dict(caught.value.trailing_metadata())["retry-after"] == "1"
        assert small.router.admission.places.num_waiting == 2
    answer = ask(small, "/v1/completions", {"prompt": "x", "n": 5}, Authorization=f"Bearer {ALICE}")[2]
    assert "asks for 5 answers at once: the server takes 4; send fewer" in answer["error"]["message"]
    assert ask(small, "/v1/completions", {"prompt": "x"}, Authorization=f"Bearer {ALICE}")[0] == 200


def test_deadlines_are_kept(small: House) -> None:
    """Guards deadlines while an answer is written and while it waits, in both protocols."""
    body = {"prompt": PROMPT, "max_tokens": 4000, "ignore_eos": True}
    headers = {"Authorization": f"Bearer {ALICE}", "X_Request_Timeout_Seconds": "0.4"}
    for num in (0, 2):
        with busy(small, num):
            status, _, answer = ask(small, "/v1/completions", body, **headers)
            assert (status, answer["error"]["code"]) == (504, "deadline_exceeded")
            with Client(small.grpc, api_key=ALICE, timeout=0.4) as hasty, pytest.raises(DeadlineExceeded):
                hasty.generate(PROMPT, LONG)
    status, _, answer = ask(small, "/v1/completions", body, **headers | {"X_Request_Timeout_Seconds": "-1"})
    assert status == 400


def test_abort_ends_a_request_of_the_same_key(small: House) -> None:
    """Guards Abort: it reaches what is written and what waits, of the own key only."""
    with busy(small, 3, ("request_id", "mine")) as calls, grpc.insecure_channel(small.grpc) as channel:
        stub = stub_of(channel)
        assert stub.Abort(pb.AbortRequest(request_id="mine"), metadata=bearer(BOB)).aborted == 0
        assert stub.Abort(pb.AbortRequest(request_id="other"), metadata=bearer(ALICE)).aborted == 0
        assert stub.Abort(pb.AbortRequest(request_id="mine"), metadata=bearer(ALICE)).aborted == 3
        for call in calls:
            with pytest.raises(grpc.RpcError) as caught:
                list(call)
            assert caught.value.code() is grpc.StatusCode.ABORTED


def test_requests_that_a_leaving_router_ends_go_on_elsewhere(small: House) -> None:
    """Guards long answers against rolling updates: what a router could not finish in time is no answer that somebody ended."""
    params, ending = SamplingParams(max_tokens=30, seed=1, ignore_eos=True), small.router.admission.abort_all
    with Client(small.grpc, api_key=ALICE, patience_s=0) as client:
        stream = client.stream(PROMPT, LONG)
        next(stream)
        small.loop.call_soon_threadsafe(ending)
        with pytest.raises(Unavailable, match="shutting down"):
            list(stream)
    with Client(small.grpc, api_key=ALICE) as client:
        expected, stream = client.generate(PROMPT, params), client.stream(PROMPT, params)
        pieces = [next(stream)]
        small.loop.call_soon_threadsafe(ending)
        pieces += stream
    assert "".join(piece.text for piece in pieces) == expected.text
    small.settle()


def test_too_much_is_refused_before_it_is_read(small: House) -> None:
    """Guards memory: bodies, messages and heads have a size, and must come in time."""
    key = {"Authorization": f"Bearer {ALICE}"}
    status, _, answer = ask(small, "/v1/completions", {"prompt": "x" * 5000}, **key)
    assert (status, answer["error"]["code"]) == (413, "too_large")
    host, port = small.url.removeprefix("http://").split(":")
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {ALICE}\r\n"
    for rest, words in (
        ("Transfer-Encoding: chunked\r\n\r\n" + ("800\r\n" + "x" * 2048 + "\r\n") * 4, b" 413 "),
        ("Content-Length: 99\r\n\r\nx", b" 504 "),
        ("X-Long: " + "x" * 100_000 + "\r\n\r\n", b" 400 "),
    ):
        with socket.create_connection((host, int(port)), timeout=LONG_S) as connection:
            connection.sendall((head + rest).encode())
            assert words in connection.recv(4096).split(b"\r\n")[0]
    with Client(small.grpc, api_key=ALICE) as client, pytest.raises(Overloaded):
        client.generate("x" * 5000)
    status, _, answer = ask(small, "/v1/completions", {"prompt": "x", "max_tokens": 4060}, **key)
    assert "at most 4050" in answer["error"]["message"]


def test_requests_are_logged_without_their_words(small: House, alice: Client, caplog: pytest.LogCaptureFixture) -> None:
    """Guards operators, to whom each request has one line, and users, whose words and keys are in none."""
    key = {"Authorization": f"Bearer {ALICE}"}
    with caplog.at_level(logging.DEBUG):
        answer = alice.generate(PROMPT, SamplingParams(max_tokens=12))
        ask(small, "/v1/completions", {"prompt": PROMPT, "temperature": -1}, **key)
        body = {"prompt": PROMPT, "max_tokens": 10, "ignore_eos": True, "n": 2}
        ask(small, "/v1/completions", body, X_Request_Id="my-request", **key)
        small.settle()
    for words in (PROMPT, answer.text, ALICE):
        assert words not in caplog.text
    _, record = [record for record in caplog.records if record.name == "deployments.access"]
    record_begins = "request_id=my-request key=alice outcomes=length answers=2 prompt_tokens=14 output_tokens=20 seconds="
    assert record.getMessage().startswith(record_begins)
    assert vars(record)["request_id"] == "my-request"


def test_health_and_reflection(small: House) -> None:
    """Guards probes and grpcurl: the standard services are there, open to all."""
    with grpc.insecure_channel(small.grpc) as channel:
        for service in ("", "cascade.v1.Cascade"):
            answer = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(service=service))
            assert answer.status == health_pb2.HealthCheckResponse.SERVING
        reflection = reflection_pb2_grpc.ServerReflectionStub(channel)
        request = reflection_pb2.ServerReflectionRequest(file_containing_symbol="cascade.v1.Cascade")
        [response] = reflection.ServerReflectionInfo(iter([request]))
        assert response.file_descriptor_response.file_descriptor_proto


HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"


def test_slow_readers_are_slowed_then_dropped() -> None:
    """Guards memory and tiers against clients that stop reading: the full tier stalls, then the request is over."""
    with house(pass_s=0.0, limits={"read_timeout_s": 1.0}) as served:
        host, port = served.url.removeprefix("http://").split(":")
        body = b'{"prompt": "x", "max_tokens": 4000, "n": 16, "stream": true, "ignore_eos": true, "history": true}'
        with socket.socket() as reader:
            reader.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            reader.connect((host, int(port)))
            reader.sendall(HEAD % len(body) + body)
            assert reader.recv(12) == b"HTTP/1.1 200"
            places = served.router.admission.places
            wait_until(lambda: places.num_admitted == 0)
            written = served.net.nodes["full"].tier.stats.own_tokens
            assert written < 16 * 4000
            served.settle()
        with grpc.insecure_channel(served.grpc, options=SMALL_WINDOW) as channel:
            request = pb.GenerateRequest(prompt="x", sampling=pb.Sampling(max_tokens=4000, seed=1, ignore_eos=True))
            calls = [stub_of(channel).Generate(request) for _ in range(2)]
            wait_until(lambda: places.num_admitted > 0)
            wait_until(lambda: places.num_admitted == 0)
            with Client(served.grpc) as client:
                assert client.generate("x", SamplingParams(max_tokens=4)).token_ids
            ends = []
            for call in calls:
                with contextlib.suppress(grpc.RpcError):
                    list(call)
                ends.append(call.code())
            assert grpc.StatusCode.ABORTED in ends
            served.settle()


def test_drain_closes_the_doors_and_lets_answers_end() -> None:
    """Guards rolling updates: what is being written is finished, and nobody comes in, on old connections neither."""
    with house(pass_s=0.005) as served, Client(served.grpc) as client, grpc.insecure_channel(served.grpc) as channel:
        params = SamplingParams(max_tokens=40, seed=3, ignore_eos=True)
        expected = client.generate(PROMPT, params).text
        host, port = served.url.removeprefix("http://").split(":")
        idle = socket.create_connection((host, int(port)), timeout=LONG_S)
        watched = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest())
        assert next(watched).status == health_pb2.HealthCheckResponse.SERVING
        stream = client.stream(PROMPT, params)
        pieces = [next(stream)]
        drained = threading.Thread(target=lambda: served.call(served.router.drain()))
        drained.start()
        wait_until(lambda: served.router.admission.places.closed)
        assert next(watched).status == health_pb2.HealthCheckResponse.NOT_SERVING
        assert idle.recv(1) == b""
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection((host, int(port)), timeout=LONG_S)
        with Client(served.grpc, patience_s=0) as late, pytest.raises(Unavailable, match="No server answers"):
            late.generate(PROMPT, params)
        pieces += stream
        assert "".join(piece.text for piece in pieces) == expected
        drained.join(LONG_S)  # whoever watches its health does not keep it
        assert not drained.is_alive()
        idle.close()


def test_clients_of_a_router_that_drains_go_to_another() -> None:
    """Guards routers that share their ports: while one drained, calls on kept connections and half of the new ones failed."""
    params, over = SamplingParams(max_tokens=4, seed=1), threading.Event()
    with house(pass_s=0.001) as near, house(listen=near.router._config.router.listen.model_dump(), pass_s=0.001) as other:

        def keep_asking(_: int) -> int:
            with Client(near.grpc, timeout=LONG_S) as client:
                return sum(len(client.generate(PROMPT, params).token_ids) > 0 for _ in iter(over.is_set, True))

        with ThreadPoolExecutor(4) as threads:
            counts = threads.map(keep_asking, range(4))
            busiest = near.router.admission.places
            wait_until(lambda: busiest.num_admitted > 0 or other.router.admission.places.num_admitted > 0)
            near.call(near.router.drain())
            for _ in range(8):
                assert ask(near, "/health")[0] == 200
            over.set()
            assert all(counts)
        other.settle()


# what a key may ask for and what it gets: priorities, shares, limits that routers keep together


CAROL = "carol-0123456789abcdef"
SHORT = SamplingParams(max_tokens=4, temperature=1.0, seed=1, ignore_eos=True)
OF_BOB = {"min_priority": -5, "weight": 3.0, "max_running": 7, "tokens_per_minute": 100_000}


keyed = serving(env={"TENANT_KEYS": f"alice={ALICE},bob={BOB}"}, access={"keys_env": "TENANT_KEYS", "limits": {"bob": OF_BOB}})


@pytest.mark.parametrize(("key", "name", "soonest"), [(ALICE, "alice", 0), (BOB, "bob", -5)])
def test_a_key_goes_no_sooner_than_it_may(keyed: House, key: str, name: str, soonest: int) -> None:
    """Guards the others against a key that goes before all of them, over both protocols; what it may ask for is honoured."""
    sentence = f"priority is {soonest - 1}: requests of key {name} may ask for {soonest} and up, lower is served sooner"
    with Client(keyed.grpc, api_key=key) as client:
        assert client.generate("x", SHORT, handling=Handling(soonest)).token_ids
        messages = [{"role": "user", "content": "x"}]
        for call in (client.generate, lambda _, *args, **options: client.chat(messages, *args, **options)):
            with pytest.raises(PermissionDenied, match=sentence):
                call("x", SHORT, handling=Handling(soonest - 1))
    for path, body in (("completions", {"prompt": "x"}), ("chat/completions", {"messages": messages})):
        request = {**body, "max_tokens": 4, "priority": soonest - 1}
        status, _, answer = ask(keyed, f"/v1/{path}", request, Authorization=f"Bearer {key}")
        assert (status, answer["error"]["type"], answer["error"]["code"]) == (403, "permission_error", "permission_denied")
        assert answer["error"]["message"] == sentence


def test_a_key_is_told_its_limits(keyed: House) -> None:
    """Guards clients against finding out by being refused, in both protocols."""
    with Client(keyed.grpc, api_key=BOB) as bob, Client(keyed.grpc, api_key=ALICE) as alice:
        assert bob.describe().key == KeyInfo("bob", -5, 3.0, 7, 100_000)
        assert alice.describe().key == KeyInfo("alice", 0)
    for path in ("/v1/models", f"/v1/models/{keyed.model}"):
        answer = ask(keyed, path, Authorization=f"Bearer {BOB}")[2]
        assert answer.get("data", [answer])[0]["key"] == {"name": "bob", **OF_BOB, "train": True}


crowded = serving(
    env={"CROWD_KEYS": f"alice={ALICE},bob={BOB},carol={CAROL}"},
    pass_s=0.001,
    max_running=1,
    max_waiting=80,
    access={"keys_env": "CROWD_KEYS", "limits": {"bob": {"weight": 3.0, "min_priority": -1000}}},
)


async def in_order(built: House, requests: Sequence[tuple[str, int]]) -> list[tuple[str, int]]:
    """Requests of keys, with priorities, which come in this order and all wait before one is served; in that of their ends."""
    ended, tasks = list[tuple[str, int]](), list[asyncio.Task[None]]()

    async def ask_as(client: AsyncClient, key: str, priority: int) -> None:
        await client.generate("x", SHORT, handling=Handling(priority))
        ended.append((key, priority))

    async with contextlib.AsyncExitStack() as stack:
        keys = {CAROL, *(key for key, _ in requests)}
        clients = {key: await stack.enter_async_context(AsyncClient(built.grpc, api_key=key)) for key in keys}
        first = clients[CAROL].stream("x", LONG)  # has the turn
        await anext(first)
        for key, priority in requests:
            tasks.append(asyncio.create_task(ask_as(clients[key], key, priority)))
            await until(lambda: built.router.admission.places.num_waiting == len(tasks))
        await first.aclose()
        await asyncio.gather(*tasks)
    return ended


def test_keys_share_by_weight_where_requests_wait(crowded: House) -> None:
    """Guards a key against another one's crowd, which came first: three times the weight, three times the tokens."""
    ended = asyncio.run(in_order(crowded, [(ALICE, 0)] * 16 + [(BOB, 0)] * 16))
    shares = [ended[:size].count((BOB, 0)) / size for size in (16, 20)]
    assert all(0.75 - 2 / 16 <= share <= 0.75 + 2 / 16 for share in shares), shares


def test_priorities_order_a_keys_own_where_they_wait(crowded: House) -> None:
    """Guards urgent requests against those of their own key: the router's queue knew no priorities."""
    ended = asyncio.run(in_order(crowded, [(BOB, 100 * priority) for priority in (0, 3, -3, 0, -9)]))
    assert [priority for _, priority in ended] == [-900, -300, 0, 0, 300]
