"""A server that answers as told, and both clients, asked in the same way."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import grpc
import pytest

from cascade.client import AsyncClient, Client
from cascade.client.rpc import handlers_of
from tests.client.canned import Canned


class InThreads:
    """A `Client` that is asked as an `AsyncClient` is."""

    def __init__(self, *args: Any, **options: Any) -> None:
        self._client = Client(*args, **options)

    def __getattr__(self, name: str) -> Callable[..., Any]:
        method = getattr(self._client, name)
        if "stream" in name:
            return lambda *args, **options: self._pieces(method(*args, **options))
        return lambda *args, **options: asyncio.to_thread(method, *args, **options)

    async def _pieces(self, pieces: Any) -> AsyncIterator[Any]:
        try:
            while (piece := await asyncio.to_thread(next, pieces, None)) is not None:
                yield piece
        finally:
            pieces.close()

    async def __aenter__(self) -> "InThreads":
        return self

    async def __aexit__(self, *error: object) -> None:
        self._client.close()


@pytest.fixture(params=[InThreads, AsyncClient], ids=["Client", "AsyncClient"])
def connect(request: pytest.FixtureRequest) -> Any:
    """Makes a client of either kind, as `AsyncClient` does."""
    return request.param


def ways(client: Any) -> list[Callable[[], Awaitable[object]]]:
    """Every way to ask."""
    return [lambda: client.generate("p"), lambda: anext(client.stream("p")), client.describe]


@pytest.fixture
def server() -> Iterator[Canned]:
    canned = Canned()
    with ThreadPoolExecutor(4) as pool:
        server = grpc.server(pool)
        late = {name: lambda *of, name=name: getattr(canned, name)(*of) for name in ("Generate", "Describe")}  # as patched
        server.add_generic_rpc_handlers((handlers_of(SimpleNamespace(**late)),))
        canned.address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
        server.start()
        yield canned
        server.stop(0).wait()
