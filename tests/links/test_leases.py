"""Leases: who gets in, for how long, which are kept for the next session, and what is left behind."""

import asyncio
import gc
import itertools
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from typing import Any

import pytest

from cascade.errors import ConfigError
from cascade.messages import Close, Open, Routing
from cascade.planner.chains import Planner
from cascade.scorer import BLOCK
from cascade.settings.config import CascadeConfig
from deployments.links.affinity import Prefixes
from deployments.links.downlink import Downlink
from deployments.links.leases import MOST_HELD, OPEN_TIMEOUT_S, GivenLease, Lease, LeasePool
from tests import small
from tests.links.net import SHORT_S, Held, Net, Node, drafted, opening
from tests.tier.test_tier import PROMPT, CountingModel
from tests.toys import ToyModel, full_text
from tests.waiting import LONG_S, until

LONG = {"temperature": 1.0, "max_tokens": 2000}  # of a request that is still being answered when its test is over


class Waiting:
    """The lease of a replica that never answers. Where it is cancelled it raises an error of its own, as Ray Serve's do."""

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


class Cancelled(Waiting):
    async def __anext__(self) -> str:
        raise asyncio.CancelledError


@pytest.mark.parametrize("medium", ["refused", "silent", "cancelled", "unknown"])
async def test_a_tier_that_cannot_be_leased_is_done_without(net: Net, medium: str) -> None:
    """Guards a request against a tier without free replicas, one whose replicas never answer, and one that nobody has.

    A session whose lease Ray cancelled by itself was neither opened nor failed: who asked for it waited for ever.
    """
    below = net.nodes["full"].downlink.leases
    if medium == "refused":
        net.refused = {"medium"}
    elif medium != "unknown":
        lease = Waiting() if medium == "silent" else Cancelled()
        below.lessors, below.timeout_s = {**below.lessors, "medium": lambda *of: lease}, SHORT_S
    request = opening(7, 0.0, 150, chain=("huge" if medium == "unknown" else "medium", "tiny"))
    text, answer = await net.text(request)
    assert text == full_text(ToyModel(), request.spec)
    assert drafted(answer)["tiny"] > 0
    assert net.nodes["medium"].tier.stats.passes == 0
    await net.settle()


@pytest.mark.parametrize("late_s", [0.15, 3600.0], ids=["late", "never"])
async def test_a_lease_that_is_not_given_is_asked_for_again(net: Net, monkeypatch: pytest.MonkeyPatch, late_s: float) -> None:
    """Guards requests whose replica is out of reach while Serve believes in it: they waited for half a minute.

    Where they named a session, the second lease was asked of the same replica.
    """
    monkeypatch.setattr("deployments.links.leases.PATIENCE_S", 0.05)
    server, asked = net.nodes["full"].server, list[str]()

    async def late(session: str) -> AsyncIterator[str]:
        await asyncio.sleep(late_s)
        async for ticket in server.lease(session):
            yield ticket

    def take(session: str, preferred: Sequence[str] = (), affinity: str = "") -> Lease:
        asked.append(affinity)
        lease = Held(late(session) if len(asked) % 4 else server.lease(session))  # the last of four is given at once
        net.leases.append(lease)
        return lease

    net.router.leases.lessors = {"full": take}
    for seed in range(3):
        await net.check(replace(opening(seed, 0.0, 60), routing=Routing(affinity="mine")))
    assert asked == ["mine", "", "", ""] * 3 or late_s < 1
    assert net.failures == []
    await net.settle()


async def test_a_text_does_not_stay_with_a_replica_that_fails(net: Net) -> None:
    """Guards requests against a replica that knows their text and cannot go on: each new session met it again."""
    sick = Node(2, CountingModel(), {})
    sick.model.poison = PROMPT[0]
    await sick.start()
    net.nodes["sick"] = sick
    well, request = net.lessor("full"), opening(21, 0.0, 20, tokens=PROMPT * BLOCK, prompt_len=len(PROMPT) * BLOCK)
    net.router.leases.lessors = {"full": lambda name, preferred, affinity: (net.lessor("sick") if preferred else well)(name)}
    net.router.leases.prefixes = Prefixes()
    net.router.leases.prefixes.sent(request.spec, "", sick.server.address)
    await net.check(request)
    assert len(net.failures) == 1
    await net.settle()


@pytest.mark.parametrize("end", ["closed", "leases dropped", "router lost"])
async def test_sessions_that_end_in_the_middle_leave_nothing(net: Net, end: str) -> None:
    """Guards leases, routes and sessions against clients that leave, leases that Serve ends, and a router that dies."""
    requests = [opening(seed, **LONG) for seed in range(3)]
    net.router.put(requests)
    await until(lambda: [node.tier.num_sessions for node in net.nodes.values()] == [3, 3, 3])
    assert net.occupied == {"router": (3,), "tiny": (3, 3, 0, 3), "medium": (3, 3, 3, 3), "full": (3, 3, 3, 3)}
    if end == "router lost":
        [stream] = net.router._tasks
        for lease in net.leases[:3]:
            lease.cancel = lambda: None
        stream.cancel()
    elif end == "leases dropped":
        for lease in net.leases[:3]:
            lease.cancel()
        await until(lambda: not any(any(node.occupied) for node in net.nodes.values()), lambda: net.occupied)
    if end != "router lost":
        net.router.send([Close(request.session) for request in requests])
    await net.settle()


async def test_a_lease_lasts_as_long_as_its_session(net: Net, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards replicas against callers that died between lease and Open, and long sessions against being without one."""
    monkeypatch.setattr("deployments.links.leases.OPEN_TIMEOUT_S", 0.05)
    server = net.nodes["full"].server
    used = GivenLease("session")
    ended = asyncio.create_task(used.ended())
    lease = Held(server.lease("nobody"))
    assert await anext(lease) == f"{server.address} {server.secret}"
    await asyncio.wait_for(lease.task, LONG_S)
    assert not ended.done()
    used.end(keep=True)
    await asyncio.wait_for(ended, LONG_S)


@pytest.mark.parametrize("num_ticks", [0, 1, 2, 4])
async def test_close_while_the_lease_is_taken(net: Net, num_ticks: int) -> None:
    """Guards against routes, leases and sessions that stay when a request ends just as its lease arrives."""
    request = opening(12, **LONG)
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
async def test_a_lease_tells_whether_its_replica_is_near(net: Net, host: str, near: bool) -> None:
    """Guards tiers on different machines: they were taken to slow each other, and waited for each other."""
    located: list[tuple[str, bool]] = []
    planner = Planner(["full"])
    downlink = Downlink(
        LeasePool({"full": net.lessor("full")}),
        lambda messages: None,
        host=host,
        locate=lambda tier, near: (planner.locate(tier, near), located.append((tier, near))),
    )
    downlink.put([opening(chain=())])
    await until(lambda: located == [("full", near)])
    assert planner.shared == ({"full"} if near else set())
    await downlink.close()
    await net.settle()


# leases that a router holds for the next session


class HoldingNet(Net):
    def keep(self, seconds: float) -> None:
        self.router = Downlink(LeasePool({"full": self.lessor("full")}, hold_s=seconds), self._hear)

    @property
    def num_held(self) -> int:
        return len(self.router.leases._held)

    async def run(self, seed: int) -> None:
        await self.check(opening(seed, chain=()))


@pytest.fixture
async def holding(tidy: None) -> AsyncIterator[HoldingNet]:
    """One replica of the full tier, and a router that holds leases on it for long."""
    net = HoldingNet()
    net.keep(60.0)
    await net.add("full", pass_s=0.001)
    yield net
    await net.close()


async def test_a_held_lease_is_old_one_day(holding: HoldingNet) -> None:
    """Guards replicas that come later, and draining and scaling to zero, against leases that are kept for nobody."""
    holding.keep(0.2)
    seeds = itertools.count()
    while len(holding.leases) < 3:
        await holding.run(next(seeds))
    await holding.settle()
    assert holding.num_held == 0
    assert len(holding.leases) == 3  # and none was renewed


async def test_sessions_use_a_lease_one_after_another(holding: HoldingNet) -> None:
    """Guards the first token against the time that a lease takes, also where a session begins as the last one ends."""
    await holding.run(1)
    requests = [opening(seed, chain=(), **LONG) for seed in range(2, 6)]
    ends: list[Open | Close] = []
    for request in requests:
        holding.router.put([*ends, request])
        await until(lambda session=request.session: holding.router._routes[session].answered)
        ends = [Close(request.session)]
    assert len(holding.leases) == 1
    await holding.router.close()
    await holding.settle()


async def test_few_leases_are_held_for_a_crowd(holding: HoldingNet) -> None:
    """Guards Serve's view of the load: however many sessions end, few leases are kept."""
    requests = [opening(seed, 0.8, 30, chain=()) for seed in range(12)]
    running = asyncio.gather(*map(holding.check, requests))
    given, most = holding.nodes["full"].server.leases, 0
    while not running.done():
        most = max(most, len(given))
        await asyncio.sleep(0.001)
    await running
    assert most <= len(requests)
    await until(lambda: len(given) == MOST_HELD, lambda: holding.occupied)


@pytest.mark.parametrize("over", ["its replica has died", "Serve has ended it"])
async def test_a_held_lease_that_is_over_is_a_pause_at_most(holding: HoldingNet, over: str) -> None:
    """Guards the next request: the lease of a dead replica is held no more, and one that is refused is followed by another."""
    await holding.run(1)
    await until(lambda: holding.num_held == 1)
    if over == "Serve has ended it":
        holding.leases[0].cancel()
        await until(lambda: len(holding.nodes["full"].server.leases) == 0)
    else:
        await holding.nodes["full"].stop()
        await until(lambda: holding.num_held == 0)
        await holding.add("full")
    await holding.run(2)
    assert [failure.fault for failure in holding.failures] == [False] * (over == "Serve has ended it")


def test_routers_let_go_before_replicas_do() -> None:
    """Guards requests against a held lease that its replica has just ended: one that nobody opens is over there, too."""
    values = small.config().model_dump(mode="json")
    values["router"]["held_lease_s"] = OPEN_TIMEOUT_S - 1
    with pytest.raises(ConfigError, match="held_lease_s"):
        CascadeConfig.parse(values)


@pytest.mark.parametrize("num_ticks", [0, 1, 3])
async def test_a_router_that_closes_lets_go(holding: HoldingNet, num_ticks: int) -> None:
    """Guards the full tier against leases of a router that ends while it takes or uses a held one."""
    await holding.run(1)
    holding.router.put([opening(2, chain=(), **LONG)])
    for _ in range(num_ticks):
        await asyncio.sleep(0)
    await holding.router.close()
    await until(lambda: not any(holding.nodes["full"].occupied), lambda: holding.occupied)
    assert all(lease.task.done() for lease in holding.leases)
