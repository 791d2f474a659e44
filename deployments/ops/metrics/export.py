"""Hands readings to Ray, whose nodes show them to Prometheus."""

import asyncio
import logging
from collections.abc import Callable, Iterable, Mapping

from ray.util.metrics import Gauge, Histogram

from deployments.ops.metrics.series import COMMON, RAY, SERIES, Reading, Series
from deployments.replica import context

log = logging.getLogger(__name__)

EVERY_S = 2.0  # Ray's workers report every 10 s unless RAY_metrics_report_interval_ms says otherwise


async def report(model: str, tier: str, source: Callable[[], Iterable[Reading]]) -> None:
    """Report what ``source`` reads in this replica of Ray Serve, now and every `EVERY_S`, until cancelled."""
    here = context()
    if here is None:  # outside of Serve nobody scrapes
        return
    common = dict(zip(COMMON, (here.app_name, model, tier, here.replica_tag), strict=True))
    instruments: dict[str, Gauge | Histogram] = {}
    while True:
        try:
            export(source(), common, instruments)
        except Exception:  # metrics must not disturb what they count
            log.exception("Metrics could not be reported to Ray")
        await asyncio.sleep(EVERY_S)


def export(readings: Iterable[Reading], common: Mapping[str, str], instruments: dict[str, Gauge | Histogram]) -> None:
    """Hand readings to Ray, with values of the labels `COMMON`; ``instruments`` by name grow as series come."""
    for name, values, value in readings:
        series = SERIES[name]
        tags = {**common, **dict(zip(series.labels, values, strict=True))}
        if name not in instruments:
            instruments[name] = _made(series)
        match instruments[name]:
            case Gauge() as gauge:  # though it has not changed: Ray forgets what is not repeated
                gauge.set(value, tags)
            case Histogram() as histogram:
                histogram.observe(value, tags)


def _made(series: Series) -> Gauge | Histogram:
    """Counters are gauges to Ray, whose own counters cannot be 0: a series that has not counted yet would not be there."""
    name, labels = series.shown.removeprefix(RAY), tuple(dict.fromkeys((*COMMON, *series.labels)))
    if series.kind == "histogram":
        return Histogram(name, series.help, list(series.buckets), labels)
    return Gauge(name, series.help, labels)
