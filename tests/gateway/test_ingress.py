"""What runs in Ray Serve's proxies, without a cluster: requests end with the call of their client."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest
from ray.exceptions import ActorDiedError
from ray.serve._private import proxy
from ray.serve._private.grpc_util import get_grpc_response_status
from ray.serve._private.http_util import get_http_response_status
from ray.serve.exceptions import DeploymentUnavailableError

from deployments.gateway.grpc import ingress
from tests.waiting import LONG_S

GONE = "The router that wrote the answer is gone: ask again"
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
def generator(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Ray's class as the proxies have it, put back behind the test; private, so this guards against new versions of Ray."""
    monkeypatch.setattr(proxy, "ProxyResponseGenerator", proxy.ProxyResponseGenerator)
    monkeypatch.setattr("ray.serve._private.proxy_response_generator.DeploymentResponseGenerator", Response)
    ingress.patch_proxies()
    ingress.patch_proxies()
    assert proxy.ProxyResponseGenerator.__mro__.count(ingress._EndsWithItsCall) == 1
    return proxy.ProxyResponseGenerator


async def test_client_that_leaves_while_it_is_written_to_ends_its_request(generator: Any) -> None:
    """Guards against requests that go on for nobody: Ray's proxy misses clients that leave during a write."""
    response = Response()

    async def generate(request: bytes, context: Any) -> AsyncIterator[bytes]:
        async for piece in generator(response):
            yield piece

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
            while not response.cancelled():
                await asyncio.sleep(0.01)
    await server.stop(0)
    assert response.num_cancels == 1


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

    async def die(self: Response) -> bytes:
        raise ActorDiedError

    monkeypatch.setattr(Response, "__anext__", die)
    with pytest.raises(DeploymentUnavailableError) as caught:
        await asyncio.create_task(anext(generator(Response())))
    grpc_status = get_grpc_response_status(caught.value, None, "a-request")
    assert (grpc_status.code, grpc_status.message) == (grpc.StatusCode.UNAVAILABLE, GONE)
    http_status = get_http_response_status(caught.value, None, "a-request")
    assert (http_status.code, http_status.message) == (503, GONE)
