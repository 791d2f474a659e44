"""A server that answers as told, and clients of it that do not ask again."""

from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor

import grpc
import pytest

from cascade.client import AsyncClient, Client
from cascade.v1 import serving_pb2_grpc
from tests.client.canned import Canned


@pytest.fixture
def server() -> Iterator[Canned]:
    canned = Canned()
    with ThreadPoolExecutor(4) as pool:
        server = grpc.server(pool)
        serving_pb2_grpc.add_CascadeServicer_to_server(canned, server)
        canned.address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
        server.start()
        yield canned
        server.stop(0).wait()


@pytest.fixture
def client(server: Canned) -> Iterator[Client]:
    with Client(server.address, patience_s=0) as client:
        yield client


@pytest.fixture
async def async_client(server: Canned) -> AsyncIterator[AsyncClient]:
    async with AsyncClient(server.address, patience_s=0) as client:
        yield client
