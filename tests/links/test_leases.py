"""Leases: who gets in, for how long, and what is left behind."""

import asyncio
import gc
from collections.abc import AsyncIterator, Sequence
from typing import Any

import pytest

from cascade.messages import Close
from cascade.planner.chains import Planner
from cascade.simulation.toy import ToyModel, full_text
from deployments.links.downlink import Downlink
from deployments.links.leases import GivenLeases, Lease, LeasePool
from tests.links.net import SHORT_S, Held, Net, drafted, opening
from tests.waiting import LONG_S, until


class Waiting:
    """The lease of a replica that never answers, as one that is full or still loads.

    Where it is cancelled it raises an error of its own, as those of Ray Serve.
    """

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


@pytest.mark.parametrize("medium", ["refused", "silent", "unknown"])
async def test_a_tier_that_cannot_be_leased_is_done_without(net: Net, medium: str) -> None:
    """Guards a request against a tier without free replicas, one whose replicas never answer, and one that nobody has."""
    below = net.nodes["full"].downlink.leases
    if medium == "refused":
        net.refused = {"medium"}
    elif medium == "silent":
        below.lessors, below.timeout_s = {**below.lessors, "medium": lambda *of: Waiting()}, SHORT_S
    request = opening(7, 0.0, 150, chain=("huge" if medium == "unknown" else "medium", "tiny"))
    text, answer = await net.text(request)
    assert text == full_text(ToyModel(), request.spec)
    assert drafted(answer)["tiny"] > 0
    assert net.nodes["medium"].tier.stats.passes == 0
    await net.settle()


@pytest.mark.parametrize("late_s", [0.15, 3600.0], ids=["late", "never"])
async def test_a_lease_that_is_not_given_is_asked_for_again(net: Net, monkeypatch: pytest.MonkeyPatch, late_s: float) -> None:
    """Guards requests whose replica is out of reach while Serve believes in it: they waited for half a minute. Of two that are
    given one is freed."""
    monkeypatch.setattr("deployments.links.leases.PATIENCE_S", 0.05)
    server, num_asked = net.nodes["full"].server, 0

    async def late(session: str) -> AsyncIterator[str]:
        await asyncio.sleep(late_s)
        async for ticket in server.lease(session):
            yield ticket

    def take(session: str, preferred: Sequence[str] = (), affinity: str = "") -> Lease:
        nonlocal num_asked
        num_asked += 1
        lease = Held(late(session) if num_asked % 4 else server.lease(session))  # the last of four is given at once
        net.leases.append(lease)
        return lease

    net.router.leases.lessors = {"full": take}
    for seed in range(3):
        request = opening(seed, 0.0, 60)
        text, _ = await net.text(request)
        assert text == full_text(ToyModel(), request.spec)
    assert num_asked == 12 or late_s < 1
    assert net.failures == []
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
    monkeypatch.setattr("deployments.links.leases.OPEN_TIMEOUT_S", 0.05)
    node = net.nodes["full"]
    lease = Held(node.server.lease("nobody"))
    assert await anext(lease) == f"{node.server.address} {node.server.secret}"
    await asyncio.wait_for(lease.task, LONG_S)
    assert len(node.server.leases) == 0


async def test_lease_of_an_open_session_lives_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards sessions that are longer than a lease may be without one; then it ends as if nobody had opened it."""
    monkeypatch.setattr("deployments.links.leases.OPEN_TIMEOUT_S", 0.05)
    leases = GivenLeases()
    lease = leases.add("one")
    assert leases.open("session", "one")
    ended = asyncio.create_task(lease.ended())
    await asyncio.sleep(0.15)
    assert not ended.done()
    leases.end("session", keep=True)
    await asyncio.wait_for(ended, LONG_S)


@pytest.mark.parametrize("num_ticks", [0, 1, 2, 4])
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


async def test_a_lease_that_is_not_waited_for_reports_nothing(tidy: None) -> None:
    """Guards the log from an error for each session that ends early: of a task whose outcome nobody looked at."""
    strays: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: strays.append(context))
    downlink = Downlink(LeasePool({"full": lambda *of: Waiting()}), lambda messages: None)
    request = opening()
    downlink.put([request])
    await asyncio.sleep(0.01)
    downlink.put([Close(request.session)])
    await asyncio.sleep(0.01)
    await downlink.close()
    gc.collect()
    assert strays == []


@pytest.mark.parametrize(("host", "near"), [("127.0.0.1", True), ("10.0.0.1", False)])
async def test_a_lease_tells_whether_its_replica_is_near(net: Net, host: str, *, near: bool) -> None:
    """Guards tiers on different machines: they were taken to slow each other, and waited for each other."""
    located: list[tuple[str, bool]] = []
    planner = Planner(["full"])
    downlink = Downlink(
        LeasePool({"full": net.lessor("full")}),
        lambda messages: None,
        host=host,
        locate=lambda tier, near: (planner.locate(tier, near), located.append((tier, near))),
    )
    request = opening(chain=())
    downlink.put([request])
    await until(lambda: located == [("full", near)])
    assert planner.shared == ({"full"} if near else set())
    await downlink.close()
    await net.settle()


async def test_close_in_the_middle_frees_all(net: Net) -> None:
    """Guards leases, routes and sessions of every tier against a client that leaves."""
    requests = [opening(seed, 1.0, 2000) for seed in range(8)]
    net.router.put(requests)
    await until(lambda: [node.tier.num_sessions for node in net.nodes.values()] == [8, 8, 8])
    assert net.occupied == {"router": (8,), "tiny": (8, 8, 0, 8), "medium": (8, 8, 8, 8), "full": (8, 8, 8, 8)}
    net.router.send([Close(request.session) for request in requests])
    await net.settle()


async def test_lost_router_frees_all(net: Net) -> None:
    """Guards every tier against a router that dies: its links break and its leases do not end by themselves."""
    requests = [opening(seed, 1.0, 2000) for seed in range(3)]
    net.router.put(requests)
    await until(lambda: [node.tier.num_sessions for node in net.nodes.values()] == [3, 3, 3])
    [stream] = net.router._tasks
    for lease in net.leases[:3]:
        lease.cancel = lambda: None  # type: ignore[method-assign]  # nobody is there to cancel it
    stream.cancel()
    await net.settle()
