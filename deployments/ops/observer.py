"""Keeps what a router's `GET /metrics` says of tiers up to date, and reports the router's series through Ray."""

import asyncio
import contextlib
import time

from cascade.errors import Unavailable
from deployments.gateway.admission.metrics import RouterMetrics
from deployments.links.downlink import Downlink
from deployments.links.replica_status import Tiers, may_be_zero
from deployments.ops.metrics.export import RayExport, report
from deployments.ops.metrics.series import ROUTER

TIMEOUT_S = 1.0
OBSERVE_S = 5.0  # how old the tiers' figures on the page may become
COUNT_S = 10.0  # between two counts of replicas for Ray, which reports as often
LOWER_START_S = 60.0  # tiers that are not ready so long after the full one count as absent


class Observer:
    """Looks at the tiers for one router's metrics."""

    def __init__(self, metrics: RouterMetrics, tiers: Tiers, downlink: Downlink) -> None:
        self._metrics = metrics
        metrics.needs(0 if may_be_zero(tiers.full) else 1)
        metrics.also(downlink.readings)
        self._tiers = tiers
        self._observe_at = 0.0

    async def page(self) -> bytes:
        """What the router counts, and what the tiers say, in Prometheus' text form."""
        if time.monotonic() >= self._observe_at:
            self._observe_at = time.monotonic() + OBSERVE_S
            with contextlib.suppress(Unavailable):  # then the page says what it said before
                for name, (replicas, said) in (await self._tiers.states(TIMEOUT_S)).items():
                    self._metrics.tier(name, replicas, said)
        return self._metrics.text()

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
            with contextlib.suppress(Unavailable):  # then the metrics say what they said before
                for name, replicas in (await self._tiers.replicas()).items():
                    self._metrics.tier(name, replicas, None)
            await asyncio.sleep(COUNT_S)
