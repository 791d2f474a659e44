"""From readings to Ray: its workers hand them to their node's agent, where Prometheus scrapes them."""

import asyncio
import logging
from collections.abc import Callable, Iterable
from typing import Self

from ray.util.metrics import Counter, Gauge, Histogram

from deployments.ops.metrics.series import COMMON, PREFIX, SERIES, Reading, Series
from deployments.replica import context

log = logging.getLogger(__name__)

EVERY_S = 2.0  # Ray's workers report every 10 s unless RAY_metrics_report_interval_ms says otherwise


class RayExport:
    """Reports what one process counts, with the values of the labels `COMMON`."""

    def __init__(self, *common: str) -> None:
        self._common = dict(zip(COMMON, common, strict=True))
        self._made: dict[str, Counter | Gauge | Histogram] = {}
        self._exported: dict[tuple[str, tuple[str, ...]], float] = {}  # totals of counters

    @classmethod
    def here(cls, model: str, tier: str) -> Self | None:
        """That of this replica of Ray Serve; ``None`` outside of one."""
        here = context()
        return None if here is None else cls(here.app_name, model, tier, here.replica_tag)

    def export(self, readings: Iterable[Reading]) -> None:
        """Hand over readings; counters may only grow."""
        for name, values, value in readings:
            series = SERIES[name]
            tags = self._common | dict(zip(series.labels, values, strict=True))
            if name not in self._made:
                self._made[name] = _made(series)
            match self._made[name]:
                case Counter() as counter:
                    grown = value - self._exported.get((name, values), 0.0)
                    if grown > 0:
                        counter.inc(grown, tags)
                        self._exported[name, values] = value
                case Gauge() as gauge:  # though it has not changed: Ray forgets what is not repeated
                    gauge.set(value, tags)
                case Histogram() as histogram:
                    histogram.observe(value, tags)


def _made(series: Series) -> Counter | Gauge | Histogram:
    name, labels = f"{PREFIX}{series.name}", tuple(dict.fromkeys((*COMMON, *series.labels)))
    match series.kind:
        case "counter":
            return Counter(name, series.help, labels)
        case "gauge":
            return Gauge(name, series.help, labels)
        case "histogram":
            return Histogram(name, series.help, list(series.buckets), labels)


async def report(export: RayExport, source: Callable[[], Iterable[Reading]]) -> None:
    """Hand over what ``source`` reads, now and every `EVERY_S`, until cancelled."""
    while True:
        try:
            export.export(source())
        except Exception:  # of any kind: what counts must not disturb what is counted
            log.exception("Metrics could not be told to Ray")
        await asyncio.sleep(EVERY_S)
