"""All series of a cascade, with names, labels and meanings, and their export to Ray, whose nodes serve them to Prometheus.

Routers have theirs at `GET /metrics`. Through Ray, routers and replicas of tiers report theirs with the labels `COMMON`. Names
are the same: ``ray_cascade_NAME``, with ``_total`` for counters. `docs/reference/metrics.md` has this table.
"""

import asyncio
import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from types import MappingProxyType
from typing import Literal, NamedTuple, TypeAlias, get_args

from ray.util.metrics import Gauge, Histogram

from deployments.replica import context

log = logging.getLogger(__name__)

Kind: TypeAlias = Literal["counter", "gauge", "histogram"]
Place: TypeAlias = Literal["router", "tier"]

RAY = "ray_"  # Ray's prefix of every name, which routers' pages have, too
PREFIX = f"{RAY}cascade_"
COMMON = ("application", "model", "tier", "replica")  # labels of all series through Ray
ROUTER = "router"  # the label `tier` of routers
EVERY_S = 2.0  # more often than Ray's workers report, every 10 s by default (RAY_metrics_report_interval_ms)

SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
LONG_SECONDS = (*SECONDS[4:], 60.0, 120.0, 300.0, 600.0)
TOKENS = tuple(float(1 << power) for power in range(18))


# names of vLLM's series with the same meaning as ours, where they differ, without the prefix ``vllm:``
VLLM = {
    "answers": "request_success",
    "proposed_tokens": "spec_decode_num_draft_tokens",
    "accepted_tokens": "spec_decode_num_accepted_tokens",
    "accepted_by_position": "spec_decode_num_accepted_tokens_per_pos",
}


@dataclass(frozen=True, slots=True)
class Series:
    """One series."""

    kind: Kind
    name: str  # without prefix and ``_total``
    help: str
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()  # upper bounds of a histogram
    places: tuple[Place, ...] = ()  # who reports it

    @property
    def shown(self) -> str:
        """The name of its samples; those of histograms have further suffixes."""
        return f"{PREFIX}{self.name}{'_total' if self.kind == 'counter' else ''}"

    @property
    def samples(self) -> tuple[str, ...]:
        """Names of all its samples."""
        ends = ("_bucket", "_count", "_sum") if self.kind == "histogram" else ("",)
        return tuple(f"{self.shown}{end}" for end in ends)


class Reading(NamedTuple):
    """A counter's total, a gauge's value, or one value for a histogram."""

    name: str
    labels: tuple[str, ...]  # values, in the order of the series' labels
    value: float


_counter, _gauge, _histogram = (partial(Series, kind) for kind in get_args(Kind))
EDGE = ("drafter", "verifier")
REQUESTS = (
    _counter(
        "answers", "Answers that ended, by outcome: a finish reason, an error's code, or `left` by the client.", ("outcome",)
    ),
    _counter("resumed_answers", "Answers that clients resumed after their stream had broken off."),
    _counter("refused", "Requests that got an error, by code.", ("code",)),
    _counter("undrafted_answers", "Answers of which the full tier scored no guess, by reason.", ("reason",)),
    _counter("prompt_tokens", "Tokens of prompts."),
    _counter("generation_tokens", "Tokens that the full tier wrote."),
    _gauge("num_requests_running", "Answers in progress."),
    _gauge("num_requests_waiting", "Answers that wait for their turn."),
    _histogram("e2e_request_latency_seconds", "From a request's arrival to the end of its answer.", buckets=LONG_SECONDS),
    _histogram("request_queue_time_seconds", "From a request's arrival to its answer's turn.", buckets=LONG_SECONDS),
    _histogram("time_to_first_token_seconds", "From a request's arrival to the first piece.", buckets=SECONDS),
    _histogram("inter_token_latency_seconds", "Between two pieces of an answer.", buckets=SECONDS),
    _histogram(
        "request_time_per_output_token_seconds", "Mean time between two tokens of an answer, of each answer.", buckets=SECONDS
    ),
    _histogram("request_prompt_tokens", "Tokens of a prompt.", buckets=TOKENS),
    _histogram("request_generation_tokens", "Tokens of an answer.", buckets=TOKENS),
)
EDGES = (
    _counter("passes", "Passes that gave own tokens, by edge.", EDGE),
    _counter("undrafted_passes", "Passes without a guess to score, by edge.", EDGE),
    _counter("waited_seconds", "Time that answers waited for guesses.", EDGE),
    _counter("proposed_tokens", "Guesses that the verifier scored, by edge.", EDGE),
    _counter("accepted_tokens", "Guesses that equalled the verifier's own token, by edge.", EDGE),
    _counter("proposed_by_position", "Guesses that were scored, by their distance from the text.", (*EDGE, "position")),
    _counter("accepted_by_position", "Guesses that were right, by their distance from the text.", (*EDGE, "position")),
    _counter("agreed_tokens", "Own tokens of a drafter that its verifier picked too, scored or not.", EDGE),
    _counter("corrections", "Tokens of a drafter that its verifier replaced.", EDGE),
)
CASCADE = (
    _gauge("speculation_active", "1 while drafts reach the full tier, 0 while they do not."),
    _gauge("tiers", "Tiers in the configuration."),
    _gauge("replicas", "Replicas that run, by tier.", ("tier",)),
    _gauge("full_replicas", "Replicas of the full tier that run."),
    _gauge("full_min_replicas", "Replicas of the full tier that should always run; 0 if it is scaled to zero."),
)
ALIGNMENT = (
    _gauge("alignment_answers", "Answers that the learner keeps."),
    _gauge("alignment_rounds", "Rounds of training of a drafter, by whether its weights were kept.", ("drafter", "outcome")),
    _gauge(
        "alignment_agreement",
        "Agreement of a drafter with its verifier on held-out answers, before and after its last round.",
        ("drafter", "when"),
    ),
    _gauge("alignment_progress", "Share of the round that runs; 0 if none does.", ("drafter",)),
    _gauge("alignment_swaps", "Times that a replica changed to other weights.", ("drafter",)),
)
BETWEEN = (
    _gauge("sessions_below", "Sessions that this process holds a lease for at tiers below."),
    _counter("leases_taken", "Leases taken on replicas of a tier below.", ("below",)),
    _counter("lease_wait_seconds", "Time that sessions waited for leases.", ("below",)),
    _counter("failovers", "Sessions lost at a tier below: answers continue elsewhere or without it.", ("below",)),
)
REPLICAS = (
    _gauge("healthy", "1 while a replica's loop runs and its model works."),
    _gauge("sessions", "Sessions that a replica serves."),
    _gauge("leases", "Leases on a replica."),
    _counter("tier_passes", "Passes of a replica."),
    _counter("tier_busy_seconds", "Time in passes."),
    _counter("tier_scored_tokens", "Positions scored."),
    _counter("tier_own_tokens", "Own tokens picked, those that were cut later included."),
    _counter("tier_pass_failures", "Passes that failed."),
    _gauge("pass_seconds", "What a pass of so many tokens costs, by tier.", ("tier", "tokens")),
    _gauge("context_seconds", "What each position held adds to a pass, by tier.", ("tier",)),
    _gauge("kv_cache_usage_perc", "Share of the memory for keys and values; 1 is full."),
    _gauge("kv_cache_tokens", "Positions for which there is room."),
    _counter("prefix_cache_queries", "Positions looked up for reuse."),
    _counter("prefix_cache_hits", "Positions reused."),
    _counter("num_preemptions", "Times that a session lost its place in memory."),
    _gauge(
        "tier_worth",
        "Measured tokens per second with a tier below over those without, at so many sessions.",
        ("drafter", "sampling", "sessions"),
    ),
)
# who reports each of them: routers (on their page and through Ray), or replicas of tiers (through Ray)
PLACES: dict[tuple[Place, ...], tuple[Series, ...]] = {
    ("router",): (*REQUESTS, *EDGES, *CASCADE, *ALIGNMENT),
    ("router", "tier"): BETWEEN,
    ("tier",): REPLICAS,
}
SERIES: Mapping[str, Series] = MappingProxyType(
    {series.name: replace(series, places=places) for places, listed in PLACES.items() for series in listed}
)


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
            shown, labels = series.shown.removeprefix(RAY), tuple(dict.fromkeys((*COMMON, *series.labels)))
            if series.kind == "histogram":
                instruments[name] = Histogram(shown, series.help, list(series.buckets), labels)
            else:  # counters become gauges, since Ray's own cannot be 0 and so would be absent at first
                instruments[name] = Gauge(shown, series.help, labels)
        match instruments[name]:
            case Gauge() as gauge:  # also unchanged ones, since Ray forgets gauges that are not repeated
                gauge.set(value, tags)
            case Histogram() as histogram:
                histogram.observe(value, tags)
