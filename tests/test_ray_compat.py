"""What is done to Ray Serve behind its public interfaces: that it works, and that the Ray which is installed still needs it.

A test that is called *still* fails with the first Ray that does without: then that part of `deployments.ray_compat` may go.
"""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest
from ray import serve
from ray.exceptions import ActorDiedError
from ray.serve._private import proxy
from ray.serve._private.grpc_util import get_grpc_response_status
from ray.serve._private.http_util import get_http_response_status
from ray.serve.exceptions import DeploymentUnavailableError

from deployments import ray_compat
from tests.waiting import LONG_S

GONE = "The router of the answer has died: send the request again"
METHOD = "/cascade.v1.Cascade/Generate"


class Response:
    """A streaming Serve call that goes on for ever."""

    def __init__(self) -> None:
        self.num_cancels = 0

    def __aiter__(self) -> "Response":
        return self

    async def __anext__(self) -> bytes:
        return bytes(2**16)

    def cancelled(self) -> bool:
        return self.num_cancels > 0

    def cancel(self) -> None:
        self.num_cancels += 1


@pytest.fixture
def plain(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The class of the proxies as Ray has it; private, so this guards against new versions of Ray."""
    monkeypatch.setattr("ray.serve._private.proxy_response_generator.DeploymentResponseGenerator", Response)
    assert not issubclass(proxy.ProxyResponseGenerator, ray_compat._EndsWithItsCall)
    return proxy.ProxyResponseGenerator


@pytest.fixture
def generator(plain: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The same class as the proxies have it, put back behind the test."""
    monkeypatch.setattr(proxy, "ProxyResponseGenerator", plain)
    ray_compat.patch_proxies()
    ray_compat.patch_proxies()
    assert proxy.ProxyResponseGenerator.__mro__.count(ray_compat._EndsWithItsCall) == 1
    return proxy.ProxyResponseGenerator


async def left(generator: Any) -> Response:
    """What a client had asked for that left while it was written to, once the proxy's call is over."""
    response, ended = Response(), asyncio.Event()

    async def generate(request: bytes, context: Any) -> AsyncIterator[bytes]:
        try:
            async for piece in generator(response):
                yield piece
        finally:
            ended.set()

    server = grpc.aio.server()
    handler = grpc.unary_stream_rpc_method_handler(generate)
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("cascade.v1.Cascade", {"Generate": handler}),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        call = channel.unary_stream(METHOD)(b"")
        await call.read()
        await asyncio.sleep(0.2)  # nobody reads: flow control holds the server in a write
        assert not response.cancelled()
        call.cancel()
        async with asyncio.timeout(LONG_S):
            await ended.wait()
    await server.stop(0)
    return response


async def test_client_that_leaves_while_it_is_written_to_ends_its_request(generator: Any) -> None:
    """Guards against requests that go on for nobody: Ray's proxy misses clients that leave during a write."""
    assert (await left(generator)).num_cancels == 1


async def test_ray_still_misses_clients_that_leave(plain: Any) -> None:
    """Says when `patch_proxies` may go, with the next."""
    assert (await left(plain)).num_cancels == 0


async def test_ray_still_tells_clients_of_actors(plain: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Says when `RouterGone` may go."""
    monkeypatch.setattr(Response, "__anext__", die)
    with pytest.raises(ActorDiedError) as caught:
        await asyncio.create_task(anext(plain(Response())))
    assert "actor" in get_grpc_response_status(caught.value, None, "a-request").message


def test_ray_still_gives_deployments_no_version_of_their_own() -> None:
    """Says when `versioned` may go. What it does is in `tests/settings/test_versions.py`."""
    with pytest.raises(ValueError, match="version"):
        serve.deployment(Response, version="1")


async def die(self: Response) -> bytes:
    raise ActorDiedError


async def test_finished_requests_are_not_cancelled(generator: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards finished requests against a cancel that comes with the end of their call."""

    async def end(self: Response) -> bytes:
        raise StopAsyncIteration

    monkeypatch.setattr(Response, "__anext__", end)
    response = Response()

    async def call() -> list[bytes]:
        return [piece async for piece in generator(response)]

    assert await asyncio.create_task(call()) == []
    await asyncio.sleep(0)
    assert not response.cancelled()


async def test_routers_that_are_gone_are_told_plainly(generator: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards clients of a router that was killed, or ran out of time to end: they were told of dead actors."""

    monkeypatch.setattr(Response, "__anext__", die)
    with pytest.raises(DeploymentUnavailableError) as caught:
        await asyncio.create_task(anext(generator(Response())))
    grpc_status = get_grpc_response_status(caught.value, None, "a-request")
    assert (grpc_status.code, grpc_status.message) == (grpc.StatusCode.UNAVAILABLE, GONE)
    http_status = get_http_response_status(caught.value, None, "a-request")
    assert (http_status.code, http_status.message) == (503, GONE)
