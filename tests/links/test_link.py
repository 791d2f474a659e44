"""Text over links, and what dies: the laws of `Downlink` and `LinkServer` together."""

import asyncio
import contextlib
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import grpc
import pytest

from cascade.answer import Answer
from cascade.client.rpc import LINK, stub_of
from cascade.errors import ConfigError, Unavailable
from cascade.messages import Close, Commit, Failed, Message, Proposal
from cascade.params import SamplingParams, Structured
from cascade.scorer import Row
from cascade.tier import runner
from cascade.v1 import link_pb2 as pb
from deployments.links import uplink
from deployments.links.codec import encode
from deployments.links.downlink import Downlink
from deployments.links.leases import LeasePool
from deployments.links.uplink import CHANNEL_OPTIONS, LinkServer
from deployments.ops.launch import free_port
from tests.links.net import Held, Net, Node, Peer, Rogue, drafted, entry, opening, relay, serve_raw
from tests.tier.test_tier import PROMPT, CountingModel, Silent
from tests.toys import ToyModel, full_text
from tests.waiting import LONG_S, until


@pytest.mark.parametrize("temperature", [0.0, 1.0])
async def test_text_is_the_full_models(net: Net, temperature: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards losslessness over real links, and nodes with a proxy for the web, which gRPC asked for every replica."""
    for name in ("http_proxy", "https_proxy", "grpc_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    for name in ("no_proxy", "no_grpc_proxy"):
        monkeypatch.delenv(name, raising=False)
    answer = await net.check(opening(3, temperature, 80))
    assert drafted(answer)["medium"] > 0
    assert any(edge.verifier == "medium" and edge.drafter == "tiny" for edge in answer.edges)
    assert net.failures == []
    await net.settle()


async def test_many_sessions_share_a_stream(net: Net) -> None:
    """Guards sessions of one stream against each other, and against a stream for each session."""
    chains = (("medium", "tiny"), ("tiny",), ())
    await asyncio.gather(*(net.check(opening(seed, 0.8, 15, chain=chains[seed % 3])) for seed in range(18)))
    assert len(net.router._mailboxes) == 1
    assert len(net.nodes["full"].downlink._mailboxes) == 2
    assert net.failures == []
    await net.settle()


@pytest.mark.parametrize(
    ("needed", "refused"), [({"structured": Structured(regex="a+")}, "came without a tokenizer"), ({"adapter": "red"}, None)]
)
async def test_what_a_session_waits_for_holds_nobody_up(net: Net, needed: dict[str, Any], refused: str | None) -> None:
    """Guards the sessions beside it: everybody's passes waited for a grammar to be compiled, or an adapter to be fetched."""
    ready, full = threading.Event(), net.nodes["full"]
    full.server._prepare = lambda params: ready.wait(LONG_S)
    plain = opening(4, 0.0, 40)
    held = opening(params=replace(plain.spec.params, **needed))
    inbox = net._inboxes[held.session] = asyncio.Queue()
    net.router.put([held])
    await until(lambda: held.session in full.server._held)
    await net.check(plain)
    assert inbox.empty()
    ready.set()
    message = await asyncio.wait_for(inbox.get(), LONG_S)
    if refused is None:
        assert isinstance(message, Proposal)
        net.router.put([Close(held.session)])
    else:
        assert refused in message.reason
    await net.settle()
    await asyncio.get_running_loop().shutdown_default_executor()


async def test_what_cannot_be_prepared_is_left_to_the_tier(net: Net) -> None:
    """Guards requests against a full disk: a session whose adapter could not be copied was neither served nor refused."""

    def raises(params: SamplingParams) -> None:
        raise OSError("No space left on device")

    net.nodes["full"].server._prepare = raises
    plain = opening(4, 0.0, 40)
    await net.check(opening(params=replace(plain.spec.params, adapter="red")))
    assert net.failures == []
    await net.settle()
    await asyncio.get_running_loop().shutdown_default_executor()


# deaths


@pytest.mark.parametrize("dead", ["medium", "full"])
async def test_a_dead_replica_is_a_pause(net: Net, dead: str) -> None:
    """Guards against a hang, another text, log-probabilities that are lost, or a session that stays slow after a death."""
    params = SamplingParams(seed=5, temperature=0.5, max_tokens=250, logprobs=1)
    running = asyncio.create_task(net.check(opening(params=params)))
    old = net.nodes[dead]
    await until(lambda: old.tier.stats.own_tokens > 20)
    await old.stop()
    if dead == "medium":
        await until(lambda: net.nodes["full"].downlink.num_sessions == 1)
    new = await net.add(dead, pass_s=0.001, agreement=0.8 if dead == "medium" else 1.0)
    answer = await running
    assert len(answer.logprobs) == len(answer.tokens)
    assert new.tier.stats.own_tokens > 0
    assert bool(net.failures) == (dead == "full")
    assert all(failure.reason for failure in net.failures)
    assert drafted(answer).keys() >= ({"medium", "tiny"} if dead == "medium" else {"medium"})
    await net.settle()
    assert old.occupied[0] == old.occupied[3] == 0


class Hanging(CountingModel):
    """Passes wait for `answers`, as on a device that no longer does."""

    def __init__(self, **options: float) -> None:
        super().__init__(**options)
        self.answers = threading.Event()
        self.answers.set()

    def launch(self, rows: Sequence[Row]) -> Sequence[Row]:
        self.answers.wait()
        return super().launch(rows)


async def test_sessions_leave_a_replica_whose_pass_hangs(empty: Net, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards requests, and health, against a pass that does not end: the replica was healthy, its requests ended with 503.

    One whose loop has stopped gave leases, and the sessions that came failed one after another.
    """
    monkeypatch.setattr(runner, "GRACE_S", 0.3)
    monkeypatch.setattr(uplink, "REFUSAL_S", 0.0)
    model, request = Hanging(pass_s=0.004), opening(6, 1.0, 100)
    old, new = Node(2, model, {}), Node(2, CountingModel(), {})
    empty.nodes["full"] = old
    await old.start()
    running = asyncio.create_task(empty.check(request))
    await until(lambda: old.tier.stats.own_tokens > 5)
    assert old.tier.healthy
    model.answers.clear()
    await until(lambda: not old.tier.healthy)
    with pytest.raises(Unavailable, match="is broken"):
        await anext(old.server.lease("late"))
    empty.nodes["full"] = new
    await new.start()
    await running
    old.tier.close()  # which does not wait for it
    model.answers.set()
    await until(lambda: not old.tier._thread.is_alive())
    with pytest.raises(Unavailable, match="is broken"):  # though it hangs no more
        await anext(old.server.lease("later"))
    await old.stop()
    await empty.settle()
    assert old.occupied == (0, 0, 0, 0)


@pytest.mark.parametrize("when", ["before it is joined", "while it writes"])
async def test_a_replica_that_vanishes_fails_its_sessions(empty: Net, when: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against waiting for a replica that died before its link, and for a host whose connection stays."""
    sooner = {"grpc.keepalive_time_ms": 250, "grpc.http2.ping_timeout_ms": 250}
    quick = [(name, sooner.get(name, value)) for name, value in CHANNEL_OPTIONS]
    monkeypatch.setattr("deployments.links.downlink.CHANNEL_OPTIONS", quick)
    node, heard, request = await empty.add("full"), list[Message](), opening(chain=(), window=4)
    downlink = Downlink(LeasePool({"full": empty.lessor("full")}), heard.extend)
    async with relay(node.server.address) as (address, die):
        if when == "while it writes":
            monkeypatch.setattr(node.server, "address", address)
            downlink.send([request])
            await until(lambda: len(heard) > 0)
            die()
        else:
            await node.server.stop()
            downlink.send([request])
        await until(lambda: bool(heard) and isinstance(heard[-1], Failed), lambda: heard)
        assert (heard[-1].session, heard[-1].tier) == (request.session, "full")
        assert downlink.num_sessions == 0
        await downlink.close()
    await empty.settle()


async def test_links_keep_to_their_ports(net: Net) -> None:
    """Guards firewalls: replicas of one machine share the ports that are named, one each, and take no other."""
    first = free_port()
    ports = (first, first + 1)
    servers = [LinkServer(net.nodes["full"].tier, ports=ports) for _ in range(3)]
    for server in servers[:2]:
        await server.start("127.0.0.1")
    assert {server.address for server in servers[:2]} == {f"127.0.0.1:{port}" for port in ports}
    with pytest.raises(ConfigError, match=r"link_ports are .*, and none of them is free at 127\.0\.0\.1"):
        await servers[2].start("127.0.0.1")
    for elsewhere in (LinkServer(net.nodes["full"].tier), servers[2]):  # the sentence blamed `link_ports`, even if not given
        with pytest.raises(ConfigError, match=r"address of this node is 192\.0\.2\.1, where nothing can listen"):
            await elsewhere.start("192.0.2.1")
    for server in servers:
        await server.stop()


async def test_large_batches_are_taken(net: Net) -> None:
    """Guards all sessions of a link: long texts that went to a replica at once, as where another died, broke it."""
    async with Peer(net.nodes["full"], net) as peer:
        await peer.say(opening(cache_salt="x" * 2**26))
        assert "lease" in (await peer.answer()).reason


async def test_what_a_newer_router_asks_is_honoured_or_left_to_newer_replicas(net: Net) -> None:
    """Guards texts during an update: a replica of before left out a parameter that it did not know, without a word."""
    async with Peer(net.nodes["full"], net) as peer:
        await peer.lease("newer")
        batch = encode([replace(opening(chain=()), session="newer")])
        batch.messages[0].open.sampling.MergeFromString(b"\xf8\x07\x01")  # field 127
        await peer.call.write(batch)
        failed = await peer.answer()
        assert isinstance(failed, Failed)
        assert (failed.session, failed.fault) == ("newer", False)
        assert "parameters that this replica does not know" in failed.reason


# peers that do not keep the protocol, and strangers


async def test_session_without_a_lease_is_refused(net: Net) -> None:
    """Guards Serve's view of the load: nobody gets in without a lease, nor over a link that does not own the session."""
    good = asyncio.create_task(net.check(opening(13, 0.0, 60)))
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
    await good
    assert net.failures == []
    await net.settle()


MALFORMED: dict[str, Callable[[str], bytes]] = {  # refused by `decode`, see test_codec, and by gRPC before it
    "no kind": lambda session: pb.Batch(messages=[pb.Message(session=session)]).SerializeToString(),
    "no batch": lambda session: b"\xff" * 40,
}


@pytest.mark.parametrize("kind", MALFORMED)
async def test_malformed_batch_breaks_its_own_link_only(net: Net, kind: str) -> None:
    """Guards a replica, and the requests of other callers, against a caller that speaks nonsense."""
    good = asyncio.create_task(net.check(opening(15, 0.0, 40)))
    node = net.nodes["full"]
    await until(lambda: node.tier.num_sessions == 1)
    async with grpc.aio.insecure_channel(node.server.address) as channel:
        call = channel.stream_stream("/cascade.v1.Link/Connect")(metadata=entry(node))  # of bytes
        for session in ("bystander", "spoilt"):
            lease = Held(node.server.lease(session))
            net.leases.append(lease)
            await anext(lease)
        bystander = replace(opening(16, chain=()), session="bystander")
        await call.write(encode([bystander]).SerializeToString())
        await call.read()
        await call.write(MALFORMED[kind]("spoilt"))
        with contextlib.suppress(grpc.aio.AioRpcError):
            async with asyncio.timeout(LONG_S):
                while await call.read() is not grpc.aio.EOF:
                    pass
    await good
    assert net.failures == []
    await until(lambda: node.tier.num_sessions == 0)
    assert node.tier.healthy
    await until(lambda: len(node.server.leases) <= 1)  # the bystander's has ended
    for lease in net.leases:
        lease.cancel()  # the one of the session that was never opened ends by itself, later
    await net.settle()


async def test_commit_that_does_not_join_ends_its_session_only(net: Net) -> None:
    """Guards the other sessions of a link, and the link, against a commit that makes no sense."""
    node = net.nodes["full"]
    async with Peer(node, net) as peer:
        for session in ("bad", "good"):
            await peer.lease(session)
        good = replace(opening(17, 0.0, 20, chain=()), session="good")
        await peer.say(replace(opening(18, 0.0, 20, window=1), session="bad"), Commit("bad", 4000, (1,)), good)
        answer, failed = Answer(good.spec, Silent()), None
        while not (answer.finished and failed):
            message = await peer.answer()
            if isinstance(message, Failed):
                failed = message
            elif isinstance(message, Proposal) and message.session == "good":
                answer.receive(message)
        assert failed.session == "bad"
        assert "does not join" in failed.reason
        assert [*PROMPT, *answer.tokens] == full_text(ToyModel(), good.spec)
        await peer.say(Close("good"))
        await net.settle()


@pytest.mark.parametrize("kind", MALFORMED)
async def test_malformed_answers_cost_only_the_drafter(net: Net, kind: str) -> None:
    """Guards a tier against a drafter that speaks nonsense: the request goes on without it."""
    rogue = Rogue(MALFORMED[kind])
    server, address = await serve_raw(rogue)

    below = net.nodes["full"].downlink.leases
    below.lessors = {**below.lessors, "medium": lambda *of: net.ticket(address)}
    answer = await net.check(opening(19, 0.0, 40))
    assert rogue.num_calls
    assert drafted(answer)["tiny"] > 0
    assert net.failures == []
    await server.stop(0)
    await net.settle()


@pytest.mark.parametrize("metadata_", [(), (("authorization", "Bearer wrong"),)])
async def test_strangers_are_not_let_in(net: Net, metadata_: tuple[tuple[str, str], ...]) -> None:
    """Guards the tiers against whoever reaches their ports: without the secret that a lease brings there is no link."""
    node = net.nodes["full"]
    lease = Held(node.server.lease("stranger"))
    net.leases.append(lease)
    await anext(lease)
    async with grpc.aio.insecure_channel(node.server.address) as channel:
        call = stub_of(channel, LINK).Connect(metadata=metadata_)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call.read()
    assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
    assert node.tier.num_sessions == 0
    lease.cancel()
    await net.check(opening(15, 0.0, 20))
