"""The series of one process in Prometheus' text form, and as readings for Ray."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Metric, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from deployments.ops.metrics.series import PREFIX, SERIES, Reading

MAX_KEPT = 1 << 16  # values of histograms between two readings

Source = Callable[[], Iterable[Reading]]


class Page:
    """Makes the instruments for series of `SERIES` by name, and shows what they say.

    The ``router``'s name, if it has one, is on the page as `target_info`: several routers may answer at one port.
    """

    def __init__(self, router: str = "") -> None:
        self._registry = CollectorRegistry(target_info={"router": router} if router else None)
        self._kept: deque[Reading] | None = None  # values of histograms since the last `readings`, if anybody asks for these

    def counter(self, name: str) -> Counter:
        series = SERIES[name]
        return Counter(f"{PREFIX}{name}", series.help, series.labels, registry=self._registry)

    def gauge(self, name: str) -> Gauge:
        series = SERIES[name]
        return Gauge(f"{PREFIX}{name}", series.help, series.labels, registry=self._registry)

    def histogram(self, name: str) -> Callable[[float], None]:
        """Takes in a value."""
        series = SERIES[name]
        made = Histogram(f"{PREFIX}{name}", series.help, registry=self._registry, buckets=series.buckets)
        if "router" not in series.places:
            return made.observe

        def observe(value: float) -> None:
            made.observe(value)
            if self._kept is not None:
                self._kept.append(Reading(name, (), value))

        return observe

    def also(self, source: Source) -> None:
        """Show what ``source`` reads, counters and gauges, whenever the page is."""
        self._registry.register(_Read(source))

    def text(self) -> bytes:
        return generate_latest(self._registry)

    def readings(self) -> Iterator[Reading]:
        """What counters and gauges are, and the values that histograms have taken in since the first call or the last one."""
        kept, self._kept = self._kept or (), deque(maxlen=MAX_KEPT)
        yield from kept
        for family in self._registry.collect():
            series = SERIES.get(family.name.removeprefix(PREFIX))
            if series is not None and "router" in series.places and series.kind != "histogram":
                for sample in family.samples:
                    if not sample.name.endswith("_created"):
                        values = tuple(sample.labels[label] for label in series.labels)
                        yield Reading(series.name, values, sample.value)


class _Read(Collector):
    """What a source reads, as Prometheus' library wants it."""

    def __init__(self, source: Source) -> None:
        self._source = source

    def describe(self) -> Iterable[Metric]:
        return ()

    def collect(self) -> Iterator[Metric]:
        families: dict[str, Metric] = {}
        for name, values, value in self._source():
            series = SERIES[name]
            kind = CounterMetricFamily if series.kind == "counter" else GaugeMetricFamily
            if name not in families:
                families[name] = kind(f"{PREFIX}{name}", series.help, labels=series.labels)
            families[name].add_metric(values, value)  # type: ignore[attr-defined]  # of both kinds
        yield from families.values()
