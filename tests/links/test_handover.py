"""Replicas that are replaced while they write: their sessions go on at others before they end. Without Ray."""

import asyncio
from collections.abc import AsyncIterator

import pytest

from benchmarks.toy import ToyModel, full_text
from deployments.links import uplink
from deployments.links.uplink import Handover
from tests.links.net import Net, opening
from tests.waiting import LONG_S, until

PERIOD_S = 0.02


@pytest.fixture
async def net() -> AsyncIterator[Net]:
    """All tiers, slow enough for something to happen in the middle of a request."""
    net = Net()
    try:
        for name, pass_s, agreement in (("tiny", 0.0005, 0.6), ("medium", 0.001, 0.8), ("full", 0.004, 1.0)):
            await net.add(name, pass_s=pass_s, agreement=agreement)
        yield net
    finally:
        await net.close()


@pytest.mark.parametrize("name", ["tiny", "medium", "full"])
async def test_sessions_are_handed_on(net: Net, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards requests at a replica that is replaced: they were cut off when its time was over. Texts stay."""
    monkeypatch.setattr(uplink, "REFUSAL_S", 0.01)
    requests = [opening(seed, 0.8, 150) for seed in range(3)]
    running = [asyncio.create_task(net.text(request)) for request in requests]
    old = net.nodes[name]
    await until(lambda: old.tier.num_sessions == 3 and old.tier.stats.own_tokens > 60)
    new = await net.add(name, pass_s=0.001)
    old.server.leave()
    texts = [text for text, _ in await asyncio.gather(*running)]
    assert texts == [full_text(ToyModel(), request) for request in requests]
    assert len(net.failures) == (3 if name == "full" else 0)
    assert new.tier.stats.own_tokens > 0
    await until(lambda: old.tier.num_sessions == len(old.server.leases) == 0)
    await net.settle()
    await old.stop()


async def test_a_replica_that_leaves_is_leased_no_more(net: Net, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards the end of a replica against leases by callers that have not heard of it, and those that nobody has opened."""
    monkeypatch.setattr(uplink, "REFUSAL_S", 0.01)
    server = net.nodes["full"].server
    held = net.lessor("full")("early")
    await anext(aiter(held))
    server.leave()
    assert await anext(aiter(held), None) is None
    late = net.lessor("full")("late")
    assert await anext(aiter(late), None) is None
    assert len(server.leases) == 0
    with pytest.raises(uplink.Unavailable, match="leaves"):
        await net.leases[-1].task


class Replicas:
    """What Serve routes to, as a replica hears it."""

    def __init__(self, *running: str) -> None:
        self.running = list(running)
        self.asked = 0

    async def ask(self) -> list[str]:
        self.asked += 1
        return self.running


async def watched(replicas: Replicas) -> tuple[Handover, asyncio.Event, "asyncio.Task[None]"]:
    left = asyncio.Event()
    handover = Handover("me", replicas.ask, left.set, PERIOD_S)
    return handover, left, asyncio.create_task(handover.watch())


async def test_a_replica_leaves_when_others_are_used() -> None:
    """Guards the moment of a hand-over: not while this replica is used, nor while there is no other, and then at once."""
    replicas = Replicas("me", "other")
    _, left, task = await watched(replicas)
    await until(lambda: replicas.asked > 5)  # nobody checks its health: the controller may be slow
    assert not left.is_set()
    replicas.running = []
    asked = replicas.asked
    await until(lambda: replicas.asked > asked + 5)
    assert not left.is_set()
    replicas.running = ["other"]
    await asyncio.wait_for(task, LONG_S)
    assert left.is_set()


async def test_a_replica_that_is_checked_asks_nobody() -> None:
    """Guards quiet tiers: as long as Serve checks its health, a replica bothers no other."""
    replicas = Replicas("other")
    handover, left, task = await watched(replicas)
    handover._gap_s = LONG_S
    handover.check()
    await asyncio.sleep(5 * PERIOD_S)
    assert not left.is_set()
    assert replicas.asked == 0
    task.cancel()
