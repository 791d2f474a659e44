"""Peers that do not keep the protocol, and strangers."""

import asyncio
import contextlib
from collections.abc import Callable
from dataclasses import replace

import grpc
import pytest

from cascade.answer import Answer
from cascade.client.rpc import LINK, stub_of
from cascade.messages import Close, Commit, Failed, Proposal
from cascade.v1 import link_pb2 as pb
from deployments.links.codec import encode
from tests.links.net import Held, Net, Peer, Rogue, drafted, entry, opening, serve_raw
from tests.tier.test_tier import PROMPT, Silent
from tests.toys import ToyModel, full_text
from tests.waiting import LONG_S, until


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
    assert rogue.asked
    assert drafted(answer)["tiny"] > 0
    assert net.failures == []
    await server.stop(0)
    await net.settle()


@pytest.mark.parametrize("said", [(), (("authorization", "Bearer wrong"),)])
async def test_strangers_are_not_let_in(net: Net, said: tuple[tuple[str, str], ...]) -> None:
    """Guards the tiers against whoever reaches their ports: without the secret that a lease brings there is no link."""
    node = net.nodes["full"]
    lease = Held(node.server.lease("stranger"))
    net.leases.append(lease)
    await anext(lease)
    async with grpc.aio.insecure_channel(node.server.address) as channel:
        call = stub_of(channel, LINK).Connect(metadata=said)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call.read()
    assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
    assert node.tier.num_sessions == 0
    lease.cancel()
    await net.check(opening(15, 0.0, 20))
