"""A server that answers as told, and both clients, asked in the same way."""

import asyncio
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import grpc
import pytest

from cascade.client import AsyncClient, Client
from cascade.client.rpc import handlers_of
from cascade.v1 import serving_pb2 as pb
from tests.waiting import LONG_S

COUNTS = {"passes": 2, "proposed": 3, "accepted": 1, "emitted": 3, "mean_accepted_len": 1.5, "waited_s": 0.25}
EDGE = pb.Edge(drafter="tiny", verifier="full", accepted_by_position=[1], **COUNTS)
FINISH = pb.Finish(
    reason="length", seed=7, prompt_tokens=4, completion_tokens=3, edges=[EDGE], first_token_s=0.125, undrafted="late"
)
TOKENS = [
    pb.Token(id=11, level=0, end=1, logprob=-0.5, top=[pb.TopToken(id=11, logprob=-0.5), pb.TopToken(id=9, logprob=-1.0)]),
    pb.Token(id=12, level=1, replaced=0, end=2, logprob=0.0),
    pb.Token(id=13, level=1, end=3, logprob=-2.0, top=[pb.TopToken(id=8, logprob=-0.25)]),
]
PIECES = [pb.GenerateResponse(text="a", tokens=TOKENS[:1]), pb.GenerateResponse(text="bc", tokens=TOKENS[1:], finish=FINISH)]
TIER = pb.Tier(name="full", model="toy", replicas=2, sessions=3, context_len=64, vocab_size=32, parameters=2**40, device="cpu")
TIER.worth.add(drafter="tiny", sampled=True, num_sessions=4, factor=1.25)


@dataclass
class Canned:
    """Answers its ``pieces``, a status, or one piece and then nothing."""

    status: grpc.StatusCode | None = None
    silent: bool = False
    hasty: bool = False  # end streams before their text
    pieces: list[pb.GenerateResponse] = field(default_factory=lambda: PIECES)
    requests: list[pb.GenerateRequest] = field(default_factory=list)
    metadata: dict[str, Any] = field(default_factory=dict)
    left: threading.Event = field(default_factory=threading.Event)  # the client is gone
    address: str = ""

    def Generate(self, request: pb.GenerateRequest, context: grpc.ServicerContext) -> Iterator[pb.GenerateResponse]:
        self._note(request, context)
        gone = self._watch(context)  # before the first piece: after it, a client that is gone ends this generator
        if self.silent:
            yield PIECES[0]
            gone.wait(LONG_S)
            return
        yield from self.pieces[:1] if self.hasty else self.pieces

    def Describe(self, request: pb.DescribeRequest, context: grpc.ServicerContext) -> pb.DescribeResponse:
        self._note(None, context)
        return pb.DescribeResponse(tiers=[TIER], max_model_len=64, window=16, version="1.2.3", branches=8)

    def _watch(self, context: grpc.ServicerContext) -> threading.Event:
        gone = threading.Event()

        def leave() -> None:
            gone.set()
            self.left.set()

        if not context.add_callback(leave):
            leave()  # it is over already
        return gone

    def _note(self, request: pb.GenerateRequest | None, context: grpc.ServicerContext) -> None:
        self.metadata = {item.key: item.value for item in context.invocation_metadata()}
        if request is not None:
            self.requests.append(request)
        if self.status is not None:
            context.set_trailing_metadata((("retry-after", "7"),))
            context.abort(self.status, "one sentence")


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
