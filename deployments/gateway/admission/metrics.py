"""The router's metrics, for Prometheus at GET /metrics and through Ray."""

import logging
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import combinations
from typing import Any, TypeAlias, get_args

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Metric, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from cascade.answer import Completion, FinishReason, Undrafted
from cascade.errors import KINDS
from cascade.messages import Edge
from deployments.gateway.admission.places import Places
from deployments.ops.metrics import PREFIX, SERIES, Kind, Reading
from deployments.replica import replica_name

log = logging.getLogger(__name__)

Source: TypeAlias = Callable[[], Iterable[Reading]]

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

NOBODY = "none"  # the drafter of passes without guesses
LEFT = "left"  # the outcome of an answer whose client has left

MAX_KEPT = 1 << 16  # values of histograms between two readings

OF_PASSES = {  # counters by name, and the fields of `Edge` that they sum
    "passes": "passes",
    "undrafted_passes": "undrafted_passes",
    "waited_seconds": "waited_s",
    "proposed_tokens": "proposed",
    "accepted_tokens": "accepted",
}
OF_DRAFTERS = {"agreed_tokens": "agreed", "corrections": "corrected"}  # the same, for edges with a drafter
BY_POSITION = ("proposed_by_position", "accepted_by_position")  # fields of `Edge`


class RouterMetrics:
    """Metrics of one router: an instrument for each series that only routers have.

    ``names`` are the tiers, ``drafters`` the drafters inside tiers, each bottom to top. The router's own name, if it has one,
    is on the page as `target_info`, since several routers may answer at one port.
    """

    def __init__(self, places: Places, names: Sequence[str], drafters: Sequence[str] = ()) -> None:
        router, self._full = replica_name(), names[-1]
        self._registry = CollectorRegistry(target_info={"router": router} if router else None)
        own = [series for series in SERIES.values() if series.places == ("router",)]
        given = {series.name: (f"{PREFIX}{series.name}", series.help, series.labels) for series in own}
        kinds = {kind: [series.name for series in own if series.kind == kind] for kind in get_args(Kind)}
        self.counters = {name: Counter(*given[name], registry=self._registry) for name in kinds["counter"]}
        self.gauges = {name: Gauge(*given[name], registry=self._registry) for name in kinds["gauge"]}
        self._histograms = {
            name: Histogram(*given[name], registry=self._registry, buckets=SERIES[name].buckets) for name in kinds["histogram"]
        }
        self._kept: deque[Reading] | None = None  # values of histograms since the last `readings`, if it was called
        self._drafted: bool | None = None  # the last logged state; None if nothing was logged yet
        self._guesses = Edge("", self._full)  # totals of guesses over all answers
        self.gauges["speculation_active"].set(1)  # until an answer shows the contrary
        self.gauges["num_requests_running"].set_function(lambda: places.num_running)
        self.gauges["num_requests_waiting"].set_function(lambda: places.num_waiting)
        self.gauges["tiers"].set(len(names))
        for name, *labels in _expected(names, drafters):
            self.counters[name].labels(*labels)  # creates the counter at 0, so that rates include the first event

    def also(self, source: Source) -> None:
        """Add counters and gauges that ``source`` reads whenever the page is shown."""
        self._registry.register(_Read(source))

    def text(self) -> bytes:
        """The page in Prometheus' text format."""
        return generate_latest(self._registry) + spec_decode(self._guesses).encode()

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

    def observe(self, name: str, value: float) -> None:
        """Add a value to the histogram of that name."""
        self._histograms[name].observe(value)
        if self._kept is not None:
            self._kept.append(Reading(name, (), value))

    def ended(self, outcome: str, prompt_tokens: int, output_tokens: int) -> None:
        """An answer is over, complete or not."""
        self.counters["answers"].labels(outcome).inc()
        self.counters["prompt_tokens"].inc(prompt_tokens)
        self.counters["generation_tokens"].inc(output_tokens)

    def completed(self, completion: Completion, seconds: float) -> None:
        """Count a complete answer, ``seconds`` after its request, and the totals of its edges."""
        stats = completion.stats
        self.observe("e2e_request_latency_seconds", seconds)
        self.observe("request_prompt_tokens", stats.prompt_tokens)
        self.observe("request_generation_tokens", stats.completion_tokens)
        if stats.first_token_s is not None and stats.completion_tokens > 1:
            written_s = max(0.0, seconds - stats.first_token_s)
            self.observe("request_time_per_output_token_seconds", written_s / (stats.completion_tokens - 1))
        self._guesses += stats.drafted
        for edge in stats.edges:
            self._count(edge)
        if stats.undrafted is not None:
            self.counters["undrafted_answers"].labels(stats.undrafted).inc()
        if stats.undrafted not in ("disabled", "short"):  # such answers say nothing about the tiers below
            self._drafts(stats.undrafted)

    def _count(self, edge: Edge) -> None:
        labels = (edge.drafter or NOBODY, edge.verifier)
        for name, field in (OF_PASSES | (OF_DRAFTERS if edge.drafter else {})).items():
            self.counters[name].labels(*labels).inc(getattr(edge, field))
        for name in BY_POSITION if edge.drafter else ():
            for number, count in enumerate(getattr(edge, name)):
                self.counters[name].labels(*labels, str(number)).inc(count)

    def learning(self, progress: Mapping[str, Any]) -> None:
        """Take the learner's progress, see `deployments.ops.learner.Learner.progress`."""
        gauges = self.gauges
        gauges["alignment_answers"].set(progress["answers"])
        for name, record in progress["students"].items():
            gauges["alignment_progress"].labels(name).set(record["share"])
            gauges["alignment_swaps"].labels(name).set(record["swaps"])
            for outcome in ("kept", "dropped"):
                gauges["alignment_rounds"].labels(name, outcome).set(record[outcome])
            for when in ("before", "after"):
                if record[when] is not None:
                    gauges["alignment_agreement"].labels(name, when).set(record[when])

    def replicas(self, tier: str, count: int) -> None:
        """Set the number of replicas of a tier."""
        self.gauges["replicas"].labels(tier).set(count)
        if tier == self._full:
            self.gauges["full_replicas"].set(count)

    def _drafts(self, why: Undrafted | None) -> None:
        """Note whether drafts reach the full tier, and log it when that changes."""
        active = why is None
        self.gauges["speculation_active"].set(active)
        if not active and self._drafted is not False:
            level = logging.WARNING if why == "no_replica" else logging.INFO  # other reasons are choices: drafts do not pay
            log.log(level, "Speculation is configured but inactive (%s): answers are those of the full tier alone", why)
        elif active and self._drafted is False:
            log.info("Speculation is active again")
        self._drafted = active


class _Read(Collector):
    """Adapts a source to Prometheus' library."""

    def __init__(self, source: Source) -> None:
        self._source = source

    def collect(self) -> Iterator[Metric]:
        families: dict[str, Metric] = {}
        for name, values, value in self._source():
            series = SERIES[name]
            kind = CounterMetricFamily if series.kind == "counter" else GaugeMetricFamily
            if name not in families:
                families[name] = kind(f"{PREFIX}{name}", series.help, labels=series.labels)
            families[name].add_metric(values, value)  # type: ignore[attr-defined]  # both kinds have it
        yield from families.values()


def _expected(names: Sequence[str], drafters: Sequence[str]) -> Iterator[tuple[str, ...]]:
    """Labels of counters that can be expected from the configuration; of positions only the first."""
    codes = sorted({kind.code for kind in KINDS})
    yield from (("refused", code) for code in codes)
    yield from (("answers", outcome) for outcome in (*get_args(FinishReason), LEFT, *codes))
    yield from (("undrafted_answers", why) for why in get_args(Undrafted))
    edges = [edge for edge in combinations((*drafters, *names), 2) if edge[1] in names]
    yield from ((name, *edge) for edge in edges for name in (*OF_PASSES, *OF_DRAFTERS))
    yield from ((name, *edge, "0") for edge in edges for name in BY_POSITION)
    yield from ((name, NOBODY, verifier) for verifier in names for name in OF_PASSES)


def spec_decode(drafted: Edge) -> str:
    """Totals of all drafters of the full tier under vLLM's names, in Prometheus' text format, for `vllm bench serve`.

    That sums every line with such a name, so Prometheus' library, which adds lines with creation times, cannot be used.
    """
    positions = {f'{{position="{position}"}}': count for position, count in enumerate(drafted.accepted_by_position)}
    counts = {
        "num_drafts": {"": drafted.passes},
        "num_draft_tokens": {"": drafted.proposed},
        "num_accepted_tokens": {"": drafted.accepted},
        "num_accepted_tokens_per_pos": positions,
    }
    lines = []
    for name, samples in counts.items():
        whole = f"vllm:spec_decode_{name}_total"
        lines += [f"# TYPE {whole} counter", *(f"{whole}{labels} {float(count)}" for labels, count in samples.items())]
    return "\n".join(lines) + "\n"
