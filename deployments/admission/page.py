"""Counters of all routers on one page, as Prometheus reads it."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, Metric, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from deployments.metrics.series import PREFIX

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
