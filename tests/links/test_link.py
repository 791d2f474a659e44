"""Text over links, and what dies: the laws of `Downlink` and `LinkServer` together."""

import asyncio
import threading
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from cascade.errors import ConfigError
from cascade.messages import Close, Failed, Message, Proposal
from cascade.params import Structured
from cascade.scorer import Row
from cascade.tier import runner
from deployments.links import uplink
from deployments.links.downlink import Downlink
from deployments.links.leases import LeasePool
from deployments.links.uplink import CHANNEL_OPTIONS, LinkServer
from deployments.ops.launch import free_port
from tests.links.net import Net, Node, drafted, leave_hanging, opening, relay
from tests.tier.test_tier import CountingModel
from tests.toys import ToyModel, full_text
from tests.waiting import LONG_S, until


@pytest.mark.parametrize("temperature", [0.0, 1.0])
async def test_text_is_the_full_models(net: Net, temperature: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards losslessness over real links, and everything a finished request holds; and nodes with proxies for the web in their
    environment, which gRPC asked for every replica, so that no link came about."""
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
    ("needed", "refused"),
    [({"structured": Structured(regex="a+")}, "its model came without a tokenizer"), ({"adapter": "red"}, None)],
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
    await net.check(plain)
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


@pytest.mark.parametrize("dead", ["medium", "full"])
async def test_a_dead_replica_is_a_pause(net: Net, dead: str) -> None:
    """Guards against a hang, another text or a session that stays slow when a replica dies and comes back elsewhere.

    Of the full tier's the caller is told with a reason, and replays the text; a drafter is done without meanwhile."""
    running = asyncio.create_task(net.check(opening(5, 0.5, 250)))
    old = net.nodes[dead]
    await until(lambda: old.tier.stats.own_tokens > 20)
    await old.stop()
    if dead == "medium":
        await until(lambda: net.nodes["full"].downlink.num_sessions == 1)
    new = await net.add(dead, pass_s=0.001, agreement=0.8 if dead == "medium" else 1.0)
    answer = await running
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
    """Guards requests, and health, against a pass that does not end: the replica was healthy, its requests ended with 503."""
    monkeypatch.setattr(runner, "GRACE_S", 0.3)
    monkeypatch.setattr(uplink, "REFUSAL_S", 0.0)
    model, request = Hanging(pass_s=0.004), opening(6, 1.0, 100)
    old = Node(2, model, {})
    text = await leave_hanging(empty, request, old, Node(2, CountingModel(), {}), model.answers)
    assert text == full_text(ToyModel(), request.spec)
    await empty.settle()
    assert old.occupied == (0, 0, 0, 0)


@pytest.mark.parametrize("when", ["before it is joined", "while it writes"])
async def test_a_replica_that_vanishes_fails_its_sessions(empty: Net, when: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against waiting for a replica that has died between its lease and the link, and for a host whose connection stays:
    the timeout of keepalives alone does nothing in gRPC 1.85."""
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
    for server in servers:
        await server.stop()
