"""Hands readings to Ray, whose nodes show them to Prometheus."""

import asyncio
import logging
from collections.abc import Callable, Iterable

from ray.util.metrics import Counter, Gauge, Histogram

from deployments.ops.metrics.series import COMMON, PREFIX, SERIES, Reading, Series
from deployments.replica import context

log = logging.getLogger(__name__)

EVERY_S = 2.0  # Ray's workers report every 10 s unless RAY_metrics_report_interval_ms says otherwise


class RayExport:
    """Reports the series of one process, with these values of the labels `COMMON`."""

    def __init__(self, *common: str) -> None:
        self._common = dict(zip(COMMON, common, strict=True))
        self._made: dict[str, Counter | Gauge | Histogram] = {}
        self._exported: dict[tuple[str, tuple[str, ...]], float] = {}  # totals of counters

    def export(self, readings: Iterable[Reading]) -> None:
        """Report readings; counters may only grow."""
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


async def report(model: str, tier: str, source: Callable[[], Iterable[Reading]]) -> None:
    """Report what ``source`` reads in this replica of Ray Serve, now and every `EVERY_S`, until cancelled."""
    here = context()
    if here is None:  # nor does anybody ask
        return
    export = RayExport(here.app_name, model, tier, here.replica_tag)
    while True:
        try:
            export.export(source())
        except Exception:  # metrics must not disturb what they count
            log.exception("Metrics could not be reported to Ray")
        await asyncio.sleep(EVERY_S)
