"""What a server counts, scraped from its ``GET /metrics``."""

import os
import urllib.error
import urllib.request
from dataclasses import dataclass
from typing import Self
from urllib.parse import urlsplit

from prometheus_client.parser import text_string_to_metric_families

from cascade.client.connection import API_KEY, is_near
from cascade.errors import Unavailable

PREFIX = "cascade_"
TIMEOUT_S = 5.0
Labels = tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class Scrape:
    """The samples of one scrape, by name without the prefix that all share, and by labels in alphabetical order."""

    samples: dict[tuple[str, Labels], float]

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read Prometheus' text format; raises `ValueError`."""
        samples: dict[tuple[str, Labels], float] = {}
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                samples[sample.name.removeprefix(PREFIX), tuple(sorted(sample.labels.items()))] = sample.value
        return cls(samples)

    @property
    def router(self) -> str:
        """The router that answered, whose counts these are: any of several may answer at a port. Empty if it has no name."""
        return next((dict(labels)["router"] for name, labels in self.samples if name == "target_info"), "")

    @property
    def edges(self) -> tuple[tuple[str, str], ...]:
        """Drafter and verifier of every edge that the server has counted, in its order."""
        labels = [dict(labels) for name, labels in self.samples if name == "passes_total"]
        return tuple((one["drafter"], one["verifier"]) for one in labels)

    def since(self, earlier: "Scrape | None") -> "Scrape":
        """What was counted since ``earlier``; everything if that is ``None``, or if the server has started again meanwhile."""
        if earlier is None or self.total("answers_total") < earlier.total("answers_total"):
            return self
        return Scrape({key: value - earlier.samples.get(key, 0.0) for key, value in self.samples.items()})

    def total(self, name: str) -> float:
        """The sum over all labels; 0 if nothing was counted."""
        return sum(value for (known, _), value in self.samples.items() if known == name)

    def of_edge(self, name: str, drafter: str, verifier: str, **more: str) -> float:
        """The sample of one edge, with ``more`` labels if it has any; 0 if nothing was counted."""
        labels = {"drafter": drafter, "verifier": verifier} | more
        return self.samples.get((name, tuple(sorted(labels.items()))), 0.0)

    def mean(self, name: str) -> float | None:
        """The mean of a histogram; ``None`` if it is empty."""
        count = self.total(f"{name}_count")
        return self.total(f"{name}_sum") / count if count else None


def scrape(url: str) -> Scrape:
    """Scrape the server whose HTTP door is at ``url``, with the key in ``CASCADE_API_KEY``; raises `Unavailable`."""
    try:
        if not url.startswith(("http://", "https://")):  # urllib would read files too
            raise ValueError("it must begin with http:// or https://")
        direct = [urllib.request.ProxyHandler({})] if is_near(urlsplit(url).netloc) else []
        opener = urllib.request.build_opener(*direct)
        key = os.environ.get(API_KEY)
        asked = urllib.request.Request(f"{url.rstrip('/')}/metrics", headers={"Authorization": f"Bearer {key}"} if key else {})
        with opener.open(asked, timeout=TIMEOUT_S) as answer:
            return Scrape.parse(answer.read().decode())
    except (OSError, ValueError) as error:
        reason = error.reason if isinstance(error, urllib.error.URLError) else error
        raise Unavailable(
            f"There are no counters at {url}/metrics ({reason}): give the server's HTTP door with --url"
        ) from None
