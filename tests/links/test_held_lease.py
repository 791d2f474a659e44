"""Leases held for the next session, over real links; lessors ask the link servers themselves."""

import asyncio
import itertools
from collections.abc import AsyncIterator

import pytest

from cascade.errors import ConfigError
from cascade.messages import Close, Open
from cascade.settings.config import CascadeConfig
from cascade.simulation.toy import ToyModel, full_text
from deployments.links.downlink import Downlink
from deployments.links.leases import MOST_HELD, OPEN_TIMEOUT_S, LeasePool
from tests import small
from tests.links.net import Net, opening
from tests.waiting import until

HELD_S, SHORT_S = 60.0, 1.0  # for which a lease is held


class HoldingNet(Net):
    """A net whose router holds leases on the full tier."""

    def keep(self, seconds: float) -> None:
        self.router = Downlink(LeasePool({"full": self.lessor("full")}, hold_s=seconds), self._hear)

    @property
    def num_held(self) -> int:
        return self.router.leases.num_held

    async def answered(self, request: Open) -> None:
        """Wait for the first answer."""
        await until(lambda: self.router._routes[request.session].answered)

    async def run(self, seed: int) -> None:
        """A short request, whose text is checked."""
        request = opening(seed, chain=())
        text, _ = await self.text(request)
        assert text == full_text(ToyModel(), request.spec)


@pytest.fixture
async def net(tidy: None) -> AsyncIterator[HoldingNet]:
    """One replica of the full tier, and a router that holds leases on it for long."""
    net = HoldingNet()
    net.keep(HELD_S)
    await net.add("full", pass_s=0.001)
    yield net
    await net.close()


async def test_a_lease_is_old_one_day(net: HoldingNet) -> None:
    """Guards replicas that come later, to which nobody would go while old leases do for all sessions."""
    net.keep(0.2)
    seeds = itertools.count()
    while len(net.leases) < 3:
        await net.run(next(seeds))
    await net.settle()


async def test_sessions_use_a_lease_one_after_another(net: HoldingNet) -> None:
    """Guards the first token against the time that a lease through Serve takes, also where a session begins in the very turn in
    which the last one ends: one that overtook the end would be refused."""
    await net.run(1)
    requests = [opening(seed, 1.0, 2000, chain=()) for seed in range(2, 6)]
    net.router.put([requests[0]])
    for last, request in itertools.pairwise(requests):
        await net.answered(last)
        net.router.put([Close(last.session), request])
    await net.answered(requests[-1])
    assert len(net.leases) == 1
    await net.router.close()
    await net.settle()


async def test_a_session_without_an_answer_leaves_no_lease(net: HoldingNet) -> None:
    """Guards sessions against a replica that says nothing: the lease of one that gave up on it would bring the next there."""
    request = opening(1, 1.0, 2000, chain=())
    net.router.put([request])
    await until(lambda: net.router._routes[request.session].mailbox is not None)
    net.router._routes[request.session].answered = False
    net.router.put([Close(request.session)])
    assert net.num_held == 0
    await net.settle()


async def test_idle_router_lets_go(net: HoldingNet) -> None:
    """Guards draining and scaling to zero of the full tier against leases that are kept for nobody."""
    net.keep(SHORT_S)
    await net.run(1)
    await until(lambda: net.num_held == 1)
    await net.settle()
    assert net.num_held == 0
    assert len(net.leases) == 1  # and none was renewed
    await net.run(2)
    await net.settle()


async def test_few_leases_are_held_for_a_crowd(net: HoldingNet) -> None:
    """Guards Serve's view of the load: however many sessions end, few leases are kept."""
    node = net.nodes["full"]
    requests = [opening(seed, 0.8, 30, chain=()) for seed in range(12)]
    running = asyncio.gather(*(net.text(request) for request in requests))
    most = 0
    while not running.done():
        most = max(most, len(node.server.leases))
        await asyncio.sleep(0.001)
    for request, (text, _) in zip(requests, await running, strict=True):
        assert text == full_text(ToyModel(), request.spec)
    assert most <= len(requests)
    await until(lambda: len(node.server.leases) == MOST_HELD, lambda: node.occupied)


async def test_a_lease_on_a_dead_replica_is_not_held(net: HoldingNet) -> None:
    """Guards the next request against a held lease whose replica has died."""
    await net.run(1)
    await until(lambda: net.num_held == 1)
    await net.nodes["full"].stop()
    await until(lambda: net.num_held == 0)
    await net.add("full")
    await net.run(2)
    assert net.failures == []


async def test_a_held_lease_that_serve_has_ended_is_a_pause(net: HoldingNet) -> None:
    """Guards the next request against a held lease that is over: it is refused, and the text comes by another one."""
    await net.run(1)
    await until(lambda: net.num_held == 1)
    net.leases[0].cancel()
    await until(lambda: len(net.nodes["full"].server.leases) == 0)
    await net.run(2)
    assert [failure.fault for failure in net.failures] == [False]


def test_routers_let_go_before_replicas_do() -> None:
    """Guards requests against a held lease that its replica has just ended: one that nobody opens is over there, too."""
    values = small.config().model_dump(mode="json")
    values["router"]["held_lease_s"] = OPEN_TIMEOUT_S - 1
    with pytest.raises(ConfigError, match="held_lease_s"):
        CascadeConfig.parse(values)


@pytest.mark.parametrize("num_ticks", [0, 1, 3])
async def test_close_at_any_time_lets_go(net: HoldingNet, num_ticks: int) -> None:
    """Guards the full tier against leases of a router that ends while it takes or uses a held one."""
    await net.run(1)
    net.router.put([opening(2, 1.0, 2000, chain=())])
    for _ in range(num_ticks):
        await asyncio.sleep(0)
    await net.router.close()
    await until(lambda: not any(net.nodes["full"].occupied), lambda: net.occupied)
    assert all(lease.task.done() for lease in net.leases)
