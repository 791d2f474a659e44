"""The client against a server that answers as told: what it asks for, what it makes of answers and of errors."""

import asyncio
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, fields
from typing import Any

import grpc
import pytest

from cascade import (
    CascadeError,
    Completion,
    ConfigError,
    InvalidRequest,
    ModelError,
    Overloaded,
    SamplingParams,
    Speculation,
    Structured,
    Unavailable,
)
from cascade.client import AsyncClient, Client, ServerInfo
from cascade.client.connection import CHANNEL_OPTIONS
from cascade.client.exchange import encode_request
from cascade.client.wire import decode_sampling
from cascade.errors import Aborted, DeadlineExceeded, NotFound, Unauthenticated
from cascade.messages import Edge, Logprobs, origin
from cascade.params import Handling
from cascade.v1 import serving_pb2 as pb
from cascade.v1 import serving_pb2_grpc
from tests.links.test_link import Relay

PATIENCE_S = 20.0

FINISH = pb.Finish(
    reason="length",
    seed=7,
    prompt_tokens=4,
    completion_tokens=3,
    edges=[
        pb.Edge(
            drafter="tiny",
            verifier="full",
            passes=2,
            proposed=3,
            accepted=1,
            emitted=3,
            mean_accepted_len=1.5,
            waited_s=0.25,
            accepted_by_position=[1],
        )
    ],
    first_token_s=0.125,
    undrafted="late",
)
TOKENS = [
    pb.Token(id=11, level=0, end=1, logprob=-0.5, top=[pb.TopToken(id=11, logprob=-0.5), pb.TopToken(id=9, logprob=-1.0)]),
    pb.Token(id=12, level=1, corrected=True, end=2, logprob=0.0),
    pb.Token(id=13, level=1, end=3, logprob=-2.0, top=[pb.TopToken(id=8, logprob=-0.25)]),
]
PIECES = [
    pb.GenerateResponse(text="a", tokens=TOKENS[:1]),
    pb.GenerateResponse(text="bc", tokens=TOKENS[1:], finish=FINISH),
]
TIER = pb.Tier(name="full", model="toy", replicas=2, sessions=3, context_len=64, vocab_size=32, parameters=2**40, device="cpu")

STATUSES = [
    (grpc.StatusCode.INVALID_ARGUMENT, InvalidRequest),
    (grpc.StatusCode.RESOURCE_EXHAUSTED, Overloaded),
    (grpc.StatusCode.UNAVAILABLE, Unavailable),
    (grpc.StatusCode.DEADLINE_EXCEEDED, DeadlineExceeded),
    (grpc.StatusCode.FAILED_PRECONDITION, ModelError),
    (grpc.StatusCode.INTERNAL, CascadeError),
    (grpc.StatusCode.UNIMPLEMENTED, CascadeError),
    (grpc.StatusCode.NOT_FOUND, NotFound),
    (grpc.StatusCode.UNAUTHENTICATED, Unauthenticated),
    (grpc.StatusCode.ABORTED, Aborted),
]


@dataclass
class Canned(serving_pb2_grpc.CascadeServicer):
    """A fake server: remembers what it was asked, answers `PIECES`, a status, or one piece and then nothing."""

    status: grpc.StatusCode | None = None
    silent: bool = False
    hasty: bool = False  # end streams before their text
    text: str = "abc"  # of whole answers
    requests: list[pb.GenerateRequest] = field(default_factory=list)
    metadata: dict[str, Any] = field(default_factory=dict)
    left: threading.Event = field(default_factory=threading.Event)  # the client is gone
    address: str = ""

    def Generate(self, request: pb.GenerateRequest, context: grpc.ServicerContext) -> Iterator[pb.GenerateResponse]:
        self._note(request, context)
        gone = self._watch(context)  # before the first piece: behind it, a client that is gone ends this generator
        if self.silent:
            yield PIECES[0]
            gone.wait(PATIENCE_S)
            return
        yield from PIECES[:1] if self.hasty else PIECES

    def Complete(self, request: pb.GenerateRequest, context: grpc.ServicerContext) -> pb.CompleteResponse:
        self._note(request, context)
        if self.silent:
            self._watch(context).wait(PATIENCE_S)
        return pb.CompleteResponse(text=self.text, tokens=TOKENS, finish=FINISH)

    def Describe(self, request: pb.DescribeRequest, context: grpc.ServicerContext) -> pb.DescribeResponse:
        self._note(None, context)
        return pb.DescribeResponse(tiers=[TIER], max_model_len=64, window=16, version="1.2.3")

    def _watch(self, context: grpc.ServicerContext) -> threading.Event:
        """Set, as `left`, when the call is over."""
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
    with Client(server.address) as client:
        yield client


@pytest.fixture
async def async_client(server: Canned) -> AsyncIterator[AsyncClient]:
    async with AsyncClient(server.address) as client:
        yield client


def check(completion: Completion | None) -> None:
    """The completion is what the server said, all of it."""
    assert completion is not None
    assert (completion.text, completion.token_ids) == ("abc", (11, 12, 13))
    assert (completion.finish_reason, completion.seed) == ("length", 7)
    assert (completion.stats.prompt_tokens, completion.stats.completion_tokens) == (4, 3)
    assert completion.stats.edges == (Edge("tiny", "full", 2, 3, 1, 3, 0.25, (1,)),)
    assert (completion.stats.first_token_s, completion.stats.undrafted) == (0.125, "late")
    assert completion.origins == bytes([origin(0, False), origin(1, True), origin(1, False)])
    assert completion.logprobs == (Logprobs(-0.5, ((11, -0.5), (9, -1.0))), Logprobs(0.0), Logprobs(-2.0, ((8, -0.25),)))


# answers


def test_answers_arrive_whole(client: Client) -> None:
    """Guards against fields that the client forgets, and whole answers against differing from streamed ones."""
    check(client.generate("p"))
    chunks = list(client.stream("p"))
    assert [(chunk.text, chunk.token_ids, chunk.ends) for chunk in chunks] == [("a", (11,), (1,)), ("bc", (12, 13), (2, 3))]
    assert chunks[0].completion is None
    assert chunks[1].origins == bytes([origin(1, True), origin(1, False)])
    assert chunks[0].logprobs + chunks[1].logprobs == chunks[1].completion.logprobs  # type: ignore[union-attr]
    check(chunks[-1].completion)


async def test_async_answers_arrive_whole(async_client: AsyncClient) -> None:
    """Guards the asynchronous client against drifting from the other."""
    check(await async_client.generate("p"))
    chunks = [chunk async for chunk in async_client.stream([1, 2])]
    assert "".join(chunk.text for chunk in chunks) == "abc"
    check(chunks[-1].completion)


async def test_describe(client: Client, async_client: AsyncClient) -> None:
    """Guards against fields in the wrong place."""
    info = client.describe()
    assert isinstance(info, ServerInfo)
    assert (info.max_model_len, info.window, info.version) == (64, 16, "1.2.3")
    [tier] = info.tiers
    assert (tier.name, tier.model, tier.replicas, tier.sessions) == ("full", "toy", 2, 3)
    assert (tier.context_len, tier.vocab_size, tier.parameters, tier.device) == (64, 32, 2**40, "cpu")
    assert await async_client.describe() == info


# requests


def test_requests_say_everything(server: Canned) -> None:
    """Guards against parameters that the client drops or that arrive as others."""
    shape: dict[str, Any] = {"logit_bias": {7: -1.5, 3: 100}, "min_tokens": 2, "logprobs": 0, "prompt_logprobs": 3}
    penalties = {"presence_penalty": -0.5, "frequency_penalty": 0.25, "repetition_penalty": 1.5}
    params = SamplingParams(5, 0.5, 3, 0.25, 0.125, 2**63 - 1, ("x", "y"), (1, 2), True, **penalties, **shape)
    with Client(server.address, application="mine") as client:
        speculation = Speculation(tiers=("tiny",), window=4, schedule="lockstep")
        client.generate([1, 2**32 - 1], params, speculation, Handling(-3, "mine"))
    [request] = server.requests
    assert server.metadata["application"] == "mine"
    assert list(request.token_ids.ids) == [1, 2**32 - 1]
    said = {kind.name for kind, _ in request.sampling.ListFields()}
    assert said == set(pb.Sampling.DESCRIPTOR.fields_by_name) - {"structured"}
    assert said == {one.name for one in fields(params)} - {"structured"}
    for name in said - {"stop", "stop_token_ids", "logit_bias"}:
        assert getattr(request.sampling, name) == getattr(params, name), name
    assert (list(request.sampling.stop), list(request.sampling.stop_token_ids)) == (["x", "y"], [1, 2])
    assert dict(request.sampling.logit_bias) == {7: -1.5, 3: 100}
    assert decode_sampling(request.sampling) == params
    speculation = request.speculation
    assert (speculation.mode, list(speculation.tiers)) == ("auto", ["tiny"])
    assert (speculation.window, speculation.schedule) == (4, "lockstep")
    assert (request.priority, request.cache_salt) == (-3, "mine")


@pytest.mark.parametrize(
    "structured",
    [
        Structured(json_schema={"type": "integer"}),
        Structured(json_object=True),
        Structured(regex="a+"),
        Structured(choice=("a", "b")),
        Structured(grammar='start: "a"'),
    ],
    ids=lambda structured: structured.kind,
)
def test_requests_say_what_a_text_has_to_be(structured: Structured) -> None:
    """Guards each kind of structured output against arriving as another, or not at all."""
    params = SamplingParams(structured=structured)
    assert decode_sampling(encode_request("p", params, None).sampling) == params


def test_no_tiers_is_not_all_tiers() -> None:
    """Guards the difference that a repeated field cannot say: no lower tiers at all, and all of them."""
    assert encode_request("p", None, Speculation(tiers=())).speculation.mode == "off"
    everything = encode_request("p", None, Speculation()).speculation
    assert (everything.mode, list(everything.tiers), everything.HasField("window")) == ("auto", [], False)


def test_no_seed_is_not_seed_0() -> None:
    """Guards random seeds: what is not set must not arrive as 0."""
    assert not encode_request("p", None, None).sampling.HasField("seed")
    assert encode_request("p", SamplingParams(seed=0), None).sampling.HasField("seed")
    assert encode_request("", None, None).WhichOneof("input") == "prompt"
    assert encode_request([], None, None).WhichOneof("input") == "token_ids"


UNSAYABLE = {
    "negative id": ([1, -1], None),
    "id of 33 bits": ([2**32], None),
    "id no integer": ([1.5], None),
    "ids no integers": (["a"], None),
    "bytes": (b"abc", None),
    "nothing": (None, None),
    "a number": (5, None),
    "lone surrogate": ("a\ud800", None),
    "lone surrogate in stop": ("a", SamplingParams(stop=("\udfff",))),
    "stop id of 33 bits": ([1], SamplingParams(stop_token_ids=(2**32,))),
    "max_tokens of 33 bits": ([1], SamplingParams(max_tokens=2**32)),
}


@pytest.mark.parametrize("kind", UNSAYABLE)
async def test_what_cannot_be_said_is_refused(client: Client, async_client: AsyncClient, server: Canned, kind: str) -> None:
    """Guards users against errors of protobuf, and against a prompt that arrives as another."""
    prompt: Any
    prompt, params = UNSAYABLE[kind]
    with pytest.raises(InvalidRequest, match="cannot be sent"):
        client.generate(prompt, params)
    with pytest.raises(InvalidRequest, match="cannot be sent"):
        next(client.stream(prompt, params))
    with pytest.raises(InvalidRequest, match="cannot be sent"):
        await async_client.generate(prompt, params)
    with pytest.raises(InvalidRequest, match="cannot be sent"):
        await anext(async_client.stream(prompt, params))
    assert server.requests == []


# errors


@pytest.mark.parametrize(("code", "kind"), STATUSES, ids=lambda value: getattr(value, "name", value.__class__.__name__))
async def test_status_becomes_the_librarys_error(
    client: Client, async_client: AsyncClient, server: Canned, code: grpc.StatusCode, kind: type[CascadeError]
) -> None:
    """Guards users against having to know gRPC: the library's error, the server's sentence, for every call."""
    server.status = code
    calls: list[Callable[[], object]] = [lambda: client.generate("p"), lambda: list(client.stream("p")), client.describe]
    for call in calls:
        with pytest.raises(CascadeError, match=r"^one sentence$") as caught:
            call()
        assert type(caught.value) is kind
        assert caught.value.__cause__ is None
    with pytest.raises(CascadeError, match=r"^one sentence$") as caught:
        await async_client.generate("p")
    assert type(caught.value) is kind
    with pytest.raises(CascadeError, match=r"^one sentence$") as caught:
        await anext(async_client.stream("p"))
    assert type(caught.value) is kind
    with pytest.raises(CascadeError, match=r"^one sentence$") as caught:
        await async_client.describe()
    assert type(caught.value) is kind


async def test_deadline(server: Canned) -> None:
    """Guards the deadline of a request: it holds for streams that have begun too."""
    server.silent = True
    with Client(server.address, timeout_s=0.3) as client:
        with pytest.raises(DeadlineExceeded):
            client.generate("p")
        chunks = client.stream("p")
        assert next(chunks).text == "a"
        with pytest.raises(DeadlineExceeded):
            next(chunks)
    async with AsyncClient(server.address, timeout_s=0.3) as async_client:
        with pytest.raises(DeadlineExceeded):
            await async_client.generate("p")
        pieces = async_client.stream("p")
        assert (await anext(pieces)).text == "a"
        with pytest.raises(DeadlineExceeded):
            await anext(pieces)


async def test_overload_says_when_to_come_again(client: Client, async_client: AsyncClient, server: Canned) -> None:
    """Guards clients that wait as long as they are told: the error said one second, whatever the server said."""
    server.status = grpc.StatusCode.RESOURCE_EXHAUSTED
    for call in (lambda: client.generate("p"), lambda: list(client.stream("p"))):
        with pytest.raises(Overloaded) as caught:
            call()
        assert caught.value.retry_after_s == 7
    with pytest.raises(Overloaded) as caught:
        await anext(async_client.stream("p"))
    assert caught.value.retry_after_s == 7


async def test_answers_may_be_large(client: Client, async_client: AsyncClient, server: Canned) -> None:
    """Guards long answers with log-probabilities: more than gRPC's 4 MiB were refused by the client, as overload."""
    server.text = "x" * 5 * 2**20
    assert client.generate("p").text == (await async_client.generate("p")).text == server.text


@pytest.mark.parametrize("key", ["schlüssel-0123456789", "two\nlines-0123456789"])
def test_keys_that_no_call_can_carry_are_refused(key: str) -> None:
    """Guards users against gRPC's words for a header that it cannot send."""
    for kind in (Client, AsyncClient):
        with pytest.raises(ConfigError, match="api_key has characters"):
            kind("127.0.0.1:1", api_key=key)


@pytest.mark.parametrize("address", ["http://127.0.0.1:8000", "grpc://127.0.0.1:9000"])
def test_addresses_of_another_door_are_refused(address: str) -> None:
    """Guards a slip between the two addresses that `cascade serve` prints: gRPC told of a hostname lookup."""
    with pytest.raises(ConfigError, match="give HOST:PORT of the server's gRPC door"):
        Client(address)


async def test_unreachable_server() -> None:
    """Guards against waiting for ever, or for gRPC's error, where nobody listens."""
    with Client("127.0.0.1:1") as client:
        with pytest.raises(Unavailable, match="No server answers at the client's address"):
            client.generate("p")
        with pytest.raises(Unavailable):
            list(client.stream("p"))
        with pytest.raises(Unavailable):
            client.describe()
    async with AsyncClient("127.0.0.1:1") as async_client:
        with pytest.raises(Unavailable):
            await async_client.generate("p")
        with pytest.raises(Unavailable):
            await anext(async_client.stream("p"))
        with pytest.raises(Unavailable):
            await async_client.describe()


async def test_host_that_vanishes_ends_the_call(server: Canned, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against waiting for ever for a host that is gone without a word: nothing is sent that could fail."""
    sooner = {"grpc.keepalive_time_ms": 250, "grpc.http2.ping_timeout_ms": 250}
    quick = [(name, sooner.get(name, value)) for name, value in CHANNEL_OPTIONS]
    monkeypatch.setattr("cascade.client.connection.CHANNEL_OPTIONS", quick)
    server.silent = True
    async with Relay(server.address) as relay, AsyncClient(relay.address) as client:
        chunks = client.stream("p")
        assert (await anext(chunks)).text == "a"
        relay.die()
        with pytest.raises(Unavailable):
            await asyncio.wait_for(anext(chunks), PATIENCE_S)


def test_pings_are_rarer_than_servers_bear() -> None:
    """Guards calls that wait long: gRPC's servers break the connection off at the third ping within five minutes of another."""
    assert dict(CHANNEL_OPTIONS)["grpc.keepalive_time_ms"] > 5 * 60 * 1000


# cancellation


def test_closed_stream_ends_the_request(client: Client, server: Canned) -> None:
    """Guards the server against working for a client that has read enough."""
    server.silent = True
    chunks = client.stream("p")
    assert next(chunks).text == "a"
    assert not server.left.is_set()
    chunks.close()  # type: ignore[attr-defined]
    assert server.left.wait(PATIENCE_S)


async def test_closed_async_stream_ends_the_request(async_client: AsyncClient, server: Canned) -> None:
    """Guards the same for event loops."""
    server.silent = True
    chunks = async_client.stream("p")
    assert (await anext(chunks)).text == "a"
    await chunks.aclose()  # type: ignore[attr-defined]
    assert await asyncio.to_thread(server.left.wait, PATIENCE_S)


@pytest.mark.parametrize("streams", [False, True])
async def test_cancelled_task_ends_the_request(async_client: AsyncClient, server: Canned, streams: bool) -> None:
    """Guards cancellation of tasks: it stays asyncio's, and reaches the server."""
    server.silent = True

    async def read() -> None:
        if streams:
            async for _ in async_client.stream("p"):
                pass
        else:
            await async_client.generate("p")

    task = asyncio.create_task(read())
    while not server.requests:
        await asyncio.sleep(0.01)
    await asyncio.sleep(0.05)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert await asyncio.to_thread(server.left.wait, PATIENCE_S)


# weight


def test_client_is_light() -> None:
    """Guards clients against half a minute of imports and a gigabyte of libraries."""
    heavy = {"torch", "ray", "transformers", "numpy", "pydantic"}
    code = f"import sys, cascade.client; print(*{heavy} & {{name.split('.')[0] for name in sys.modules}})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.split() == []


def test_stream_that_ends_early_is_an_error(server: Canned, client: Client) -> None:
    """Guards callers against half a text that looks like a whole one."""
    server.hasty = True
    stream = client.stream("x")
    next(stream)
    with pytest.raises(Unavailable, match="before the text"):
        next(stream)
