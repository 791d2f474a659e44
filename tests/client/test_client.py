"""The clients against a server that answers as told: requests, answers, errors, addresses, hosts that vanish, cancellation."""

import asyncio
import contextlib
import socket
import time
from dataclasses import fields
from typing import Any

import grpc
import pytest

from cascade import CascadeError, Completion, ConfigError, InvalidRequest, SamplingParams, Speculation, Structured, Unavailable
from cascade.client import AsyncClient, Client
from cascade.client.connection import CHANNEL_OPTIONS, NO_KEY, is_near
from cascade.client.exchange import encode_request
from cascade.client.wire import decode_handling, decode_sampling, decode_speculation
from cascade.errors import KINDS, DeadlineExceeded, Unauthenticated
from cascade.messages import Edge, Logprobs, origin
from cascade.params import Handling
from cascade.v1 import serving_pb2 as pb
from tests.client.conftest import FINISH, TOKENS, Canned, ways
from tests.links.net import relay
from tests.waiting import LONG_S, until


def check(completion: Completion | None) -> None:
    """The completion is what the server said, all of it."""
    assert (completion.text, completion.token_ids) == ("abc", (11, 12, 13))
    assert (completion.finish_reason, completion.seed) == ("length", 7)
    assert (completion.stats.prompt_tokens, completion.stats.completion_tokens) == (4, 3)
    assert completion.stats.edges == (Edge("tiny", "full", 2, 3, 1, 3, 0.25, [1]),)
    assert (completion.stats.first_token_s, completion.stats.undrafted) == (0.125, "late")
    assert completion.origins == bytes([origin(0), origin(1, replaced=0), origin(1)])
    assert completion.logprobs == (Logprobs(-0.5, ((11, -0.5), (9, -1.0))), Logprobs(0.0), Logprobs(-2.0, ((8, -0.25),)))


# answers


async def test_answers_arrive_whole(connect: Any, server: Canned) -> None:
    """Guards against fields that a client forgets, and answers against differing: whole or streamed, of either client."""
    async with connect(server.address) as client:
        check(await client.generate("p"))
        chunks = [chunk async for chunk in client.stream([1, 2])]
    assert [(chunk.text, chunk.token_ids, chunk.ends) for chunk in chunks] == [("a", (11,), (1,)), ("bc", (12, 13), (2, 3))]
    assert chunks[0].completion is None
    assert chunks[1].origins == bytes([origin(1, replaced=0), origin(1)])
    assert chunks[0].logprobs + chunks[1].logprobs == chunks[1].completion.logprobs
    check(chunks[-1].completion)


async def test_describe(connect: Any, server: Canned) -> None:
    """Guards against fields in the wrong place."""
    async with connect(server.address) as client:
        info = await client.describe()
    assert (info.max_model_len, info.window, info.version, info.branches) == (64, 16, "1.2.3", 8)
    [tier] = info.tiers
    assert (tier.name, tier.model, tier.replicas, tier.sessions) == ("full", "toy", 2, 3)
    assert (tier.context_len, tier.vocab_size, tier.parameters, tier.device) == (64, 32, 2**40, "cpu")
    assert tier.worth == (("tiny", True, 4, 1.25),)


async def test_answers_may_be_large(connect: Any, server: Canned) -> None:
    """Guards long answers with log-probabilities: more than gRPC's 4 MiB were refused by the client, as overload."""
    text = "x" * 5 * 2**20
    server.pieces = [pb.GenerateResponse(text=text, tokens=TOKENS, finish=FINISH)]
    async with connect(server.address) as client:
        assert (await client.generate("p")).text == text


# requests

STRUCTURED = (
    Structured(json_schema={"type": "integer"}),
    Structured(json_object=True),
    Structured(regex="a+"),
    Structured(choice=("a", "b")),
    Structured(grammar='start: "a"'),
)


def test_requests_say_everything(server: Canned) -> None:
    """Guards against parameters that the client drops or that arrive as others, each kind of structured output among them."""
    shape: dict[str, Any] = {"logit_bias": {7: -1.5, 3: 100}, "min_tokens": 2, "logprobs": 0, "prompt_logprobs": 3}
    penalties = {"presence_penalty": -0.5, "frequency_penalty": 0.25, "repetition_penalty": 1.5}
    params = SamplingParams(5, 0.5, 3, 0.25, 0.125, 2**63 - 1, ("x", "y"), (1, 2), True, **penalties, **shape)
    speculation, handling = Speculation(tiers=("tiny",), window=4, branches=2), Handling(-3, "mine")
    with Client(server.address, application="mine") as client:
        client.generate([1, 2**32 - 1], params, speculation, handling)
    [request] = server.requests
    assert server.metadata["application"] == "mine"
    assert list(request.token_ids.ids) == [1, 2**32 - 1]
    sent = {kind.name for kind, _ in request.sampling.ListFields()}
    assert (
        sent
        == set(pb.Sampling.DESCRIPTOR.fields_by_name) - {"structured"}
        == {field.name for field in fields(params)} - {"structured"}
    )
    decoded = decode_sampling(request.sampling), decode_speculation(request.speculation), decode_handling(request)
    assert decoded == (params, speculation, handling)
    for kind in STRUCTURED:
        params = SamplingParams(structured=kind)
        assert decode_sampling(encode_request("p", params, None).sampling) == params


def test_what_is_not_set_is_not_nought() -> None:
    """Guards values that protobuf has no sign for: no tiers are not all tiers, and no seed is not 0."""
    unset = encode_request("p", None, Speculation())
    assert (unset.speculation.mode, list(unset.speculation.tiers)) == ("auto", [])
    assert not any(unset.speculation.HasField(name) for name in ("window", "branches"))
    assert not unset.sampling.HasField("seed")
    none = encode_request("", SamplingParams(seed=0), Speculation(tiers=(), branches=0))
    assert (none.speculation.mode, none.WhichOneof("input")) == ("off", "prompt")
    assert none.sampling.HasField("seed")
    assert decode_speculation(none.speculation) == Speculation("off", branches=0)
    assert encode_request([], None, None).WhichOneof("input") == "token_ids"


UNSAYABLE: list[tuple[tuple[Any, ...], str]] = [
    (([1, -1],), "token_ids: "),
    (([2**32],), "token_ids: "),
    (([1.5],), "token_ids: "),
    ((["a"],), "token_ids: "),
    ((b"abc",), "a prompt is a string or token ids, not bytes"),
    ((None,), "a prompt is a string or token ids, not None"),
    ((5,), "token_ids: "),
    (("a\ud800",), "prompt: "),
    (([1], SamplingParams(stop_token_ids=(2**32,))), "stop_token_ids: .*4294967296"),
    (([1], SamplingParams(max_tokens=2**32)), "max_tokens: .*4294967296"),
    (([1], {"temperature": 0}), "params is {'temperature': 0}: it must be a `SamplingParams`"),
    (([1], None, {"mode": "off"}), "speculation is {'mode': 'off'}: it must be a `Speculation`"),
    (([1], None, None, {}), "handling is {}: it must be a `Handling`"),
]


@pytest.mark.parametrize(("request_of", "words"), UNSAYABLE)
def test_what_cannot_be_said_is_refused(server: Canned, request_of: Any, words: str) -> None:
    """Guards users against errors of protobuf, which name no field, and against a prompt that arrives as another."""
    with Client(server.address) as client:
        for call in (client.generate, lambda *given: next(client.stream(*given))):
            with pytest.raises(InvalidRequest, match=f"cannot be sent: {words}"):
                call(*request_of)
    assert server.requests == []


@pytest.mark.parametrize(
    ("message", "words"),
    [
        ({"role": "user", "content": [{"type": "image_url"}]}, "type of a part is 'image_url': messages are"),
        ({"role": "assistant", "tool_calls": [{"id": "c1"}]}, "'function' is missing in a message, a call or a tool"),
    ],
)
def test_messages_that_cannot_be_said_are_named(server: Canned, message: Any, words: str) -> None:
    """Guards the sentence: it was the name of a key in quotes."""
    with Client(server.address) as client, pytest.raises(InvalidRequest, match=words):
        client.chat([message])


# errors


async def test_every_error_has_a_status_and_comes_back(connect: Any, server: Canned) -> None:
    """Guards users against having to know gRPC, and clients that came again after one second, whatever the server said."""
    async with connect(server.address, patience_s=0) as client:
        for kind in KINDS:
            server.status = grpc.StatusCode[kind.grpc]
            nearest = next(base for base in kind.__mro__ if "grpc" in vars(base))
            sentence = NO_KEY if kind is Unauthenticated else "one sentence"
            for call in ways(client):
                with pytest.raises(CascadeError, match=f"^{sentence}$") as caught:
                    await call()
                assert type(caught.value) is nearest
                assert getattr(caught.value, "retry_after_s", 7) == 7


async def test_deadline(connect: Any, server: Canned) -> None:
    """Guards the deadline of a request: it holds for streams that have begun too."""
    server.silent = True
    async with connect(server.address, timeout=0.3) as client:
        with pytest.raises(DeadlineExceeded):
            await client.generate("p")
        pieces = client.stream("p")
        assert (await anext(pieces)).text == "a"
        with pytest.raises(DeadlineExceeded):
            await anext(pieces)


async def test_keys_come_from_the_environment(connect: Any, server: Canned, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards scripts that name no key, and servers that must not get it: the variable is sent unless a key is given."""
    monkeypatch.setenv("CASCADE_API_KEY", "of-the-environment")
    for key, sent in ((None, "Bearer of-the-environment"), ("mine-0123456789", "Bearer mine-0123456789"), ("", None)):
        async with connect(server.address, api_key=key) as client:
            await client.generate("p")
        assert server.metadata.get("authorization") == sent


def test_what_no_call_can_carry_is_refused() -> None:
    """Guards users against gRPC's words for a header that it cannot send, and for the address of the HTTP API."""
    for key in ("schlüssel-0123456789", "two\nlines-0123456789"):
        with pytest.raises(ConfigError, match="api_key has characters"):
            AsyncClient("127.0.0.1:1", api_key=key)
    for address in ("http://127.0.0.1:8000", "grpc://127.0.0.1:9000"):
        with pytest.raises(ConfigError, match="give HOST:PORT of its gRPC endpoint"):
            Client(address)
    with pytest.raises(ConfigError, match="address is 'localhost', which names no port: give HOST:PORT, as localhost:9000"):
        Client("localhost")
    for address in ("127.0.0.1:99999", "grpcs://host:0"):  # such a port was taken modulo 65,536
        with pytest.raises(ConfigError, match="give a port from 1 to 65535"):
            Client(address)
    with pytest.raises(ConfigError, match="address is an empty list"):
        Client([])


async def test_unreachable_server(connect: Any) -> None:
    """Guards against waiting for ever, or for gRPC's error, where nobody listens."""
    async with connect("127.0.0.1:1", patience_s=0.2) as client:
        for call in ways(client):
            with pytest.raises(Unavailable, match="No server answers at the client's address"):
                await call()


# hosts that vanish


def quick(monkeypatch: pytest.MonkeyPatch, **sooner: int) -> None:
    """Channels with options of other values."""
    changed = {f"grpc.{name}": value for name, value in sooner.items()}
    assert changed.keys() <= dict(CHANNEL_OPTIONS).keys()
    options = [(name, changed.get(name, value)) for name, value in CHANNEL_OPTIONS]
    monkeypatch.setattr("cascade.client.connection.CHANNEL_OPTIONS", options)


async def test_hosts_that_are_gone_are_not_waited_for(server: Canned, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards clients of several routers: at the address of a machine without power gRPC waited for 20 s."""
    quick(monkeypatch, min_reconnect_backoff_ms=500)
    with socket.create_server(("127.0.0.1", 0), backlog=0) as silent, contextlib.ExitStack() as stack:
        for _ in range(4):  # the kernel answers no more than these
            filling = stack.enter_context(socket.socket())
            filling.setblocking(False)
            filling.connect_ex(silent.getsockname())
        gone = f"127.0.0.1:{silent.getsockname()[1]}"
        async with AsyncClient([server.address, gone], timeout=LONG_S) as client:
            began = time.monotonic()
            assert [(await client.generate("p")).text for _ in range(2)] == ["abc", "abc"]
            assert time.monotonic() - began < 15


async def test_host_that_vanishes_ends_the_call(server: Canned, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against waiting for ever for a host that is gone without a word: nothing is sent that could fail."""
    quick(monkeypatch, **{"keepalive_time_ms": 250, "http2.ping_timeout_ms": 250})
    server.silent = True
    async with relay(server.address) as (address, die), AsyncClient(address, patience_s=0) as client:
        chunks = client.stream("p")
        assert (await anext(chunks)).text == "a"
        die()
        with pytest.raises(Unavailable):
            await asyncio.wait_for(anext(chunks), LONG_S)


# cancellation


async def test_closed_stream_ends_the_request(connect: Any, server: Canned) -> None:
    """Guards the server against working for a client that has read enough."""
    server.silent = True
    async with connect(server.address) as client:
        pieces = client.stream("p")
        assert (await anext(pieces)).text == "a"
        assert not server.left.is_set()
        await pieces.aclose()
        assert await asyncio.to_thread(server.left.wait, LONG_S)


async def test_a_closed_client_says_so(connect: Any, server: Canned) -> None:
    """Guards tasks that still read: asyncio took them for cancelled, though nobody had, or they got gRPC's own errors."""
    server.silent = True
    async with connect(server.address) as client:
        pieces = client.stream("p")
        assert (await anext(pieces)).text == "a"
        reading = asyncio.create_task(anext(pieces))
        await asyncio.sleep(0)  # so that it reads
    with pytest.raises(Unavailable, match="The client was closed"):
        await reading
    for call in ways(client):
        with pytest.raises(Unavailable, match="The client was closed"):
            await call()


@pytest.mark.parametrize("streams", [False, True])
async def test_cancelled_task_ends_the_request(server: Canned, streams: bool) -> None:
    """Guards cancellation of tasks: it stays asyncio's, and reaches the server."""
    server.silent = True
    async with AsyncClient(server.address) as client:

        async def read() -> None:
            if not streams:
                await client.generate("p")
            async for _ in client.stream("p"):
                pass

        task = asyncio.create_task(read())
        await until(lambda: server.requests)
        await asyncio.sleep(0.05)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert await asyncio.to_thread(server.left.wait, LONG_S)


# proxies


async def test_proxies_for_the_web_are_not_for_near_servers(
    connect: Any, server: Canned, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards clients where http_proxy is set, as in many companies: a server on the same machine was asked for at the proxy."""
    for name in ("http_proxy", "https_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    for name in ("no_proxy", "no_grpc_proxy", "grpc_proxy"):
        monkeypatch.delenv(name, raising=False)
    async with connect(server.address, timeout=LONG_S) as client:
        assert (await client.generate("p")).text == "abc"
    monkeypatch.setenv("grpc_proxy", "http://127.0.0.1:9")  # which is meant for us
    async with connect(server.address, patience_s=0) as client:
        with pytest.raises(CascadeError):
            await client.generate("p")


def test_near_servers_are_known() -> None:
    """Guards the choice above: addresses of this machine and of private networks, names without a public domain."""
    near = ("127.0.0.1", "[::1]", "10.1.2.3", "dns:///192.168.0.7", "localhost", "cascade-serve-svc", "head.local")
    far = ("8.8.8.8", "[2001:4860:4860::8888]", "models.example.com")
    assert [host for host in (*near, *far) if is_near(f"{host}:9000")] == [*near]
