"""Exports readings to Ray, whose nodes serve them to Prometheus."""

import asyncio
import logging
from collections.abc import Callable, Iterable, Mapping

from ray.util.metrics import Gauge, Histogram

from deployments.ops.metrics.series import COMMON, RAY, SERIES, Reading, Series
from deployments.replica import context

log = logging.getLogger(__name__)

EVERY_S = 2.0  # more often than Ray's workers report, every 10 s by default (RAY_metrics_report_interval_ms)


async def report(model: str, tier: str, source: Callable[[], Iterable[Reading]]) -> None:
    """Export the readings of ``source`` from this replica of Ray Serve every `EVERY_S`, until cancelled."""
    here = context()
    if here is None:  # not in a replica of Serve
        return
    common = dict(zip(COMMON, (here.app_name, model, tier, here.replica_tag), strict=True))
    instruments: dict[str, Gauge | Histogram] = {}
    while True:
        try:
            export(source(), common, instruments)
        except Exception:  # metrics must not disturb serving
            log.exception("Metrics could not be reported to Ray")
        await asyncio.sleep(EVERY_S)


def export(readings: Iterable[Reading], common: Mapping[str, str], instruments: dict[str, Gauge | Histogram]) -> None:
    """Export readings with the labels `COMMON`; ``instruments``, by name, are created when first needed."""
    for name, values, value in readings:
        series = SERIES[name]
        tags = {**common, **dict(zip(series.labels, values, strict=True))}
        if name not in instruments:
            instruments[name] = _made(series)
        match instruments[name]:
            case Gauge() as gauge:  # also unchanged ones, since Ray forgets gauges that are not repeated
                gauge.set(value, tags)
            case Histogram() as histogram:
                histogram.observe(value, tags)


def _made(series: Series) -> Gauge | Histogram:
    """An instrument of Ray. Counters become gauges, since Ray's own counters cannot be 0 and so would be absent at first."""
    name, labels = series.shown.removeprefix(RAY), tuple(dict.fromkeys((*COMMON, *series.labels)))
    if series.kind == "histogram":
        return Histogram(name, series.help, list(series.buckets), labels)
    return Gauge(name, series.help, labels)
