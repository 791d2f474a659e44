"""`cascade top`: a live view of the tiers, edges and requests of a running server."""

import os
import time
import urllib.error
import urllib.request
from dataclasses import dataclass, field
from http.client import HTTPException
from typing import Any, Self
from urllib.parse import urlsplit

import click
from prometheus_client.parser import text_string_to_metric_families
from rich.console import Group, RenderableType
from rich.live import Live
from rich.table import Column, Table
from rich.text import Text

from cascade.cli.chat import DEFAULT_ADDRESS
from cascade.cli.screen import console, level_style
from cascade.client.connection import API_KEY, NO_KEY, is_near
from cascade.errors import CascadeError, Unauthenticated, Unavailable

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


EVERY_S = 1.0  # seconds between two updates


@dataclass(slots=True)
class Frame:
    """A server's state at one time; the part of an endpoint that failed is ``None``, and ``problems`` says why."""

    time_s: float  # on the clock of `time.monotonic`
    info: Any = None  # `cascade.client.ServerInfo`; not imported here, because it needs gRPC, which starts slowly
    scrape: Scrape | None = None
    problems: list[str] = field(default_factory=list)

    @property
    def router(self) -> str:
        return "" if self.scrape is None else self.scrape.router


@click.command()
@click.option("--address", default=DEFAULT_ADDRESS, show_default=True, help="The server's gRPC address.")
@click.option("--url", default="http://127.0.0.1:8000", show_default=True, help="The server's HTTP address, for counters.")
@click.option("--once", is_flag=True, help="Print totals since the start, and end.")
def top(address: str, url: str, once: bool) -> None:
    """Watch the tiers, edges and requests of a server until Ctrl-C."""
    from cascade.client import Client

    with Client(address) as client:
        last = look(client, url)
        seen: dict[str, Frame] = {}  # by router, its latest frame: any of several routers may answer
        if once:
            if last.info is None:
                raise CascadeError(last.problems[0])
            console.print(view(last))
            return
        try:
            with Live(view(last), console=console, screen=console.is_terminal, auto_refresh=False) as live:
                while True:
                    time.sleep(EVERY_S)
                    seen[last.router], last = last, look(client, url)
                    live.update(view(last, seen.get(last.router)), refresh=True)
        except KeyboardInterrupt:
            return


def look(client: Any, url: str) -> Frame:
    frame = Frame(time.monotonic())
    try:
        frame.info = client.describe()
    except CascadeError as error:
        frame.problems.append(str(error))
    try:
        frame.scrape = scrape(url)
    except CascadeError as error:
        frame.problems.append(str(error))
    return frame


def view(frame: Frame, before: Frame | None = None) -> RenderableType:
    """The frame as shown: with rates since ``before``, or with totals since the server's start."""
    parts: list[RenderableType] = []
    if frame.info is not None:
        parts.append(_tiers(frame.info))
        if any(tier.worth for tier in frame.info.tiers):
            parts.append(_worth(frame.info))
    if frame.scrape is not None:
        earlier = before.scrape if before is not None else None
        seconds = frame.time_s - before.time_s if before is not None and earlier is not None else None
        parts += [_requests(frame.scrape, earlier, seconds), _edges(frame.scrape, earlier, seconds)]
        if any(name == "alignment_progress" for name, _ in frame.scrape.samples):
            parts.append(_alignment(frame.scrape))
    parts += [Text(problem, "bold red") for problem in frame.problems]
    return Group(*parts)


def _tiers(info: Any) -> Table:
    table = Table("tier", "model", "replicas", "sessions", "parameters", "device", "pass of 1 token", title="Tiers")
    for level, tier in enumerate(info.tiers):
        cost = f"{tier.pass_cost[0][1] * 1e3:.2f} ms" if tier.pass_cost else "-"
        table.add_row(
            Text(f"■ {tier.name}", level_style(level)),
            tier.model,
            str(tier.replicas),
            str(tier.sessions),
            f"{tier.parameters / 1e6:,.1f} M" if tier.parameters else "-",
            tier.device or "-",
            cost,
        )
    return table


def _worth(info: Any) -> Table:
    """The measured gain from each tier below, and the cost of its pass relative to one of the tier above."""
    table = Table("drafter → verifier", "requests", "sessions", "tokens/s with over without", "pass over pass", title="Gain")
    passes = {tier.name: tier.pass_cost[0][1] for tier in info.tiers if tier.pass_cost}
    for tier in info.tiers:
        for drafter, sampled, sessions, factor in tier.worth:
            price = f"{passes[drafter] / passes[tier.name]:.2f}" if {drafter, tier.name} <= passes.keys() else "-"
            kind = "sampled" if sampled else "greedy"
            table.add_row(f"{drafter} → {tier.name}", kind, f"about {sessions}", f"{factor:.2f}", price)
    return table


def _requests(now: Scrape, earlier: Scrape | None, seconds: float | None) -> Table:
    change = now.since(earlier)
    suffix = "" if seconds is None else "/s"
    columns = ("running", "waiting", f"answers{suffix}", f"refused{suffix}", f"tokens{suffix}", "first token", "gap")
    table = Table(*columns, title="Requests")
    rates = [_rate(change.total(name), seconds) for name in ("answers_total", "refused_total", "generation_tokens_total")]
    waits = [change.mean(name) for name in ("time_to_first_token_seconds", "inter_token_latency_seconds")]
    table.add_row(
        f"{now.total('num_requests_running'):.0f}",
        f"{now.total('num_requests_waiting'):.0f}",
        *rates,
        *("-" if mean is None else f"{mean * 1e3:.1f} ms" for mean in waits),
    )
    return table


def _edges(now: Scrape, earlier: Scrape | None, seconds: float | None) -> Table:
    """Counts of each edge; an answer counts when it is complete."""
    suffix = "" if seconds is None else "/s"
    rates = (f"{name}{suffix}" for name in ("passes", "proposed", "accepted"))
    name = Column("drafter → verifier", no_wrap=True)
    table = Table(name, *rates, "acceptance", title="Edges")
    change = now.since(earlier)
    for series, labels in change.samples:
        if series == "passes_total" and now.samples[series, labels]:
            edge, names = dict(labels), ("passes_total", "proposed_tokens_total", "accepted_tokens_total")
            passes, proposed, accepted = (change.value(name, **edge) or 0.0 for name in names)
            table.add_row(
                f"{'(alone)' if edge['drafter'] == 'none' else edge['drafter']} → {edge['verifier']}",
                *(_rate(count, seconds) for count in (passes, proposed, accepted)),
                f"{accepted / proposed:.0%}" if proposed else "-",
            )
    return table


def _alignment(now: Scrape) -> Table:
    title = f"Learning, from {now.total('alignment_answers'):,.0f} answers"
    table = Table("drafter", "round", "kept", "dropped", "agreement before", "after", "swaps", title=title)
    for drafter in sorted(dict(labels)["drafter"] for name, labels in now.samples if name == "alignment_progress"):
        progress = now.value("alignment_progress", drafter=drafter)
        rounds = [now.value("alignment_rounds", drafter=drafter, outcome=outcome) for outcome in ("kept", "dropped")]
        shares = [now.value("alignment_agreement", drafter=drafter, when=when) for when in ("before", "after")]
        table.add_row(
            drafter,
            f"{progress:.0%}" if progress else "-",
            *(f"{count or 0:,.0f}" for count in rounds),
            *("-" if share is None else f"{share:.3f}" for share in shares),
            f"{now.value('alignment_swaps', drafter=drafter) or 0:,.0f}",
        )
    return table


def _rate(count: float, seconds: float | None) -> str:
    return f"{count:,.0f}" if seconds is None else f"{count / seconds:,.1f}"
