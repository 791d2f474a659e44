"""The series of one process in Prometheus' text form, and as readings for Ray."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Metric, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

from deployments.ops.metrics.series import PREFIX, SERIES, Reading

LABEL = "router"
OF_ALL = (  # all routers say the same
    "tiers",
    "replicas",
    "full_replicas",
    "full_min_replicas",
    "pass_seconds",
    "context_seconds",
    "kv_asked_tokens",
    "kv_reused_tokens",
)
MAX_KEPT = 1 << 16  # values of histograms between two readings

Source = Callable[[], Iterable[Reading]]


class Page:
    """Makes the instruments for series of `SERIES` by name, and shows what they say."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
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
        """In Prometheus' text form."""
        return generate_latest(self._registry)

    def readings(self) -> Iterator[Reading]:
        """What counters and gauges are, and the values that histograms have taken in since the first call or the last one."""
        kept, self._kept = self._kept or (), deque(maxlen=MAX_KEPT)
        yield from kept
        for family in self._registry.collect():
            series = SERIES[family.name.removeprefix(PREFIX)]
            if "router" in series.places and series.kind != "histogram":
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


def joined(pages: Mapping[str, str]) -> bytes:
    """``pages`` by router as one, on which each sample names its router; what is said of tiers is that of the first."""
    families: dict[str, Metric] = {}
    first = next(iter(pages))
    for router, page in pages.items():
        for family in text_string_to_metric_families(page):
            kept = families.setdefault(family.name, Metric(family.name, family.documentation, family.type))
            if family.name.removeprefix(PREFIX) not in OF_ALL:
                kept.samples += [sample._replace(labels={**sample.labels, LABEL: router}) for sample in family.samples]
            elif router == first:
                kept.samples += family.samples
    return generate_latest(_Families(families))


@dataclass
class _Families(CollectorRegistry):
    """What was counted elsewhere."""

    families: Mapping[str, Metric]

    def collect(self) -> Iterator[Metric]:
        return iter(self.families.values())
