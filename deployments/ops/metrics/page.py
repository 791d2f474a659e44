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
    """Makes instruments for `SERIES` by name, and shows them.

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
        """What observes a value."""
        series = SERIES[name]
        made = Histogram(f"{PREFIX}{name}", series.help, registry=self._registry, buckets=series.buckets)

        def observe(value: float) -> None:
            made.observe(value)
            if self._kept is not None:
                self._kept.append(Reading(name, (), value))

        return observe

    def also(self, source: Source) -> None:
        """Show counters and gauges that ``source`` reads when the page is shown."""
        self._registry.register(_Read(source))

    def text(self) -> bytes:
        return generate_latest(self._registry)

    def readings(self) -> Iterator[Reading]:
        """Counters and gauges, and the values that histograms have observed since the last call; the first call has none."""
        kept, self._kept = self._kept or (), deque(maxlen=MAX_KEPT)
        yield from kept
        for family in self._registry.collect():
            series = SERIES.get(family.name.removeprefix(PREFIX))
            if series is not None and series.kind != "histogram":
                for sample in family.samples:
                    if not sample.name.endswith("_created"):
                        values = tuple(sample.labels[label] for label in series.labels)
                        yield Reading(series.name, values, sample.value)


class _Read(Collector):
    """Adapts a source to Prometheus' library."""

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
            families[name].add_metric(values, value)  # type: ignore[attr-defined]  # both kinds have it
        yield from families.values()
