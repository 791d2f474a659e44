"""Text over links, and what dies: the laws of `Downlink` and `LinkServer` together."""

import asyncio
import threading
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from cascade.errors import ConfigError, Unavailable
from cascade.messages import Close, Failed, Message, Proposal
from cascade.params import Structured
from cascade.scorer import Row
from cascade.simulation.toy import ToyModel, full_text
from cascade.tier import runner
from deployments.links import uplink
from deployments.links.downlink import Downlink
from deployments.links.leases import LeasePool
from deployments.links.uplink import CHANNEL_OPTIONS, LinkServer
from deployments.ops.launch import free_port
from tests.links.net import Net, Node, drafted, opening, relay
from tests.tier.test_tier import CountingModel
from tests.waiting import LONG_S, until


@pytest.mark.parametrize("temperature", [0.0, 1.0])
async def test_text_is_the_full_models(net: Net, temperature: float) -> None:
    """Guards losslessness over real links, and everything a finished request holds."""
    request = opening(3, temperature, 80)
    text, answer = await net.text(request)
    assert text == full_text(ToyModel(), request.spec)
    assert drafted(answer)["medium"] > 0
    assert any(edge.verifier == "medium" and edge.drafter == "tiny" for edge in answer.edges)
    assert net.failures == []
    await net.settle()


async def test_many_sessions_share_a_stream(net: Net) -> None:
    """Guards sessions of one stream against each other, and against a stream for each session."""
    requests = [opening(seed, 0.8, 15, chain=(("medium", "tiny"), ("tiny",), ())[seed % 3]) for seed in range(18)]
    answers = await asyncio.gather(*(net.text(request) for request in requests))
    for request, (text, _) in zip(requests, answers, strict=True):
        assert text == full_text(ToyModel(), request.spec)
    assert len(net.router._mailboxes) == 1
    assert len(net.nodes["full"].downlink._mailboxes) == 2
    assert net.failures == []
    await net.settle()


@pytest.mark.parametrize(
    ("needed", "refused"),
    [
        ({"structured": Structured(regex="a+")}, "its model came without a tokenizer"),
        ({"adapter": "red"}, None),
    ],
)
async def test_what_a_session_waits_for_holds_nobody_up(net: Net, needed: dict[str, Any], refused: str | None) -> None:
    """Guards the sessions beside it: grammars compiled on the tier's own loop, and adapters were fetched inside a pass, so that
    everybody's passes waited."""
    ready, full = threading.Event(), net.nodes["full"]
    full.server._prepare = lambda params: ready.wait(LONG_S)
    plain = opening(4, 0.0, 40)
    held = opening(params=replace(plain.spec.params, **needed))
    inbox = net._inboxes[held.session] = asyncio.Queue()
    net.router.put([held])
    await until(lambda: held.session in full.server._held)
    text, _ = await net.text(plain)
    assert text == full_text(ToyModel(), plain.spec)
    assert inbox.empty()
    ready.set()
    said = await asyncio.wait_for(inbox.get(), LONG_S)
    if refused is None:
        assert isinstance(said, Proposal)
        net.router.put([Close(held.session)])
    else:
        assert isinstance(said, Failed)
        assert refused in said.reason
    await net.settle()
    await asyncio.get_running_loop().shutdown_default_executor()


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
    assert text == full_text(ToyModel(), request.spec)
    assert new.tier.stats.own_tokens > 0
    assert drafted(answer).keys() >= {"medium", "tiny"}
    assert net.failures == []
    await net.settle()
    assert old.occupied[0] == old.occupied[3] == 0


async def test_dead_full_replica_is_replaced(net: Net) -> None:
    """Guards the caller's side: a link that breaks is told as Failed, and a replay on another replica gives the same text."""
    request = opening(6, 1.0, 100)
    running = asyncio.create_task(net.text(request))
    old = net.nodes["full"]
    await until(lambda: old.tier.stats.own_tokens > 20)
    await old.stop()
    await net.add("full", pass_s=0.004)
    text, _ = await running
    assert text == full_text(ToyModel(), request.spec)
    assert net.failures
    assert all(failure.reason for failure in net.failures)
    await net.settle()


class Hanging(CountingModel):
    """Passes wait for `works`, as on a device that no longer answers."""

    def __init__(self, **options: float) -> None:
        super().__init__(**options)
        self.works = threading.Event()
        self.works.set()

    def launch(self, rows: Sequence[Row]) -> Sequence[Row]:
        self.works.wait()
        return super().launch(rows)


async def test_sessions_leave_a_replica_whose_pass_hangs(empty: Net, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards requests, and health, against a pass that does not end: the replica was healthy, its requests ended with 503."""
    monkeypatch.setattr(runner, "GRACE_S", 0.3)
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
    assert text == full_text(ToyModel(), request.spec)
    old.tier.close()  # which does not wait for it
    model.works.set()
    await until(lambda: not old.tier._thread.is_alive())
    assert not old.tier.hangs
    await old.stop()
    await empty.settle()
    assert old.occupied == (0, 0, 0, 0)


async def test_nobody_at_the_address_fails_the_session(empty: Net) -> None:
    """Guards against waiting for a replica that has died between its lease and the link."""
    node = await empty.add("full")
    await node.server.stop()
    failed = asyncio.Queue[Message]()
    downlink = Downlink(LeasePool({"full": empty.lessor("full")}), lambda messages: [failed.put_nowait(m) for m in messages])
    request = opening(chain=())
    downlink.send([request])
    message = await asyncio.wait_for(failed.get(), LONG_S)
    assert isinstance(message, Failed)
    assert (message.session, message.tier) == (request.session, "full")
    assert downlink.num_sessions == 0
    await downlink.close()
    await empty.settle()


async def test_host_that_vanishes_fails_its_sessions(empty: Net, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against waiting for a host whose connection stays: the timeout of keepalives alone does nothing in gRPC 1.85."""
    sooner = {"grpc.keepalive_time_ms": 250, "grpc.http2.ping_timeout_ms": 250}
    quick = [(name, sooner.get(name, value)) for name, value in CHANNEL_OPTIONS]
    monkeypatch.setattr("deployments.links.downlink.CHANNEL_OPTIONS", quick)
    node = await empty.add("full")
    async with relay(node.server.address) as (address, die):
        monkeypatch.setattr(node.server, "address", address)
        heard: list[Message] = []
        downlink = Downlink(LeasePool({"full": empty.lessor("full")}), heard.extend)
        downlink.send([opening(chain=(), window=4)])
        await until(lambda: len(heard) > 0)
        die()
        await until(lambda: isinstance(heard[-1], Failed), lambda: heard)
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
    for server in servers:
        await server.stop()
