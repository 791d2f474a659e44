"""Links over real gRPC between tiers of one process: same text as in memory, whatever breaks, and nothing left behind."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import replace

import grpc
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cascade.messages import Close, Commit, Edge, Failed, Message, Open, Proposal
from cascade.params import SamplingParams
from cascade.tier import Tier, mint
from cascade.toy import ToyModel, full_text
from cascade.v1 import link_pb2 as pb
from cascade.v1 import link_pb2_grpc
from deployments import link
from deployments.codec import decode, encode
from deployments.downlink import Downlink
from deployments.link import LinkServer

NAMES = ("tiny", "medium", "full")
PROMPT = (1, 2, 3, 4, 5)


class HeldLease:
    """What a streaming Serve call is to its caller: the first item is the address; cancelling ends the generator there."""

    def __init__(self, replica: "Replica", session: str) -> None:
        self._items: asyncio.Queue[str] = asyncio.Queue()
        self._task = asyncio.create_task(self._hold(replica.server.lease(session)))

    async def _hold(self, lease: AsyncIterator[str]) -> None:
        async for address in lease:
            self._items.put_nowait(address)

    async def __aiter__(self) -> AsyncIterator[str]:
        yield await self._items.get()

    def cancel(self) -> None:
        self._task.cancel()


class SilentLease:
    """No replica is free."""

    async def __aiter__(self) -> AsyncIterator[str]:
        await asyncio.sleep(3600)
        yield ""

    def cancel(self) -> None:
        pass


class Pool:
    """Replicas of one tier, leased in turn."""

    def __init__(self) -> None:
        self.replicas: list[Replica] = []
        self.num_leases = 0

    def __call__(self, session: str) -> HeldLease | SilentLease:
        self.num_leases += 1
        return HeldLease(self.replicas[self.num_leases % len(self.replicas)], session) if self.replicas else SilentLease()


class Replica:
    """One replica of a tier: what `deployments.tier.TierReplica` makes of it, with a toy model."""

    def __init__(self, name: str, level: int, model: ToyModel, pools: dict[str, Pool]) -> None:
        self.tier = Tier(name, level, model)
        self.downlink = Downlink(pools, self.tier.post, lease_timeout_s=0.5)
        self.tier.below = self.downlink
        self.server = LinkServer(self.tier)

    async def start(self) -> "Replica":
        self.tier.start()
        await self.server.start("127.0.0.1")
        return self

    async def stop(self) -> None:
        await self.server.stop()
        await self.downlink.close()
        await asyncio.to_thread(self.tier.close)

    @property
    def num_held(self) -> int:
        """Sessions, leases and sessions below: 0 when idle."""
        return self.tier.num_sessions + len(self.server.leases) + self.downlink.num_sessions


class House:
    """Pools of three tiers, and the router's end of the link to the full one."""

    def __init__(self) -> None:
        self.pools = {name: Pool() for name in NAMES}
        self.models = [ToyModel(agreement=0.6), ToyModel(agreement=0.8, pass_s=0.0005), ToyModel(pass_s=0.002)]
        self.inboxes: dict[str, asyncio.Queue[Message]] = {}
        self.downlink = Downlink(self.pools, self._hear, lease_timeout_s=0.5)
        self._started: list[Replica] = []

    async def add(self, name: str) -> Replica:
        level = NAMES.index(name)
        replica = await Replica(name, level, self.models[level], self.pools).start()
        self.pools[name].replicas.append(replica)
        self._started.append(replica)
        return replica

    async def kill(self, name: str) -> None:
        """All links to a replica break and its sessions are gone; nobody can lease it any more."""
        await self.pools[name].replicas.pop(0).stop()

    async def settle(self) -> None:
        await until(lambda: not self.downlink.num_sessions + sum(replica.num_held for replica in self._started))

    async def stop(self) -> None:
        await self.downlink.close()
        for replica in self._started:
            await replica.stop()

    def _hear(self, messages: Sequence[Message]) -> None:
        for message in messages:
            if message.session in self.inboxes:
                self.inboxes[message.session].put_nowait(message)


@pytest.fixture
async def house() -> AsyncIterator[House]:
    """Three tiers of one replica each; behind every test nothing is held anywhere."""
    house = House()
    for name in NAMES:
        await house.add(name)
    yield house
    await house.settle()
    await house.stop()
    assert not [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]


async def until(condition: Callable[[], bool], timeout_s: float = 20) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.01)


def opening(seed: int = 1, *, max_tokens: int = 60, chain: tuple[str, ...] = ("medium", "tiny")) -> Open:
    params = SamplingParams(max_tokens=max_tokens, temperature=1.0, seed=seed)
    return Open(mint(), PROMPT, len(PROMPT), params, tier="full", chain=chain, window=16, draft_window=8)


async def ask(house: House, first: Open, at: Callable[[int], object] = lambda num_tokens: None) -> list[int]:
    """The whole text, on as many full replicas as it takes; ``at`` is told after every proposal how long it is."""
    text, end = list(first.tokens), first.prompt_len + first.params.max_tokens
    while len(text) < end:
        one = replace(first, session=mint(), tokens=tuple(text))
        inbox = house.inboxes[one.session] = asyncio.Queue()
        house.downlink.send([one])
        while len(text) < end:
            message = await asyncio.wait_for(inbox.get(), 20)
            if isinstance(message, Failed):
                break
            assert isinstance(message, Proposal)
            new = message.tokens[len(text) - message.start :]
            if new:
                house.downlink.send([Commit(one.session, len(text), new)])
                text += new
            await maybe(at(len(text)))
        house.downlink.send([Close(one.session)])
    return text


async def maybe(result: object) -> None:
    if asyncio.iscoroutine(result):
        await result


def expected(house: House, first: Open) -> list[int]:
    return full_text(ToyModel(), first)


async def test_text_is_the_full_models(house: House) -> None:
    """Guards the wire: whatever tiers take part, what arrives over links is the full model's own text."""
    for chain in ((), ("tiny",), ("medium",), ("medium", "tiny")):
        first = opening(seed=len(chain), chain=chain)
        assert await ask(house, first) == expected(house, first)


async def test_crowd_shares_streams(house: House) -> None:
    """Guards sessions on one stream against each other, and against a stream for every session."""
    openings = [opening(seed) for seed in range(24)]
    texts = await asyncio.gather(*(ask(house, first) for first in openings))
    assert texts == [expected(house, first) for first in openings]
    assert len(house.downlink._streams) == 1


@pytest.mark.parametrize("name", NAMES)
async def test_broken_link_is_a_pause(house: House, name: str) -> None:
    """Guards against an error or another text when a replica of any tier goes away in the middle, with another at hand."""
    await house.add(name)
    first = opening(seed=3, max_tokens=200)
    killed = False

    async def kill(num_tokens: int) -> None:
        nonlocal killed
        if num_tokens > 60 and not killed:
            killed = True
            await house.kill(name)

    assert await ask(house, first, kill) == expected(house, first)
    assert killed


@pytest.mark.parametrize("name", ["tiny", "medium"])
async def test_tier_without_replicas_is_done_without(house: House, name: str) -> None:
    """Guards against waiting for ever for a drafter that cannot be leased."""
    await house.kill(name)
    first = opening(seed=4)
    assert await ask(house, first) == expected(house, first)


async def test_unreachable_replica_fails_its_sessions(house: House) -> None:
    """Guards against sessions that hang on a leased replica whose address does not answer."""
    [replica] = house.pools["full"].replicas
    address, replica.server.address = replica.server.address, "127.0.0.1:1"
    first = opening(max_tokens=10)
    inbox = house.inboxes[first.session] = asyncio.Queue()
    house.downlink.send([first])
    message = await asyncio.wait_for(inbox.get(), 10)
    assert isinstance(message, Failed)
    assert message.tier == "full"
    replica.server.address = address
    assert await ask(house, first) == expected(house, first)


async def test_message_that_cannot_be_encoded_breaks_the_link(house: House) -> None:
    """Guards against a writer that dies unseen: its sessions would wait for ever."""
    first = opening(max_tokens=1000)
    inbox = house.inboxes[first.session] = asyncio.Queue()
    house.downlink.send([first])
    assert isinstance(await asyncio.wait_for(inbox.get(), 10), Proposal)
    house.downlink.send([Commit(first.session, -1, (0,))])
    await until(lambda: house.downlink.num_sessions == 0)
    while not isinstance(inbox.get_nowait(), Failed):
        pass


async def test_close_before_the_lease_is_there(house: House) -> None:
    """Guards the race of a request that is cancelled while its lease is being taken."""
    for pause in (0, 0, 0.0005, 0.001, 0.002, 0.005, 0.01):
        first = opening()
        house.downlink.send([first])
        if pause:
            await asyncio.sleep(pause)
        house.downlink.send([Close(first.session)])
    await house.settle()


async def test_cancelled_lease_closes_the_session(house: House) -> None:
    """Guards against sessions that outlive the call by which Serve counts them."""
    first = opening(max_tokens=1000)
    house.inboxes[first.session] = asyncio.Queue()
    house.downlink.send([first])
    [replica] = house.pools["full"].replicas
    await until(lambda: replica.tier.num_sessions == 1)
    lease = house.downlink._routes[first.session].lease
    assert lease is not None
    lease.cancel()
    await until(lambda: replica.num_held == 0)
    house.downlink.send([Close(first.session)])


async def test_lease_that_nobody_uses_ends(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards the replica's capacity against holders that die between their lease and their Open."""
    monkeypatch.setattr(link, "OPEN_TIMEOUT_S", 0.1)
    [replica] = house.pools["full"].replicas
    lease = HeldLease(replica, "abandoned")
    assert await anext(aiter(lease)) == replica.server.address
    assert len(replica.server.leases) == 1
    await until(lambda: len(replica.server.leases) == 0)


async def test_session_without_lease_is_refused(house: House) -> None:
    """Guards the replica's limit against sessions that Serve does not know of, and lets nobody touch foreign sessions."""
    [replica] = house.pools["full"].replicas
    first = opening(max_tokens=1000)
    house.inboxes[first.session] = asyncio.Queue()
    house.downlink.send([first])
    await until(lambda: replica.tier.num_sessions == 1)
    async with grpc.aio.insecure_channel(replica.server.address) as channel:
        call = link_pb2_grpc.LinkStub(channel).Connect()
        stranger = replace(first, session="stranger")
        await call.write(encode([stranger, Close(first.session), first]))
        [refused, again] = decode(await call.read())
        assert isinstance(refused, Failed)
        assert isinstance(again, Failed)
        call.cancel()
    assert replica.tier.num_sessions == 1
    house.downlink.send([Close(first.session)])


@pytest.mark.parametrize(
    "batch",
    [
        pb.Batch(messages=[pb.Message(session="x")]),
        pb.Batch(messages=[pb.Message(session="x", open=pb.Open(tokens=[1], prompt_len=2))]),
        pb.Batch(messages=[pb.Message(session="x", proposal=pb.Proposal(tokens=[1, 2], origins=b"\0"))]),
        pb.Batch(messages=[pb.Message(session="x", open=pb.Open(tokens=[1], prompt_len=1))]),
    ],
    ids=["no kind", "no prompt", "history missing", "no sampling"],
)
async def test_malformed_batch_breaks_its_link_only(house: House, batch: pb.Batch) -> None:
    """Guards a replica against a neighbour that talks nonsense: the link ends, all others go on."""
    [replica] = house.pools["full"].replicas
    async with grpc.aio.insecure_channel(replica.server.address) as channel:
        call = link_pb2_grpc.LinkStub(channel).Connect()
        await call.write(batch)
        assert await call.read() is grpc.aio.EOF  # type: ignore[attr-defined]
    first = opening()
    assert await ask(house, first) == expected(house, first)


async def test_dead_caller_frees_everything(house: House) -> None:
    """Guards against sessions of a router that was killed: the broken link ends session and lease, down to the bottom."""
    stranger = Downlink(house.pools, lambda messages: None)
    stranger.send([opening(max_tokens=1000)])
    [replica] = house.pools["tiny"].replicas
    await until(lambda: replica.tier.num_sessions == 1)
    for stream in stranger._streams.values():
        assert stream.task is not None
        stream.task.cancel()  # the connection breaks; nobody cancels the lease
    await house.settle()
    await stranger.close()


# the codec

ids = st.integers(0, 2**32 - 1)
tokens = st.lists(ids, min_size=1, max_size=20).map(tuple)
counts = st.integers(0, 2**32 - 1)
edges = st.builds(Edge, st.text(), st.text(), counts, counts, counts, counts, st.floats(0, 1e6))
sampling = st.builds(
    SamplingParams,
    max_tokens=st.integers(1, 2**31),
    temperature=st.floats(0, 100),
    top_k=st.integers(0, 2**31 - 1),
    top_p=st.floats(0, 1, exclude_min=True),
    min_p=st.floats(0, 1),
    seed=st.integers(0, 2**63 - 1),
)


@st.composite
def opens(draw: st.DrawFn) -> Open:
    text = draw(tokens)
    return Open(
        draw(st.text(min_size=1)),
        text,
        draw(st.integers(1, len(text))),
        draw(sampling),
        draw(st.frozensets(ids, max_size=4)),
        draw(st.text()),
        tuple(draw(st.lists(st.text(), max_size=4))),
        draw(st.integers(1, 4096)),
        draw(st.integers(1, 256)),
        draw(st.booleans()),
    )


@st.composite
def proposals(draw: st.DrawFn) -> Proposal:
    said = draw(tokens)
    history = draw(st.binary(min_size=len(said), max_size=len(said)))
    return Proposal("s", draw(ids), said, history, tuple(draw(st.lists(edges, max_size=3))))


messages = st.one_of(
    opens(),
    proposals(),
    st.builds(Commit, st.text(), ids, tokens),
    st.builds(Close, st.text()),
    st.builds(Failed, st.text(), st.text(), st.text()),
)


@given(st.lists(messages, max_size=5))
def test_codec_round_trip(batch: list[Message]) -> None:
    """Guards every field of every message on the wire: a dropped one would change texts or mislead the tiers."""
    arrived = decode(pb.Batch.FromString(encode(batch).SerializeToString()))
    assert arrived == batch
    for sent, got in zip(batch, arrived, strict=True):
        if isinstance(sent, Proposal):
            assert isinstance(got, Proposal)
            assert got.edges == sent.edges  # left out of equality
