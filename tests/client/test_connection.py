"""The clients' connection to a server that answers as told: errors, deadlines, addresses, hosts that vanish, cancellation."""

import asyncio
import contextlib
import socket
import time
from typing import Any

import grpc
import pytest

from cascade import CascadeError, ConfigError, Unavailable
from cascade.client import AsyncClient, Client
from cascade.client.connection import CHANNEL_OPTIONS, NO_KEY, is_near
from cascade.errors import KINDS, DeadlineExceeded, Unauthenticated
from tests.client.canned import Canned
from tests.client.conftest import ways
from tests.links.net import relay
from tests.waiting import LONG_S, until

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
