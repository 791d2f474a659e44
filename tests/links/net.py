"""Links and leases without Ray: tiers in one process, joined by real gRPC streams; lessors ask the link servers themselves."""

import asyncio
import contextlib
import socket
import struct
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

import grpc
import pytest

from cascade.answer import Answer
from cascade.client.rpc import LINK, stub_of
from cascade.engine.grammar import Grammars
from cascade.engine.sampling.state import state_maker
from cascade.messages import Close, Failed, Message, Open, mint
from cascade.settings.config import LinkTLS
from cascade.tier.tier import Tier
from cascade.v1 import link_pb2 as pb
from deployments.links.codec import decode, encode
from deployments.links.downlink import Downlink
from deployments.links.leases import Lease, LeasePool, Lessor
from deployments.links.uplink import LinkServer, authorization
from deployments.ops.tracing import UNTRACED, Tracing
from tests.tier.test_tier import NAMES, CountingModel, Silent
from tests.tier.test_tier import opening as any_opening
from tests.toys import ToyModel, full_text
from tests.waiting import LONG_S, until

SHORT_S = 0.2


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
    def __init__(
        self,
        level: int,
        model: CountingModel,
        lessors: dict[str, Lessor],
        grammars: Grammars | None = None,
        tls: LinkTLS | None = None,
        tracing: Tracing = UNTRACED,
    ) -> None:
        self.model = model
        self.tier = Tier(NAMES[level], level, model, new_state=state_maker(None if grammars is None else grammars.matcher))
        self.downlink = Downlink(LeasePool(lessors), self.tier.post, tls=tls, tracing=tracing)
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
        kept = len(self.tier.kv_admission.block_manager._kept)  # for reuse
        stores = self.model.leaks - kept
        return self.tier.num_sessions, len(self.server.leases), self.downlink.num_sessions, stores


class Net:
    """Replicas by tier, and a router that asks the full one."""

    def __init__(self, tls: LinkTLS | None = None) -> None:
        self.tls = tls
        self.nodes: dict[str, Node] = {}
        self.leases: list[Held] = []
        self.refused: set[str] = set()
        self.failures: list[Failed] = []
        self._inboxes: dict[str, asyncio.Queue[Message]] = {}
        self.router = Downlink(LeasePool({"full": self.lessor("full")}), self._hear, tls=tls)

    async def add(self, name: str, *, pass_s: float = 0.0, agreement: float = 1.0) -> Node:
        level = NAMES.index(name)
        lessors = {below: self.lessor(below) for below in NAMES[:level]}
        node = self.nodes[name] = Node(level, CountingModel(agreement=agreement, pass_s=pass_s), lessors, tls=self.tls)
        await node.start()
        return node

    def lessor(self, name: str) -> Lessor:
        """Whatever replica the tier has when it is asked."""

        def take(session: str, preferred: Sequence[str] = (), affinity: str = "") -> Lease:
            if name in self.refused:
                raise RuntimeError("all replicas are busy")
            lease = Held(self.nodes[name].server.lease(session))
            self.leases.append(lease)
            return lease

        return take

    def ticket(self, address: str) -> Held:
        """A lease on whoever is at ``address``."""

        async def tickets() -> AsyncIterator[str]:
            yield f"{address} secret"
            await asyncio.Event().wait()

        self.leases.append(Held(tickets()))
        return self.leases[-1]

    async def text(self, request: Open) -> tuple[list[int], Answer]:
        """Drive a request as the router does."""
        answer, current = Answer(request.spec, Silent()), request
        while not answer.finished:
            inbox = self._inboxes[current.session] = asyncio.Queue()
            self.router.put([current])
            while not answer.finished:
                message = await asyncio.wait_for(inbox.get(), LONG_S)
                if isinstance(message, Failed):
                    self.failures.append(message)
                    assert len(self.failures) < 100, message
                    await asyncio.sleep(0.01)
                    break
                _, commit = answer.receive(message)
                if commit is not None:
                    self.router.put([commit])
            self.router.put([Close(current.session)])
            del self._inboxes[current.session]
            current = Open(mint(), answer.spec.after(answer.tokens))
        return [*request.spec.tokens, *answer.tokens], answer

    async def check(self, request: Open) -> Answer:
        """Drive a request, whose text is that of the full toy."""
        text, answer = await self.text(request)
        assert text == full_text(ToyModel(), request.spec)
        return answer

    async def settle(self) -> None:
        nothing = {"router": (0,), **dict.fromkeys(self.nodes, (0,) * 4)}
        await until(lambda: self.occupied == nothing and all(lease.task.done() for lease in self.leases), lambda: self.occupied)

    @property
    def occupied(self) -> dict[str, tuple[int, ...]]:
        return {"router": (self.router.num_sessions,), **{name: node.occupied for name, node in self.nodes.items()}}

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


def threads() -> set[threading.Thread]:
    """All but the one by which grpc.aio waits for events, which it keeps."""
    return {thread for thread in threading.enumerate() if "_poll_wrapper" not in thread.name}


@pytest.fixture
async def tidy() -> AsyncIterator[None]:
    """Guards every test against tasks and threads that outlive their owners."""
    tasks_before, threads_before = asyncio.all_tasks(), threads()
    yield
    expected = tasks_before | {asyncio.current_task()}
    await until(lambda: not asyncio.all_tasks() - expected, lambda: asyncio.all_tasks() - expected)
    assert threads() <= threads_before


@pytest.fixture
async def empty(tidy: None) -> AsyncIterator[Net]:
    net = Net()
    yield net
    await net.close()


@pytest.fixture
async def net(empty: Net) -> Net:
    await empty.add("tiny", pass_s=0.0002, agreement=0.6)
    await empty.add("medium", pass_s=0.001, agreement=0.8)
    await empty.add("full", pass_s=0.004)
    return empty


def opening(seed: int = 1, temperature: float = 1.0, max_tokens: int = 40, **options: object) -> Open:
    return any_opening(seed, temperature, max_tokens, **{"tier": "full", **options})


def drafted(answer: Answer) -> dict[str, int]:
    """Passes of the full tier by drafter."""
    return {edge.drafter: edge.passes for edge in answer.edges if edge.verifier == "full"}


@contextlib.asynccontextmanager
async def relay(address: str, room: Callable[[], int] = lambda: 2**60) -> AsyncIterator[tuple[str, Callable[[], None]]]:
    """A network in front of a node: its address, and what lets nothing through from then on, without a word.

    Each connection is reset, as by the kernel for a process that was killed, after as many bytes of answers as ``room`` says.
    """
    dead, ends, joining = asyncio.Event(), list[asyncio.StreamWriter](), set[Any]()

    async def pump(source: asyncio.StreamReader, sink: asyncio.StreamWriter, room: int = 2**60) -> None:
        while room > 0 and (data := await source.read(min(room, 2**16))):
            if not dead.is_set():
                sink.write(data)
            room -= len(data)

    def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        ends.append(writer)  # at once: a task may be cancelled before it begins
        joining.add(asyncio.create_task(connect(reader, writer)))

    async def connect(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there, back = await asyncio.open_connection(*address.split(":"))
        ends.append(back)
        sending = asyncio.create_task(pump(reader, back))
        joining.add(sending)
        await pump(there, writer, room())
        for end in (writer, back):
            end.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            end.transport.abort()

    async with await asyncio.start_server(accept, "127.0.0.1", 0) as server:
        yield f"127.0.0.1:{server.sockets[0].getsockname()[1]}", dead.set
        for listening in server.sockets:  # asyncio drops a connection, unclosed, whose transport is made after `close`
            asyncio.get_running_loop().remove_reader(listening.fileno())
        await asyncio.sleep(0.01)  # what has been accepted reaches `accept`: gRPC may just have come again
        server.close()
        for task in joining:
            task.cancel()
        await asyncio.gather(*joining, return_exceptions=True)
        for end in ends:
            end.transport.abort()
        await asyncio.gather(*(end.wait_closed() for end in ends), return_exceptions=True)


def entry(node: Node) -> tuple[tuple[str, str], ...]:
    return (("authorization", authorization(node.server.secret)),)


class Rogue:
    """A replica that answers every batch with the same bytes."""

    def __init__(self, reply: Callable[[str], bytes]) -> None:
        self._reply = reply
        self.num_calls = 0

    async def Connect(self, request_iterator: AsyncIterator[pb.Batch], context: Any) -> None:
        async for batch in request_iterator:
            self.num_calls += 1
            await context.write(self._reply(batch.messages[0].session))


async def serve_raw(rogue: Rogue) -> tuple[grpc.aio.Server, str]:
    server = grpc.aio.server()
    method = grpc.stream_stream_rpc_method_handler(rogue.Connect, pb.Batch.FromString, lambda data: data)
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("cascade.v1.Link", {"Connect": method}),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    return server, f"127.0.0.1:{port}"


class Peer:
    """The caller's end of a link, by hand."""

    def __init__(self, node: Node, net: Net) -> None:
        self._node, self._net = node, net
        self._arrived: list[Message] = []

    async def __aenter__(self) -> "Peer":
        self._channel = grpc.aio.insecure_channel(self._node.server.address)
        self.call = stub_of(self._channel, LINK).Connect(metadata=entry(self._node))
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
        if not self._arrived:
            self._arrived += decode(await asyncio.wait_for(self.call.read(), LONG_S))
        return self._arrived.pop(0)
