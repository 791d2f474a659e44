"""Leases held for the next session, over real links; lessors ask the link servers themselves."""

import asyncio
import gc
from collections.abc import AsyncIterator
from dataclasses import replace

import pytest

from cascade.errors import ConfigError
from cascade.messages import Close, Open
from cascade.settings.config import CascadeConfig
from cascade.simulation.toy import ToyModel, full_text
from deployments.links.downlink import Downlink
from deployments.links.held_lease import HeldLeases, Lease
from deployments.links.uplink import OPEN_TIMEOUT_S
from tests.links.net import LEASE_TIMEOUT_S, Net, opening, tidy, until

__all__ = ["tidy"]  # a fixture

LONG_S, SHORT_S = 60.0, 1.0  # for which a lease is held


class HoldingNet(Net):
    """A net whose router holds a lease on the full tier."""

    def keep(self, seconds: float) -> None:
        self.router = Downlink({"full": self.lessor("full")}, self._hear, lease_timeout_s=LEASE_TIMEOUT_S, hold_s=seconds)

    def named(self, request: Open) -> Open:
        """``request`` under the name that the router gives it."""
        return replace(request, session=self.router.session("full"))

    async def held(self) -> str:
        """Name of the session that a lease is held for, once there is one."""
        await until(lambda: self.router._held["full"].session is not None)
        return self.router._held["full"].session or ""


@pytest.fixture
async def net(tidy: None) -> AsyncIterator[HoldingNet]:
    """One replica of the full tier, and a router that holds a lease on it for long."""
    net = HoldingNet()
    net.keep(LONG_S)
    await net.add("full", pass_s=0.001)
    yield net
    await net.close()


async def test_next_session_takes_the_held_lease(net: HoldingNet) -> None:
    """Guards the first token against the time that a lease takes: the second session needs none."""
    first, second = opening(1, chain=()), opening(2, chain=())
    await net.text(net.named(first))
    name = await net.held()
    assert len(net.leases) == 2
    taken = net.named(second)
    assert taken.session == name
    net.router.put([taken])
    assert net.router._routes[name].stream is not None
    assert net.router.session("full") != name
    net.router.put([Close(name)])
    text, _ = await net.text(net.named(replace(second, session="another")))
    assert text == full_text(ToyModel(), second)
    assert net.failures == []


async def test_idle_router_lets_go(net: HoldingNet) -> None:
    """Guards draining and scaling to zero of the full tier against a lease that is kept for nobody."""
    net.keep(SHORT_S)
    await net.text(net.named(opening(1, chain=())))
    await net.held()
    await net.settle()
    assert net.router._held["full"].session is None
    assert len(net.leases) == 2  # and it was not renewed
    text, _ = await net.text(net.named(opening(2, chain=())))
    assert text == full_text(ToyModel(), opening(2, chain=()))
    await net.settle()


async def test_one_lease_is_held_for_a_crowd(net: HoldingNet) -> None:
    """Guards Serve's view of the load: however many sessions begin, one lease more is held than there are sessions."""
    node = net.nodes["full"]
    requests = [opening(seed, 0.8, 30, chain=()) for seed in range(12)]
    running = asyncio.gather(*(net.text(net.named(request)) for request in requests))
    most = 0
    while not running.done():
        most = max(most, len(node.server.leases))
        await asyncio.sleep(0.001)
    for request, (text, _) in zip(requests, await running, strict=True):
        assert text == full_text(ToyModel(), request)
    assert most <= len(requests) + 1
    await until(lambda: len(node.server.leases) == 1, lambda: node.occupied)


async def test_dead_replica_is_not_held(net: HoldingNet) -> None:
    """Guards the next request against a replica that died while it was held for it."""
    await net.text(net.named(opening(1, chain=())))
    name = await net.held()
    await net.nodes["full"].stop()
    await until(lambda: net.router.session("full") != name)
    await net.add("full")
    text, _ = await net.text(net.named(opening(2, chain=())))
    assert text == full_text(ToyModel(), opening(2, chain=()))
    assert net.failures == []


async def test_unnoticed_death_is_a_pause(net: HoldingNet) -> None:
    """Guards against an error when a held replica dies in the very moment in which its lease is used."""
    await net.text(net.named(opening(1, chain=())))
    await net.held()
    taken = net.named(opening(2, chain=()))
    stopping = asyncio.create_task(net.nodes["full"].stop())
    running = asyncio.create_task(net.text(taken))
    await stopping
    await net.add("full")
    text, _ = await running
    assert text == full_text(ToyModel(), opening(2, chain=()))
    assert net.failures


async def test_ended_lease_is_not_held(net: HoldingNet) -> None:
    """Guards the next request against a lease that its replica, or Serve, has ended."""
    await net.text(net.named(opening(1, chain=())))
    name = await net.held()
    net.leases[-1].cancel()
    await until(lambda: net.router.session("full") != name)


async def test_full_tier_without_a_free_place(net: HoldingNet) -> None:
    """Guards running requests against a lease that cannot be had ahead, and later ones against doing without for good."""
    request = opening(1, chain=())
    running = asyncio.create_task(net.text(request))
    while not net.leases:
        await asyncio.sleep(0)
    net.refused = {"full"}
    text, _ = await running
    assert text == full_text(ToyModel(), request)
    assert net.router._held["full"].session is None
    assert len(net.leases) == 1
    net.refused = set()
    await net.text(net.named(opening(2, chain=())))
    await net.held()


def test_routers_let_go_before_replicas_do() -> None:
    """Guards requests against a held lease that its replica has just ended: one that nobody opens is over there, too."""
    values = CascadeConfig.demo().model_dump(mode="json")
    values["router"]["held_lease_s"] = OPEN_TIMEOUT_S - 1
    with pytest.raises(ConfigError, match="held_lease_s"):
        CascadeConfig.parse(values)


@pytest.mark.parametrize("num_ticks", [0, 1, 3, 10])
async def test_close_at_any_time_lets_go(net: HoldingNet, num_ticks: int) -> None:
    """Guards the full tier against leases of a router that ends while it takes or uses a held one."""
    await net.text(net.named(opening(1, chain=())))
    await net.held()
    net.router.put([net.named(opening(2, 1.0, 2000, chain=()))])
    for _ in range(num_ticks):
        await asyncio.sleep(0)
    await net.router.close()
    await until(lambda: not any(net.nodes["full"].occupied), lambda: net.occupied)
    assert all(lease.task.done() for lease in net.leases)


async def test_lessors_that_fail_at_once_are_heard(net: HoldingNet) -> None:
    """Guards the log against errors that nobody heard, where Serve refuses a call before it is made."""

    def refuse(session: str) -> Lease:
        raise RuntimeError("the application is being deleted")

    unheard: list[object] = []
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: unheard.append(context))
    leases = HeldLeases(refuse, LONG_S)
    leases.renew()
    await until(lambda: leases._task is None)
    gc.collect()
    assert (leases.session, unheard) == (None, [])
