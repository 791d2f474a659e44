"""A server's counters, read from its ``GET /metrics``."""

import urllib.error
import urllib.request
from dataclasses import dataclass
from typing import Self

from prometheus_client.parser import text_string_to_metric_families

from cascade.errors import Unavailable

PREFIX = "cascade_"
TIMEOUT_S = 5.0
Labels = tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class Metrics:
    """Samples by name, without the prefix that all share, and labels in their order."""

    samples: dict[tuple[str, Labels], float]

    @classmethod
    def parse(cls, text: str) -> Self:
        """From Prometheus' text form; raises `ValueError`."""
        samples = {}
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                key = (sample.name.removeprefix(PREFIX), tuple(sorted(sample.labels.items())))
                samples[key] = sample.value
        return cls(samples)

    @property
    def edges(self) -> tuple[tuple[str, str], ...]:
        """Drafter and verifier of every edge that was counted, in the order of the server."""
        labels = [dict(labels) for name, labels in self.samples if name == "passes_total"]
        return tuple((one["drafter"], one["verifier"]) for one in labels)

    def since(self, earlier: "Metrics | None") -> "Metrics":
        """What was counted since; everything if the server has started again meanwhile, or if ``earlier`` is ``None``."""
        if earlier is None or self.total("answers_total") < earlier.total("answers_total"):
            return self
        return Metrics({key: value - earlier.samples.get(key, 0.0) for key, value in self.samples.items()})

    def total(self, name: str) -> float:
        """Over all labels; 0 if nothing was counted."""
        return sum(value for (known, _), value in self.samples.items() if known == name)

    def of_edge(self, name: str, drafter: str, verifier: str) -> float:
        return self.samples.get((name, (("drafter", drafter), ("verifier", verifier))), 0.0)

    def mean(self, name: str) -> float | None:
        """Of a histogram; ``None`` if it is empty."""
        count = self.total(f"{name}_count")
        return self.total(f"{name}_sum") / count if count else None


def fetch_metrics(url: str) -> Metrics:
    """The counters of the server whose HTTP door is at ``url``; raises `Unavailable`."""
    try:
        if not url.startswith(("http://", "https://")):  # urllib would read files too
            raise ValueError("it must begin with http:// or https://")
        with urllib.request.urlopen(f"{url.rstrip('/')}/metrics", timeout=TIMEOUT_S) as answer:
            return Metrics.parse(answer.read().decode())
    except (OSError, ValueError) as error:
        reason = error.reason if isinstance(error, urllib.error.URLError) else error
        raise Unavailable(
            f"There are no counters at {url}/metrics ({reason}): give the server's HTTP door with --url"
        ) from None
