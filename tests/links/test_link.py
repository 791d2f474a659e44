"""Links and leases without Ray: tiers in one process, joined by real gRPC streams; lessors ask the link servers themselves."""

import asyncio
import contextlib
import gc
import pickle
import threading
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import replace
from typing import Any

import grpc
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cascade.answer import Answer
from cascade.chain import watchdog
from cascade.chain.tier import Tier
from cascade.draft import Dist, Draft
from cascade.engine.grammar import Grammars
from cascade.engine.sequence_state import state_maker
from cascade.errors import Unavailable
from cascade.messages import Close, Commit, Divergence, Edge, Failed, Lane, Logprobs, Message, Open, Proposal, Rules, mint
from cascade.params import MAX_SEED, RULES, SamplingParams, Structured
from cascade.scorer import Row, Scored
from cascade.settings.config import LinkTLS
from cascade.simulation.toy import ToyModel, full_text
from cascade.v1 import link_pb2 as pb
from cascade.v1 import link_pb2_grpc
from deployments.links import uplink
from deployments.links.codec import decode, encode
from deployments.links.downlink import Downlink
from deployments.links.held_lease import Lease, Lessor
from deployments.links.uplink import CHANNEL_OPTIONS, LinkServer, authorization
from deployments.tracing.export import Tracing
from tests.chain.test_tier import NAMES, PROMPT, CountingModel, Silent
from tests.chain.test_tier import opening as any_opening

LEASE_TIMEOUT_S = 5.0  # of leases that are not meant to fail
SHORT_S = 0.2
PATIENCE_S = 20.0  # after which a test has failed


class Held:
    """A lease as Serve gives it: the replica's generator runs on its own, and `cancel` cancels it there."""

    def __init__(self, addresses: AsyncIterator[str]) -> None:
        self._addresses = addresses
        self._arrived: asyncio.Queue[str | None] = asyncio.Queue()
        self.task = asyncio.create_task(self._run())

    async def _run(self) -> None:
        try:
            async for address in self._addresses:
                self._arrived.put_nowait(address)
        finally:
            self._arrived.put_nowait(None)

    def __aiter__(self) -> AsyncIterator[str]:
        return self

    async def __anext__(self) -> str:
        address = await self._arrived.get()
        if address is None:
            raise StopAsyncIteration
        return address

    def cancel(self) -> None:
        self.task.cancel()


class Node:
    """A replica: one tier with both ends of its links."""

    def __init__(
        self,
        level: int,
        model: CountingModel,
        lessors: dict[str, Lessor],
        grammars: Grammars | None = None,
        tls: LinkTLS | None = None,
        tracing: Tracing | None = None,
    ) -> None:
        self.model = model
        self.tier = Tier(NAMES[level], level, model, new_state=state_maker(None if grammars is None else grammars.matcher))
        self.downlink = Downlink(lessors, self.tier.post, lease_timeout_s=LEASE_TIMEOUT_S, tls=tls, tracing=tracing)
        self.tier.below = self.downlink
        self.server = LinkServer(self.tier, tls, tracing)

    async def start(self) -> None:
        self.tier.start()
        await self.server.start("127.0.0.1")

    async def stop(self) -> None:
        await self.server.stop()
        await self.downlink.close()
        self.tier.close()

    @property
    def occupied(self) -> tuple[int, ...]:
        streams = sum(len(stream.sessions) for stream in self.downlink._streams.values())
        stores = self.model.leaks - len(
            self.tier.kv_admission.block_manager._kept
        )  # those of sessions, not those kept for reuse
        return self.tier.num_sessions, len(self.server.leases), self.downlink.num_sessions, streams, stores


class Net:
    """Replicas by tier, and a router that asks the full one."""

    def __init__(self, tls: LinkTLS | None = None) -> None:
        self.tls = tls
        self.nodes: dict[str, Node] = {}
        self.leases: list[Held] = []
        self.refused: set[str] = set()
        self.failures: list[Failed] = []
        self._inboxes: dict[str, asyncio.Queue[Message]] = {}
        self.router = Downlink({"full": self.lessor("full")}, self._hear, lease_timeout_s=LEASE_TIMEOUT_S, tls=tls)

    async def add(self, name: str, *, pass_s: float = 0.0, agreement: float = 1.0) -> Node:
        level = NAMES.index(name)
        lessors = {below: self.lessor(below) for below in NAMES[:level]}
        node = self.nodes[name] = Node(level, CountingModel(agreement=agreement, pass_s=pass_s), lessors, tls=self.tls)
        await node.start()
        return node

    def lessor(self, name: str) -> Lessor:
        """Whatever replica the tier has when it is asked."""

        def take(session: str, preferred: Sequence[str] = ()) -> Lease:
            if name in self.refused:
                raise RuntimeError("all replicas are busy")
            lease = Held(self.nodes[name].server.lease(session))
            self.leases.append(lease)
            return lease

        return take

    async def text(self, request: Open, *, slowly: Callable[[], Any] | None = None) -> tuple[list[int], Answer]:
        """Drive a request as the router does."""
        answer, current = Answer(request, Silent()), request
        while not answer.finished:
            inbox = self._inboxes[current.session] = asyncio.Queue()
            self.router.put([current])
            while not answer.finished:
                message = await asyncio.wait_for(inbox.get(), PATIENCE_S)
                if isinstance(message, Failed):
                    self.failures.append(message)
                    assert len(self.failures) < 100, message
                    await asyncio.sleep(0.01)
                    break
                assert isinstance(message, Proposal)
                _, commit = answer.take(message)
                if commit is not None:
                    self.router.put([commit])
            self.router.put([Close(current.session)])
            del self._inboxes[current.session]
            current = answer.replay(mint()) if not answer.finished else current
        return [*request.tokens, *answer._tokens], answer

    async def settle(self) -> None:
        """Wait until nothing is occupied anywhere."""
        nothing = {"router": (0, 0), **dict.fromkeys(self.nodes, (0,) * 5)}
        await until(lambda: self.occupied == nothing and all(lease.task.done() for lease in self.leases), lambda: self.occupied)

    @property
    def occupied(self) -> dict[str, tuple[int, ...]]:
        streams = sum(len(stream.sessions) for stream in self.router._streams.values())
        return {"router": (self.router.num_sessions, streams), **{name: node.occupied for name, node in self.nodes.items()}}

    async def close(self) -> None:
        await self.router.close()
        for node in self.nodes.values():
            await node.stop()
        for lease in self.leases:
            lease.cancel()

    def _hear(self, messages: Sequence[Message]) -> None:
        for message in messages:
            if message.session in self._inboxes:
                self._inboxes[message.session].put_nowait(message)


async def until(condition: Callable[[], bool], state: Callable[[], object] = lambda: "not yet") -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, state()
        await asyncio.sleep(0.005)


def threads() -> set[threading.Thread]:
    """All but the one by which grpc.aio waits for events, which it keeps."""
    return {thread for thread in threading.enumerate() if "_poll_wrapper" not in thread.name}


@pytest.fixture
async def tidy() -> AsyncIterator[None]:
    """Guards every test against tasks and threads that outlive their owners."""
    tasks_before, threads_before = asyncio.all_tasks(), threads()
    yield
    known = tasks_before | {asyncio.current_task()}
    await until(lambda: not asyncio.all_tasks() - known, lambda: asyncio.all_tasks() - known)
    assert threads() <= threads_before


@pytest.fixture
async def empty(tidy: None) -> AsyncIterator[Net]:
    """A net without replicas."""
    net = Net()
    yield net
    await net.close()


@pytest.fixture
async def net(empty: Net) -> Net:
    """Three tiers, one replica each."""
    await empty.add("tiny", pass_s=0.0002, agreement=0.6)
    await empty.add("medium", pass_s=0.001, agreement=0.8)
    await empty.add("full", pass_s=0.004)
    return empty


def opening(seed: int = 1, temperature: float = 1.0, max_tokens: int = 40, **options: object) -> Open:
    return any_opening(seed, temperature, max_tokens, **{"tier": "full", **options})


def drafted(answer: Answer) -> dict[str, int]:
    """Passes of the full tier by drafter."""
    return {edge.drafter: edge.passes for edge in answer._edges if edge.verifier == "full"}


# the text


@pytest.mark.parametrize("temperature", [0.0, 1.0])
async def test_text_is_the_full_models(net: Net, temperature: float) -> None:
    """Guards losslessness over real links, and everything a finished request holds."""
    request = opening(3, temperature, 80)
    text, answer = await net.text(request)
    assert text == full_text(ToyModel(), request)
    assert drafted(answer)["medium"] > 0
    assert any(edge.verifier == "medium" and edge.drafter == "tiny" for edge in answer._edges)
    assert net.failures == []
    await net.settle()


async def test_many_sessions_share_a_stream(net: Net) -> None:
    """Guards sessions of one stream against each other, and against a stream for each session."""
    requests = [opening(seed, 0.8, 15, chain=(("medium", "tiny"), ("tiny",), ())[seed % 3]) for seed in range(18)]
    answers = await asyncio.gather(*(net.text(request) for request in requests))
    for request, (text, _) in zip(requests, answers, strict=True):
        assert text == full_text(ToyModel(), request)
    assert len(net.router._streams) == 1
    assert len(net.nodes["full"].downlink._streams) == 2
    assert net.failures == []
    await net.settle()


# deaths


async def test_dead_replica_degrades_and_a_new_one_is_used(net: Net) -> None:
    """Guards against a hang, another text or a session that stays slow when a drafter dies and comes back elsewhere."""
    request = opening(5, 0.5, 250)
    running = asyncio.create_task(net.text(request))
    old = net.nodes["medium"]
    await until(lambda: old.tier.stats.own_tokens > 20)
    await old.stop()
    await until(lambda: net.nodes["full"].downlink.num_sessions == 1)
    new = await net.add("medium", pass_s=0.001, agreement=0.8)
    text, answer = await running
    assert text == full_text(ToyModel(), request)
    assert new.tier.stats.own_tokens > 0
    assert drafted(answer).keys() >= {"medium", "tiny"}
    assert net.failures == []
    await net.settle()
    assert old.occupied[0] == old.occupied[4] == 0


async def test_dead_full_replica_is_replaced(net: Net) -> None:
    """Guards the caller's side: a link that breaks is told as Failed, and a replay on another replica gives the same text."""
    request = opening(6, 1.0, 100)
    running = asyncio.create_task(net.text(request))
    old = net.nodes["full"]
    await until(lambda: old.tier.stats.own_tokens > 20)
    await old.stop()
    await net.add("full", pass_s=0.004)
    text, _ = await running
    assert text == full_text(ToyModel(), request)
    assert net.failures
    assert all(failure.reason for failure in net.failures)
    await net.settle()


class Hanging(CountingModel):
    """Passes wait for `works`, as on a device that no longer answers."""

    def __init__(self, **options: float) -> None:
        super().__init__(**options)
        self.works = threading.Event()
        self.works.set()

    def run(self, rows: Sequence[Row]) -> list[Scored]:
        self.works.wait()
        return super().run(rows)


async def test_sessions_leave_a_replica_whose_pass_hangs(empty: Net, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards requests, and health, against a pass that does not end: the replica was healthy, its requests ended with 503."""
    monkeypatch.setattr(watchdog, "GRACE_S", 0.3)
    monkeypatch.setattr(uplink, "REFUSAL_S", 0.0)
    model = Hanging(pass_s=0.004)
    old = empty.nodes["full"] = Node(2, model, {})
    await old.start()
    request = opening(6, 1.0, 100)
    running = asyncio.create_task(empty.text(request))
    await until(lambda: old.tier.stats.own_tokens > 20)
    assert old.tier.healthy
    model.works.clear()
    await until(lambda: not old.tier.healthy)
    with pytest.raises(Unavailable, match="hangs"):
        await anext(old.server.lease("late"))
    await empty.add("full")
    text, _ = await running
    assert text == full_text(ToyModel(), request)
    old.tier.close()  # which does not wait for it
    model.works.set()
    await until(lambda: not old.tier._thread.is_alive())
    assert not old.tier.hangs
    await old.stop()
    await empty.settle()
    assert old.occupied == (0, 0, 0, 0, 0)


async def test_nobody_at_the_address_fails_the_session(empty: Net) -> None:
    """Guards against waiting for a replica that has died between its lease and the link."""
    node = await empty.add("full")
    await node.server.stop()
    failed = asyncio.Queue[Message]()
    downlink = Downlink({"full": empty.lessor("full")}, lambda messages: [failed.put_nowait(m) for m in messages])
    request = opening(chain=())
    downlink.send([request])
    message = await asyncio.wait_for(failed.get(), PATIENCE_S)
    assert isinstance(message, Failed)
    assert (message.session, message.tier) == (request.session, "full")
    assert downlink.num_sessions == 0
    await downlink.close()
    await empty.settle()


class Relay:
    """A network between a caller and a node that can go dead without a word."""

    def __init__(self, address: str) -> None:
        self._host, self._port = address.split(":")
        self._pumps: list[asyncio.Task[None]] = []
        self._ends: list[asyncio.StreamWriter] = []
        self._connecting: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> "Relay":
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        self.address = f"127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(self, *error: object) -> None:
        self.die()
        self._server.close()
        await asyncio.gather(*self._connecting)
        for end in self._ends:
            end.transport.abort()
        await asyncio.gather(*(end.wait_closed() for end in self._ends), return_exceptions=True)

    def die(self) -> None:
        """From now on nothing arrives; the connections stay."""
        for pump in self._pumps:
            pump.cancel()

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._ends.append(writer)
        task = asyncio.create_task(self._connect(reader, writer))
        self._connecting.add(task)
        task.add_done_callback(self._connecting.discard)

    async def _connect(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there, back = await asyncio.open_connection(self._host, int(self._port))
        self._ends.append(back)
        self._pumps = [asyncio.create_task(_pump(reader, back)), asyncio.create_task(_pump(there, writer))]


async def _pump(source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
    while data := await source.read(2**16):
        sink.write(data)


async def test_host_that_vanishes_fails_its_sessions(empty: Net, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against waiting for a host whose connection stays: the timeout of keepalives alone does nothing in gRPC 1.85."""
    sooner = {"grpc.keepalive_time_ms": 250, "grpc.http2.ping_timeout_ms": 250}
    quick = [(name, sooner.get(name, value)) for name, value in CHANNEL_OPTIONS]
    monkeypatch.setattr("deployments.links.downlink.CHANNEL_OPTIONS", quick)
    node = await empty.add("full")
    async with Relay(node.server.address) as relay:
        monkeypatch.setattr(node.server, "address", relay.address)
        heard: list[Message] = []
        downlink = Downlink({"full": empty.lessor("full")}, heard.extend)
        downlink.send([opening(chain=(), window=4)])
        await until(lambda: len(heard) > 0)
        relay.die()
        await until(lambda: isinstance(heard[-1], Failed), lambda: heard)
        assert downlink.num_sessions == 0
        await downlink.close()
    await empty.settle()


# leases


async def test_refused_lease_leaves_the_tiers_that_are_left(net: Net) -> None:
    """Guards a request against a tier without free replicas."""
    net.refused = {"medium"}
    request = opening(7, 0.0, 60)
    text, answer = await net.text(request)
    assert text == full_text(ToyModel(), request)
    assert drafted(answer)["tiny"] > 0
    assert net.nodes["medium"].tier.stats.passes == 0
    await net.settle()


async def test_silent_lease_is_given_up(net: Net) -> None:
    """Guards a request against a tier whose replicas never answer, as all of them full or still loading."""
    cancelled: list[str] = []

    async def silence(session: str) -> AsyncIterator[str]:
        try:
            await asyncio.Event().wait()
            yield ""
        finally:
            cancelled.append(session)

    def take(session: str, preferred: Sequence[str] = ()) -> Lease:
        lease = Held(silence(session))
        net.leases.append(lease)
        return lease

    heard: list[tuple[float, Message]] = []
    begin = time.monotonic()
    downlink = Downlink(
        {"full": take},
        lambda messages: heard.extend((time.monotonic() - begin, message) for message in messages),
        lease_timeout_s=SHORT_S,
    )
    asked = opening()
    downlink.put([asked])
    await until(lambda: bool(heard))
    [(seconds, failed)] = heard
    assert isinstance(failed, Failed)
    assert failed.session == asked.session
    assert SHORT_S / 2 < seconds < PATIENCE_S / 2
    assert downlink.num_sessions == 0
    await until(lambda: cancelled == [asked.session])
    await downlink.close()

    below = net.nodes["full"].downlink
    below._lessors, below._lease_timeout_s = {**below._lessors, "medium": take}, SHORT_S
    request = opening(8, 0.0, 150)
    text, answer = await net.text(request)
    assert text == full_text(ToyModel(), request)
    assert drafted(answer)["tiny"] > 0
    await net.settle()


@pytest.mark.parametrize("late_s", [0.15, 3600.0], ids=["late", "never"])
async def test_a_lease_that_is_not_given_is_asked_for_again(net: Net, monkeypatch: pytest.MonkeyPatch, late_s: float) -> None:
    """Guards requests whose replica is out of reach while Serve believes in it: they waited for half a minute. One that is
    only late gives two leases for a session, which must outlive the first that goes."""
    monkeypatch.setattr("deployments.links.downlink.PATIENCE_S", 0.05)
    server, num_asked = net.nodes["full"].server, 0

    async def late(session: str) -> AsyncIterator[str]:
        await asyncio.sleep(late_s)
        async for ticket in server.lease(session):
            yield ticket

    def take(session: str, preferred: Sequence[str] = ()) -> Lease:
        nonlocal num_asked
        num_asked += 1
        lease = Held(late(session) if num_asked % 4 else server.lease(session))  # the last of four is given at once
        net.leases.append(lease)
        return lease

    net.router._lessors = {"full": take}
    for seed in range(3):
        request = opening(seed, 0.0, 60)
        text, _ = await net.text(request)
        assert text == full_text(ToyModel(), request)
    assert num_asked == 12 or late_s < 1
    assert net.failures == []
    await net.settle()


async def test_a_session_outlives_a_lease_too_many(net: Net) -> None:
    """Guards sessions that hold their replica twice: letting go of one lease closed them."""
    async with Peer(net.nodes["full"], net) as peer:
        request = opening(3, 0.0, 40)
        await peer.lease(request.session)
        await peer.lease(request.session)
        first, second = net.leases[-2:]
        await peer.say(request)
        assert isinstance(await peer.answer(), Proposal)
        second.cancel()
        await until(second.task.done)
        await asyncio.sleep(0.05)
        assert len(net.nodes["full"].server.leases) == 1
        assert net.nodes["full"].tier.num_sessions == 1
        first.cancel()
        await until(lambda: net.nodes["full"].tier.num_sessions == 0)
        assert len(net.nodes["full"].server.leases) == 0


async def test_unknown_tier_fails(net: Net) -> None:
    """Guards against an Open for a tier that nobody has."""
    request = opening(9, 0.0, 40, chain=("huge", "tiny"))
    text, answer = await net.text(request)
    assert text == full_text(ToyModel(), request)
    assert drafted(answer)["tiny"] > 0
    await net.settle()


async def test_dropped_lease_closes_the_session(net: Net) -> None:
    """Guards tiers against sessions whose caller is gone for Serve, though the link stands."""
    request = opening(10, 1.0, 2000, window=8)
    net.router.put([request])
    await until(lambda: [node.tier.num_sessions for node in net.nodes.values()] == [1, 1, 1])
    net.leases[0].cancel()
    await until(lambda: not any(any(node.occupied) for node in net.nodes.values()), lambda: net.occupied)
    net.router.put([Close(request.session)])
    await net.settle()


async def test_lease_that_nobody_opens_ends(net: Net, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards replicas against callers that died between lease and Open: Serve does not cancel their leases."""
    monkeypatch.setattr("deployments.links.uplink.OPEN_TIMEOUT_S", 0.05)
    node = net.nodes["full"]
    lease = Held(node.server.lease("nobody"))
    assert await anext(lease) == f"{node.server.address} {node.server.secret}"
    assert len(node.server.leases) == 1
    await asyncio.wait_for(lease.task, PATIENCE_S)
    assert len(node.server.leases) == 0
    # one that is open lives on
    request = opening(11, 1.0, 2000, window=8)
    net.router.put([request])
    await until(lambda: node.tier.num_sessions == 1)
    await asyncio.sleep(0.15)
    assert (node.tier.num_sessions, len(node.server.leases)) == (1, 1)
    net.router.put([Close(request.session)])
    await net.settle()


@pytest.mark.parametrize("num_ticks", range(6))
async def test_close_while_the_lease_is_taken(net: Net, num_ticks: int) -> None:
    """Guards against routes, leases and sessions that stay when a request ends just as its lease arrives."""
    request = opening(12, 1.0, 2000)
    net.router.put([request])
    for _ in range(num_ticks):
        await asyncio.sleep(0)
    net.router.put([Close(request.session)])
    assert net.router.num_sessions == 0
    await net.settle()
    assert net.failures == []


class Waiting:
    """A lease that does not come, and raises an error of its own where it is cancelled, as those of Ray Serve."""

    cancelled = False

    def __aiter__(self) -> AsyncIterator[str]:
        return self

    async def __anext__(self) -> str:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            if self.cancelled:
                raise RuntimeError("cancelled") from None
            raise
        return ""

    def cancel(self) -> None:
        self.cancelled = True


async def test_a_lease_that_is_not_waited_for_reports_nothing(tidy: None) -> None:
    """Guards the log from an error for each session that ends early: of a task whose outcome nobody looked at."""
    strays: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: strays.append(context))
    downlink = Downlink({"full": lambda session, preferred=(): Waiting()}, lambda messages: None)
    request = opening()
    downlink.put([request])
    await asyncio.sleep(0.01)
    downlink.put([Close(request.session)])
    await asyncio.sleep(0.01)
    await downlink.close()
    gc.collect()
    assert strays == []


async def test_close_in_the_middle_frees_all(net: Net) -> None:
    """Guards leases, routes and sessions of every tier against a client that leaves."""
    requests = [opening(seed, 1.0, 2000) for seed in range(8)]
    net.router.put(requests)
    await until(lambda: [node.tier.num_sessions for node in net.nodes.values()] == [8, 8, 8])
    assert net.occupied == {"router": (8, 8), "tiny": (8, 8, 0, 0, 8), "medium": (8, 8, 8, 8, 8), "full": (8, 8, 8, 8, 8)}
    net.router.send([Close(request.session) for request in requests])
    await net.settle()


async def test_lost_router_frees_all(net: Net) -> None:
    """Guards every tier against a router that dies: its links break and its leases do not end by themselves."""
    requests = [opening(seed, 1.0, 2000) for seed in range(3)]
    net.router.put(requests)
    await until(lambda: [node.tier.num_sessions for node in net.nodes.values()] == [3, 3, 3])
    [stream] = net.router._streams.values()
    for lease in net.leases[:3]:
        lease.cancel = lambda: None  # type: ignore[method-assign]  # nobody is there to cancel it
    assert stream.task is not None
    stream.task.cancel()
    await net.settle()


# peers that do not keep the protocol


def entry(node: Node) -> tuple[tuple[str, str], ...]:
    """What lets a caller in."""
    return (("authorization", authorization(node.server.secret)),)


class Peer:
    """The caller's end of a link, by hand."""

    def __init__(self, node: Node, net: Net) -> None:
        self._node, self._net = node, net
        self._arrived: list[Message] = []

    async def __aenter__(self) -> "Peer":
        self._channel = grpc.aio.insecure_channel(self._node.server.address)
        self.call = link_pb2_grpc.LinkStub(self._channel).Connect(metadata=entry(self._node))
        return self

    async def __aexit__(self, *error: object) -> None:
        self.call.cancel()
        await self._channel.close(None)

    async def lease(self, session: str) -> None:
        lease = Held(self._node.server.lease(session))
        self._net.leases.append(lease)
        await anext(lease)

    async def say(self, *messages: Message) -> None:
        await self.call.write(encode(messages))

    async def answer(self) -> Message:
        """The next message."""
        if not self._arrived:
            self._arrived += decode(await asyncio.wait_for(self.call.read(), PATIENCE_S))
        return self._arrived.pop(0)

    async def end(self) -> None:
        """Read until the link is over."""
        with contextlib.suppress(grpc.aio.AioRpcError):
            async with asyncio.timeout(PATIENCE_S):
                while await self.call.read() is not grpc.aio.EOF:
                    pass


async def test_session_without_a_lease_is_refused(net: Net) -> None:
    """Guards Serve's view of the load: nobody gets in without a lease, nor over a link that does not own the session."""
    good = asyncio.create_task(net.text(opening(13, 0.0, 60)))
    async with Peer(net.nodes["full"], net) as peer:
        await peer.say(opening())
        failed = await peer.answer()
        assert isinstance(failed, Failed)
        assert "lease" in failed.reason
        await until(lambda: net.router.num_sessions == 1 and net.nodes["full"].tier.num_sessions == 1)
        [theirs] = net.router._routes
        await peer.say(Close(theirs), Commit(theirs, 5, (0,)), opening(chain=()))
        again = await peer.answer()
        assert isinstance(again, Failed)
        assert again.session != theirs
        await peer.say(replace(opening(), session=theirs))
        assert (await peer.answer()).session == theirs
    text, _ = await good
    assert text == full_text(ToyModel(), opening(13, 0.0, 60))
    assert net.failures == []
    await net.settle()


def wire(change: Callable[[pb.Message], None]) -> Callable[[str], bytes]:
    """A batch with one Open, spoilt."""

    def make(session: str) -> bytes:
        [message] = encode([replace(opening(14), session=session)]).messages
        change(message)
        return pb.Batch(messages=[message]).SerializeToString()

    return make


def wrong_origins(session: str) -> bytes:
    proposal = pb.Proposal(start=5, tokens=[1, 2], origins=b"\0")
    return pb.Batch(messages=[pb.Message(session=session, proposal=proposal)]).SerializeToString()


MALFORMED: dict[str, Callable[[str], bytes]] = {
    "no kind": lambda session: pb.Batch(messages=[pb.Message(session=session)]).SerializeToString(),
    "origins of another length": wrong_origins,
    "prompt_len 0": wire(lambda m: setattr(m.open, "prompt_len", 0)),
    "prompt_len beyond the text": wire(lambda m: setattr(m.open, "prompt_len", 99)),
    "no tokens": wire(lambda m: m.open.ClearField("tokens")),
    "NaN temperature": wire(lambda m: setattr(m.open.sampling, "temperature", float("nan"))),
    "infinite temperature": wire(lambda m: setattr(m.open.sampling, "temperature", float("inf"))),
    "top_p 0": wire(lambda m: setattr(m.open.sampling, "top_p", 0.0)),
    "max_tokens 0": wire(lambda m: setattr(m.open.sampling, "max_tokens", 0)),
    "seed too large": wire(lambda m: setattr(m.open.sampling, "seed", 2**64 - 1)),
    "no sampling": wire(lambda m: m.open.ClearField("sampling")),
    "not protobuf": lambda session: b"\xff" * 40,
    "session not UTF-8": lambda session: b"\x0a\x04\x0a\x02\xff\xfe",
}


@pytest.mark.parametrize("kind", MALFORMED)
async def test_malformed_batch_breaks_its_own_link_only(net: Net, kind: str) -> None:
    """Guards a replica, and the requests of other callers, against a caller that speaks nonsense."""
    request = opening(15, 0.0, 40)
    good = asyncio.create_task(net.text(request))
    node = net.nodes["full"]
    await until(lambda: node.tier.num_sessions == 1)
    async with grpc.aio.insecure_channel(node.server.address) as channel:
        raw = channel.stream_stream(
            "/cascade.v1.Link/Connect", request_serializer=lambda data: data, response_deserializer=lambda data: data
        )
        call = raw(metadata=entry(node))
        for session in ("bystander", "spoilt"):
            lease = Held(node.server.lease(session))
            net.leases.append(lease)
            await anext(lease)
        bystander = replace(opening(16, chain=()), session="bystander")
        await call.write(encode([bystander]).SerializeToString())
        await call.read()
        await call.write(MALFORMED[kind]("spoilt"))
        with contextlib.suppress(grpc.aio.AioRpcError):
            async with asyncio.timeout(PATIENCE_S):
                while await call.read() is not grpc.aio.EOF:
                    pass
    text, _ = await good
    assert text == full_text(ToyModel(), request)
    assert net.failures == []
    await until(lambda: node.tier.num_sessions == 0)
    assert node.tier.healthy
    assert "bystander" not in node.server.leases._ended
    for lease in net.leases:
        lease.cancel()  # the one of the session that was never opened ends by itself, later
    await net.settle()


@pytest.mark.parametrize("commit", [Commit("bad", 4000, (1,)), Commit("bad", 0, (1,)), Commit("bad", 5, ())], ids=str)
async def test_commit_that_does_not_join_ends_its_session_only(net: Net, commit: Commit) -> None:
    """Guards the other sessions of a link, and the link, against a commit that makes no sense."""
    node = net.nodes["full"]
    async with Peer(node, net) as peer:
        for session in ("bad", "good"):
            await peer.lease(session)
        good = replace(opening(17, 0.0, 20, chain=()), session="good")
        await peer.say(replace(opening(18, 0.0, 20, window=1), session="bad"), commit, good)
        answer, failed = Answer(good, Silent()), None
        while not (answer.finished and failed):
            message = await peer.answer()
            if isinstance(message, Failed):
                failed = message
            elif isinstance(message, Proposal) and message.session == "good":
                answer.take(message)
        assert failed.session == "bad"
        assert "does not join" in failed.reason
        assert [*PROMPT, *answer._tokens] == full_text(ToyModel(), good)
        await peer.say(Close("good"))
        await net.settle()


async def test_links_go_past_proxies_for_the_web(net: Net, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards nodes with http_proxy in their environment: gRPC asked the proxy for every replica, and no link came about."""
    for name in ("http_proxy", "https_proxy", "grpc_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    for name in ("no_proxy", "no_grpc_proxy"):
        monkeypatch.delenv(name, raising=False)
    request = opening(23, 0.0, 20)
    text, answer = await net.text(request)
    assert text == full_text(ToyModel(), request)
    assert net.failures == []
    assert drafted(answer)["medium"] > 0
    await net.settle()


class Rogue(link_pb2_grpc.LinkServicer):
    """A replica that answers every batch with the same bytes."""

    def __init__(self, reply: Callable[[str], bytes]) -> None:
        self._reply = reply
        self.asked = 0

    async def Connect(self, request_iterator: AsyncIterator[pb.Batch], context: Any) -> None:
        async for batch in request_iterator:
            self.asked += 1
            await context.write(self._reply(batch.messages[0].session))


async def serve_raw(rogue: Rogue) -> tuple[grpc.aio.Server, str]:
    server = grpc.aio.server()
    method = grpc.stream_stream_rpc_method_handler(rogue.Connect, pb.Batch.FromString, lambda data: data)
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("cascade.v1.Link", {"Connect": method}),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    return server, f"127.0.0.1:{port}"


@pytest.mark.parametrize(
    "kind", ["no kind", "origins of another length", "NaN temperature", "not protobuf", "session not UTF-8"]
)
async def test_malformed_answers_cost_only_the_drafter(net: Net, kind: str) -> None:
    """Guards a tier against a drafter that speaks nonsense: the request goes on without it."""
    rogue = Rogue(MALFORMED[kind])
    server, address = await serve_raw(rogue)

    async def lease(session: str) -> AsyncIterator[str]:
        yield address
        await asyncio.Event().wait()

    def take(session: str, preferred: Sequence[str] = ()) -> Lease:
        held = Held(lease(session))
        net.leases.append(held)
        return held

    full = net.nodes["full"]
    full.downlink._lessors = {**full.downlink._lessors, "medium": take}
    request = opening(19, 0.0, 40)
    text, answer = await net.text(request)
    assert text == full_text(ToyModel(), request)
    assert rogue.asked
    assert drafted(answer)["tiny"] > 0
    assert net.failures == []
    await server.stop(0)
    await net.settle()


# the codec

ids = st.integers(0, 2**32 - 1)
tokens = st.lists(ids, max_size=8).map(tuple)
counts = st.integers(0, 2**32 - 1)
params = st.builds(
    SamplingParams,
    max_tokens=st.integers(1, 2**31),
    temperature=st.floats(0, 100),
    top_k=st.integers(0, 2**31 - 1),
    top_p=st.floats(0, 1, exclude_min=True),
    min_p=st.floats(0, 1),
    seed=st.integers(0, MAX_SEED),
    stop_token_ids=st.lists(st.integers(0, 2**31 - 1), max_size=3).map(tuple),
    ignore_eos=st.just(False),
    presence_penalty=st.floats(-2, 2),
    frequency_penalty=st.floats(-2, 2),
    repetition_penalty=st.floats(0.01, 100),
    logit_bias=st.dictionaries(st.integers(0, 2**31 - 1), st.floats(-100, 100), max_size=3),
    min_tokens=st.integers(0, 1),
    logprobs=st.none() | st.integers(0, 20),
    prompt_logprobs=st.none() | st.integers(0, 20),
    structured=st.none()
    | st.builds(Structured, json_schema=st.text(min_size=1))
    | st.just(Structured(json_object=True))
    | st.builds(Structured, regex=st.text(min_size=1))
    | st.builds(Structured, choice=st.lists(st.text(min_size=1), min_size=1, max_size=3))
    | st.builds(Structured, grammar=st.text(min_size=1)),
)
positions, ranks = st.lists(counts, max_size=16).map(tuple), st.lists(counts, max_size=3).map(tuple)
edges = st.builds(
    Edge,
    st.text(),
    st.text(),
    counts,
    counts,
    counts,
    counts,
    st.floats(0, 1e9),
    positions,
    positions,
    ranks,
    ranks,
    counts,
    counts,
    counts,
)
parents = st.lists(st.integers(0, 99), max_size=8).map(lambda drawn: tuple(n % (node + 1) - 1 for node, n in enumerate(drawn)))
lanes = parents.flatmap(
    lambda shape: st.builds(
        Lane, st.text(), ids, st.lists(ids, min_size=len(shape), max_size=len(shape)).map(tuple), st.sampled_from(((), shape))
    )
)
opens = st.builds(
    Open,
    session=st.text(),
    tokens=st.lists(ids, min_size=3, max_size=8).map(tuple),
    prompt_len=st.integers(1, 3),
    params=params,
    ends=st.frozensets(ids, max_size=4),
    tier=st.text(),
    chain=st.lists(st.text(), max_size=4).map(tuple),
    window=counts,
    draft_window=counts,
    lockstep=st.booleans(),
    priority=st.integers(-1000, 1000),
    cache_salt=st.text(),
    adaptive=st.booleans(),
    watch=st.booleans(),
    branches=counts,
    draft_branches=counts,
    rules=st.builds(Rules, st.sampled_from(RULES), st.sampled_from(RULES), st.sampled_from(RULES), counts, counts),
    traceparent=st.text(),
    tracestate=st.text(),
)
audits = st.builds(
    lambda tokens, place, opening: replace(opening, tokens=tokens, prompt_len=1, audit=1 + place % (len(tokens) - 1)),
    st.lists(ids, min_size=2, max_size=8).map(tuple),
    counts,
    opens,
)
probabilities = st.lists(st.tuples(ids, st.floats(0, 1, width=32, exclude_min=True)), max_size=3)
dists = probabilities.map(lambda pairs: Dist(tuple(id for id, _ in pairs), tuple(prob for _, prob in pairs)))
values = st.floats(-1e6, 0, width=32)
logprobs = st.builds(Logprobs, values, st.lists(st.tuples(ids, values), max_size=3).map(tuple))
proposals = st.integers(0, 8).flatmap(
    lambda length: st.builds(
        Proposal,
        st.text(),
        ids,
        st.builds(
            Draft,
            st.lists(ids, min_size=length, max_size=length).map(tuple),
            st.binary(min_size=length, max_size=length),
            dists=st.just(()) | st.lists(dists, min_size=length, max_size=length).map(tuple),
        ),
        st.lists(edges, max_size=3).map(tuple),
        st.just(()) | st.lists(logprobs, min_size=length, max_size=length).map(tuple),
        st.text(),
        st.lists(logprobs, max_size=3).map(tuple),
        st.lists(lanes, max_size=3).map(tuple),
        st.lists(st.builds(Divergence, ids, ids, ids, st.floats(0), st.booleans()), max_size=3).map(tuple),
    )
)
messages = st.one_of(
    opens,
    audits,
    st.builds(Commit, st.text(), ids, tokens),
    st.builds(Close, st.text()),
    proposals,
    st.builds(Failed, st.text(), st.text(), st.text()),
)


@settings(max_examples=60, deadline=None)
@given(st.lists(messages, max_size=5))
def test_codec_keeps_every_message(batch: list[Message]) -> None:
    """Guards against fields that the wire forgets, swaps or rounds."""
    arrived = decode(pb.Batch.FromString(encode(batch).SerializeToString()))
    assert arrived == batch
    for name in ("edges", "logprobs", "prompt_logprobs", "lanes"):  # which equality leaves out
        said = [[getattr(m, name) for m in some if isinstance(m, Proposal)] for some in (arrived, batch)]
        assert said[0] == said[1]
    drawn = [[dist.listed for m in some if isinstance(m, Proposal) for dist in m.draft.dists] for some in (arrived, batch)]
    assert drawn[0] == drawn[1]


def test_distributions_cross_processes_as_numbers() -> None:
    """Guards pipes and wire against tensors, whose memory is the whole pass's, and against tokens without a chance."""
    passes = torch.arange(8.0).reshape(2, 4) / 22
    dist = Dist(torch.tensor([7, 5, 6, 2]), passes[0])
    [said] = pickle.loads(pickle.dumps(Draft((5,), bytes(1), dists=(dist,)))).dists
    assert said.listed == ([5, 6, 2], passes[0, 1:].tolist())
    [sent] = encode([Proposal("s", 1, Draft((5,), bytes(1), dists=(dist,)))]).messages[0].proposal.dists
    assert (list(sent.ids), list(sent.probs)) == said.listed


def test_siblings_share_a_distribution_on_the_wire() -> None:
    """Guards the price of trees, whose siblings were drawn from one distribution: it is sent once, and arrives with each."""
    first, second = Dist((1, 2), (0.75, 0.25)), Dist((3, 4), (0.5, 0.5))
    draft = Draft((1, 3, 2, 4), bytes(4), parents=(-1, 0, -1, 0), dists=(first, second, first, second))
    batch = encode([Proposal("s", 1, draft)])
    assert len(batch.messages[0].proposal.dists) == 2
    [arrived] = decode(batch)
    assert isinstance(arrived, Proposal)
    assert [dist.listed for dist in arrived.draft.dists] == [dist.listed for dist in draft.dists]


@pytest.mark.parametrize(
    "wrong",
    [
        pb.Message(open=pb.Open(tokens=[1], prompt_len=1, rules=pb.Rules(rule="lucky", inner="coupled", above="coupled"))),
        pb.Message(proposal=pb.Proposal(tokens=[1, 2], origins=bytes(2), dists=[pb.Dist()])),
        pb.Message(proposal=pb.Proposal(tokens=[1], origins=bytes(1), dists=[pb.Dist(ids=[1])])),
    ],
)
def test_rules_and_distributions_that_make_no_sense_are_refused(wrong: pb.Message) -> None:
    """Guards a tier against passes that fail for what its neighbour says."""
    with pytest.raises(ValueError, match=r"rule|distribution"):
        decode(pb.Batch(messages=[wrong]))


@pytest.mark.parametrize("audit", [1, 3, 4])
def test_audits_of_no_output_are_refused(audit: int) -> None:
    """Guards a tier against an audit of a prompt, or of nothing, which it cannot judge."""
    with pytest.raises(ValueError, match="judges output"):
        decode(pb.Batch(messages=[pb.Message(open=pb.Open(tokens=[1, 2, 3], prompt_len=2, audit=audit))]))


def test_every_kind_has_its_strategy() -> None:
    """Guards the test above against kinds that are added later."""
    kinds = pb.Message.DESCRIPTOR.oneofs_by_name["kind"].fields
    assert {field.name for field in kinds} == {kind.__name__.lower() for kind in (Open, Commit, Close, Proposal, Failed)}


@pytest.mark.parametrize("said", [(), (("authorization", "Bearer wrong"),), (("authorization", "Bearer "),)])
async def test_strangers_are_not_let_in(net: Net, said: tuple[tuple[str, str], ...]) -> None:
    """Guards the tiers against whoever reaches their ports: without the secret that a lease brings there is no link."""
    node = net.nodes["full"]
    lease = Held(node.server.lease("stranger"))
    net.leases.append(lease)
    await anext(lease)
    async with grpc.aio.insecure_channel(node.server.address) as channel:
        call = link_pb2_grpc.LinkStub(channel).Connect(metadata=said)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call.read()
    assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
    assert node.tier.num_sessions == 0
    lease.cancel()
    tokens, _ = await net.text(opening(15, 0.0, 20))
    assert len(tokens) == len(PROMPT) + 20
