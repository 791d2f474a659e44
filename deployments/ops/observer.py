"""What `GET /metrics` tells: what this router and all others count, and what the tiers say."""

import asyncio
import contextlib
import time

from cascade.errors import Unavailable
from deployments.gateway.admission.metrics import RouterMetrics
from deployments.links.downlink import Downlink
from deployments.links.replica_status import Tiers, may_sleep
from deployments.links.siblings import Siblings
from deployments.ops.metrics.export import RayExport, report
from deployments.ops.metrics.page import joined
from deployments.ops.metrics.series import ROUTER

TIMEOUT_S = 1.0
OBSERVE_S = 5.0  # how old the tiers' figures in the metrics may become
COUNT_S = 10.0  # between two counts of replicas for Ray, which reports as often
LOWER_START_S = 60.0  # tiers that are not ready so long after the full one count as absent


class Observer:
    """Keeps one router's metrics up to date, and joins them with those of the others."""

    def __init__(self, metrics: RouterMetrics, tiers: Tiers, siblings: Siblings, downlink: Downlink) -> None:
        self._metrics = metrics
        metrics.needs(0 if may_sleep(tiers.full) else 1)
        metrics.also(downlink.readings)
        self._tiers = tiers
        self._siblings = siblings
        self._observe_at = 0.0

    async def page(self) -> bytes:
        """What all routers count, and what the tiers say."""
        await self._observe()
        here = self._metrics.text()
        elsewhere = await self._siblings.pages()
        return joined({self._siblings.me: here.decode()} | elsewhere) if elsewhere else here

    def own_page(self, router: str) -> tuple[str, str] | None:
        """Another router asks for what this one counts: its name, and its page."""
        return None if router == (me := self._siblings.me) else (me, self._metrics.text().decode())

    async def run(self) -> None:
        """Say in the metrics whether lower tiers have started, and report everything through Ray until cancelled."""
        export = RayExport.here(self._tiers.full.model_loading_config.model_id, ROUTER)
        work = [self._count_drafters()]
        if export is not None:
            work += [self._count_replicas(), report(export, self._metrics.readings)]
        await asyncio.gather(*work)

    async def _count_drafters(self) -> None:
        if (num_drafters := await self._tiers.num_drafters(LOWER_START_S)) is not None:
            self._metrics.started(num_drafters)

    async def _count_replicas(self) -> None:
        while True:
            with contextlib.suppress(Unavailable):  # as it was then
                for name, replicas in (await self._tiers.replicas()).items():
                    self._metrics.tier(name, replicas, None)
            await asyncio.sleep(COUNT_S)

    async def _observe(self) -> None:
        """Bring up to date what the metrics say of the tiers, if that is old."""
        if time.monotonic() < self._observe_at:
            return
        self._observe_at = time.monotonic() + OBSERVE_S
        try:
            states = await self._tiers.states(TIMEOUT_S)
        except Unavailable:  # as it was then
            return
        for name, (replicas, said) in states.items():
            self._metrics.tier(name, replicas, said)
        *_, (running, _) = states.values()  # of the full tier
        self._metrics.reuse(await self._tiers.full_replicas(TIMEOUT_S) if running else ())
