"""What the router counts, as Prometheus reads it at GET /metrics."""

import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from cascade.answer import Completion, Undrafted
from cascade.messages import Edge
from deployments.admission.audit_metrics import AuditMetrics

log = logging.getLogger(__name__)

SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class Occupancy(Protocol):
    """How many answers there are; see `deployments.admission.admission.Places`."""

    num_running: int

    @property
    def num_waiting(self) -> int: ...


class RouterMetrics:
    """Counters of one router; ``names`` are the tiers, bottom to top."""

    def __init__(self, places: Occupancy, names: Sequence[str]) -> None:
        self._registry = CollectorRegistry()
        made: dict[str, Any] = {"registry": self._registry, "namespace": "cascade"}
        self._answers = Counter(
            "answers", "Answers that ended, by how: a finish reason, an error's code, left.", ["outcome"], **made
        )
        self._resumed = Counter("resumed_answers", "Answers that clients went on with, whose streams had broken.", **made)
        self._refused = Counter("refused", "Requests that got an error, by its code.", ["code"], **made)
        self._prompt = Counter("prompt_tokens", "Tokens of prompts.", **made)
        self._output = Counter("output_tokens", "Tokens that the full tier wrote.", **made)
        self._proposed = Counter("proposed_tokens", "Guesses that were scored, by edge.", ["drafter", "verifier"], **made)
        self._accepted = Counter("accepted_tokens", "Guesses that were right, by edge.", ["drafter", "verifier"], **made)
        self._passes = Counter("passes", "Passes that gave own tokens, by edge.", ["drafter", "verifier"], **made)
        edge, ranked = ["drafter", "verifier"], ["drafter", "verifier", "rank"]
        self._proposed_by_rank = Counter(
            "proposed_by_rank", "Guesses that were scored: own tokens of the drafter (0), its runner-ups.", ranked, **made
        )
        self._accepted_by_rank = Counter("accepted_by_rank", "Guesses that were right, likewise.", ranked, **made)
        self._corrected = Counter("corrections", "Tokens of a drafter that its verifier replaced.", edge, **made)
        self._prepared = Counter(
            "prepared_corrections", "Corrections that the drafter had written behind before it heard of them.", edge, **made
        )
        self._ready = Counter("prepared_tokens", "Tokens that it had written there.", edge, **made)
        self._first = Histogram("first_token_seconds", "From a request's arrival to the first piece.", buckets=SECONDS, **made)
        self._gaps = Histogram("piece_gap_seconds", "Between two pieces of an answer.", buckets=SECONDS, **made)
        self._plain = Counter("undrafted_answers", "Answers without a single guess scored, by reason.", ["reason"], **made)
        self._active = Gauge("speculation_active", "1 while drafts reach the full tier, 0 while they do not.", **made)
        self._replicas = Gauge("replicas", "Replicas that run, by tier.", ["tier"], **made)
        self._pass = Gauge("pass_seconds", "What a pass of so many tokens costs, by tier.", ["tier", "tokens"], **made)
        self._context = Gauge("context_seconds", "What each position held adds to a pass, by tier.", ["tier"], **made)
        self._routes = Counter(
            "prefix_routes", "Sessions, by whether they met a full replica that knows how they begin.", ["outcome"], **made
        )
        self._asked = Gauge("kv_asked_tokens", "Tokens with which sessions came to a full replica.", ["replica"], **made)
        self._reused = Gauge("kv_reused_tokens", "Of these, tokens whose keys and values it had.", ["replica"], **made)
        self._drafted: bool | None = None  # as the log says; nothing yet
        running = Gauge("running", "Answers being written.", **made)
        waiting = Gauge("waiting", "Answers that wait for their turn.", **made)
        running.set_function(lambda: places.num_running)
        waiting.set_function(lambda: places.num_waiting)
        Gauge("tiers", "Tiers in the configuration.", **made).set(len(names))
        self.audit = AuditMetrics(made)

    def text(self) -> bytes:
        """In Prometheus' text form."""
        return generate_latest(self._registry)

    def refused(self, code: str) -> None:
        self._refused.labels(code).inc()

    def resumed(self) -> None:
        self._resumed.inc()

    def piece(self, seconds: float, first: bool) -> None:
        """One piece came so long after the one before it, or after the request."""
        (self._first if first else self._gaps).observe(seconds)

    def ended(self, outcome: str, prompt_tokens: int, output_tokens: int) -> None:
        """An answer is over."""
        self._answers.labels(outcome).inc()
        self._prompt.inc(prompt_tokens)
        self._output.inc(output_tokens)

    def completed(self, completion: Completion) -> None:
        """What happened on every edge for an answer."""
        edges = completion.stats.edges
        for edge in edges:
            labels = (edge.drafter or "none", edge.verifier)
            self._proposed.labels(*labels).inc(edge.proposed)
            self._accepted.labels(*labels).inc(edge.accepted)
            self._passes.labels(*labels).inc(edge.passes)
            if edge.drafter:
                self._branched(edge)
        why = completion.stats.undrafted
        if why is not None:
            self._plain.labels(why).inc()
        if why not in ("disabled", "short"):  # else the answer says nothing of the tiers below
            self._drafts(why)

    def _branched(self, edge: Edge) -> None:
        """What became of a drafter's runner-ups and branches."""
        labels = (edge.drafter, edge.verifier)
        for rank, count in enumerate(edge.proposed_by_rank):
            self._proposed_by_rank.labels(*labels, str(rank)).inc(count)
        for rank, count in enumerate(edge.accepted_by_rank):
            self._accepted_by_rank.labels(*labels, str(rank)).inc(count)
        self._corrected.labels(*labels).inc(edge.corrected)
        self._prepared.labels(*labels).inc(edge.prepared)
        self._ready.labels(*labels).inc(edge.waiting)

    def started(self, drafters: int) -> None:
        """The router has started with so many tiers ready below the full one, of at least one that is configured."""
        self._drafts(None if drafters else "no_replica")

    def tier(self, name: str, replicas: int, state: Mapping[str, Any] | None) -> None:
        """A tier has so many replicas, and one of them says this of itself."""
        self._replicas.labels(name).set(replicas)
        for point in (state or {}).get("pass_cost", ()):
            self._pass.labels(name, point["tokens"]).set(point["seconds"])
        if state is not None and "context_s" in state:
            self._context.labels(name).set(state["context_s"])

    def routed(self, outcome: str) -> None:
        """A session met a full replica that knows its beginning, or not."""
        self._routes.labels(outcome).inc()

    def reuse(self, replicas: Iterable[Mapping[str, Any]]) -> None:
        """What each full replica has reused of the texts that came to it; those that are gone are told no more."""
        for gauge in (self._asked, self._reused):
            gauge.clear()
        for state in replicas:
            self._asked.labels(state["address"]).set(state["asked"])
            self._reused.labels(state["address"]).set(state["reused"])

    def _drafts(self, why: Undrafted | None) -> None:
        """Note whether drafts reach the full tier, and log it when that changes."""
        active = why is None
        self._active.set(active)
        if not active and self._drafted is not False:
            log.warning("Speculation is configured but inactive (%s): answers are those of the full tier alone", why)
        elif active and self._drafted is False:
            log.info("Speculation is active again")
        self._drafted = active
