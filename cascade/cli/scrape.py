"""Reads a server's counters from its ``GET /metrics``."""

import os
import urllib.error
import urllib.request
from dataclasses import dataclass
from http.client import HTTPException
from typing import Self
from urllib.parse import urlsplit

from prometheus_client.parser import text_string_to_metric_families

from cascade.client.connection import API_KEY, NO_KEY, is_near
from cascade.errors import Unauthenticated, Unavailable

PREFIX = "ray_cascade_"
TIMEOUT_S = 5.0
Labels = tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class Scrape:
    """The samples of one scrape, by name without `PREFIX`, and by labels in alphabetical order."""

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
        """The name of the router that answered, one of several behind a port; "" if it has none."""
        return next((dict(labels)["router"] for name, labels in self.samples if name == "target_info"), "")

    def since(self, earlier: "Scrape | None") -> "Scrape":
        """The increase since ``earlier``; all counts if that is ``None``, or if the server has restarted since."""
        if earlier is None or self.total("answers_total") < earlier.total("answers_total"):
            return self
        return Scrape({key: value - earlier.samples.get(key, 0.0) for key, value in self.samples.items()})

    def value(self, name: str, **labels: str) -> float | None:
        """The sample with these labels; ``None`` if there is none."""
        return self.samples.get((name, tuple(sorted(labels.items()))))

    def total(self, name: str) -> float:
        """The sum over all labels; 0 if nothing was counted."""
        return sum(value for (series, _), value in self.samples.items() if series == name)

    def mean(self, name: str) -> float | None:
        """The mean of a histogram; ``None`` if it is empty."""
        count = self.total(f"{name}_count")
        return self.total(f"{name}_sum") / count if count else None


def scrape(url: str) -> Scrape:
    """Read the counters of the server at ``url``, with the key in ``CASCADE_API_KEY``.

    Raises `Unavailable` or `Unauthenticated`.
    """
    key = os.environ.get(API_KEY)
    try:
        if not url.startswith(("http://", "https://")):  # urllib would read files too
            raise ValueError("it must begin with http:// or https://")
        direct = [urllib.request.ProxyHandler({})] if is_near(urlsplit(url).netloc) else []
        opener = urllib.request.build_opener(*direct)
        request = urllib.request.Request(
            f"{url.rstrip('/')}/metrics", headers={"Authorization": f"Bearer {key}"} if key else {}
        )
        with opener.open(request, timeout=TIMEOUT_S) as answer:
            return Scrape.parse(answer.read().decode())
    except (OSError, ValueError, HTTPException) as error:  # the last one where something else than HTTP answers
        if isinstance(error, urllib.error.HTTPError) and error.code == 401:
            raise Unauthenticated(f"The server does not know the key in {API_KEY}" if key else NO_KEY) from None
        reason = error.reason if isinstance(error, urllib.error.URLError) else error
        raise Unavailable(
            f"There are no counters at {url}/metrics ({reason}): give the server's HTTP address with --url"
        ) from None
