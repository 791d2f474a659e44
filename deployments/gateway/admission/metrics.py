"""What the router counts, as Prometheus reads it at GET /metrics, and through Ray."""

import logging
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from cascade.answer import Completion, Undrafted
from cascade.messages import Edge
from deployments.gateway.admission.places import Places
from deployments.ops.metrics.drift import Drift
from deployments.ops.metrics.page import Page, Source
from deployments.ops.metrics.series import Reading, sampling
from deployments.replica import replica_name

log = logging.getLogger(__name__)

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

OF_PASSES = {  # series and what `Edge` calls them
    "passes": "passes",
    "undrafted_passes": "undrafted_passes",
    "waited_seconds": "waited_s",
    "proposed_tokens": "proposed",
    "accepted_tokens": "accepted",
}
OF_DRAFTERS = {  # likewise, of edges that have one
    "agreed_tokens": "agreed",
    "corrections": "corrected",
    "prefetched_corrections": "prefetched",
    "prefetched_tokens": "prefetched_tokens",
}
# likewise, of the same names, each with numbers by rank or position
BY_NUMBER = ("proposed_by_rank", "accepted_by_rank", "proposed_by_position", "accepted_by_position")


OF_LEARNING = ("answers", "rounds", "agreement", "progress", "swaps")


class RouterMetrics:
    """Counters of one router; ``names`` are the tiers, bottom to top."""

    def __init__(self, places: Places, names: Sequence[str]) -> None:
        page = self.page = Page(replica_name())
        self._full = names[-1]
        self._answers = page.counter("answers")
        self._resumed = page.counter("resumed_answers")
        self._refused = page.counter("refused")
        self._plain = page.counter("undrafted_answers")
        self._prompt = page.counter("prompt_tokens")
        self._output = page.counter("generation_tokens")
        self._latency = page.histogram("e2e_request_latency_seconds")
        self._queue = page.histogram("request_queue_time_seconds")
        self._first = page.histogram("time_to_first_token_seconds")
        self._gaps = page.histogram("inter_token_latency_seconds")
        self._per_token = page.histogram("request_time_per_output_token_seconds")
        self._prompt_len = page.histogram("request_prompt_tokens")
        self._output_len = page.histogram("request_generation_tokens")
        self._edges = {name: page.counter(name) for name in (*OF_PASSES, *OF_DRAFTERS, *BY_NUMBER)}
        self._agreement = page.gauge("drafter_agreement")
        self._level = page.gauge("drafter_agreement_level")
        self._drift = page.gauge("acceptance_drift")
        self._drifts: dict[tuple[str, str, str], Drift] = defaultdict(Drift)
        self._active = page.gauge("speculation_active")
        self._replicas = page.gauge("replicas")
        self._full_replicas = page.gauge("full_replicas")
        self._full_min_replicas = page.gauge("full_min_replicas")
        self._pass = page.gauge("pass_seconds")
        self._context = page.gauge("context_seconds")
        self._routes = page.counter("prefix_routes")
        self._learning = {name: page.gauge(f"alignment_{name}") for name in OF_LEARNING}
        self._drafted: bool | None = None  # as the log says; nothing yet
        self._guesses = Edge("", self._full)  # of all answers
        page.gauge("num_requests_running").set_function(lambda: places.num_running)
        page.gauge("num_requests_waiting").set_function(lambda: places.num_waiting)
        page.gauge("tiers").set(len(names))

    def text(self) -> bytes:
        """In Prometheus' text form."""
        return self.page.text() + spec_decode(self._guesses).encode()

    def readings(self) -> Iterator[Reading]:
        """What there is to be told to Ray: see `Page.readings`."""
        return self.page.readings()

    def also(self, source: Source) -> None:
        """Show what ``source`` reads, too."""
        self.page.also(source)

    def refused(self, code: str) -> None:
        self._refused.labels(code).inc()

    def resumed(self) -> None:
        self._resumed.inc()

    def turn(self, seconds: float) -> None:
        """An answer has its turn, so long after its request."""
        self._queue(seconds)

    def piece(self, seconds: float, first: bool) -> None:
        """One piece came so long after the one before it, or after the request."""
        (self._first if first else self._gaps)(seconds)

    def ended(self, outcome: str, prompt_tokens: int, output_tokens: int) -> None:
        """An answer is over."""
        self._answers.labels(outcome).inc()
        self._prompt.inc(prompt_tokens)
        self._output.inc(output_tokens)

    def completed(self, completion: Completion, seconds: float, *, sampled: bool) -> None:
        """A whole answer, so long after its request: what it took, and what happened on every edge."""
        stats = completion.stats
        self._latency(seconds)
        self._prompt_len(stats.prompt_tokens)
        self._output_len(stats.completion_tokens)
        if stats.first_token_s is not None and stats.completion_tokens > 1:
            self._per_token(max(0.0, seconds - stats.first_token_s) / (stats.completion_tokens - 1))
        self._guesses += stats.drafted
        for edge in stats.edges:
            self._count(edge)
            if edge.drafter:
                self._watch(edge, sampling(sampled))
        why = stats.undrafted
        if why is not None:
            self._plain.labels(why).inc()
        if why not in ("disabled", "short"):  # else the answer says nothing of the tiers below
            self._drafts(why)

    def _count(self, edge: Edge) -> None:
        labels = (edge.drafter or "none", edge.verifier)
        for name, field in (OF_PASSES | (OF_DRAFTERS if edge.drafter else {})).items():
            self._edges[name].labels(*labels).inc(getattr(edge, field))
        for name in BY_NUMBER if edge.drafter else ():
            for number, count in enumerate(getattr(edge, name)):
                self._edges[name].labels(*labels, str(number)).inc(count)

    def _watch(self, edge: Edge, sampling: str) -> None:
        """Whether a drafter agrees less than it used to; that is logged when it changes."""
        labels = (edge.drafter, edge.verifier, sampling)
        drift = self._drifts[labels]
        if drift.observe(*judged(edge), time.monotonic()):
            level = logging.WARNING if drift.alarm else logging.INFO
            said = (*labels, drift.recent, drift.level, "has fallen" if drift.alarm else "is back")
            log.log(level, "%s agrees with %s (%s) on %.2f of its tokens, on %.2f in the long run: its acceptance %s", *said)
        if drift.known:
            self._agreement.labels(*labels).set(drift.recent)
            self._level.labels(*labels).set(drift.level)
            self._drift.labels(*labels).set(drift.alarm)

    def learning(self, said: Mapping[str, Any]) -> None:
        """The learner says how far it is, see `deployments.ops.learner.Learner.progress`."""
        gauges = self._learning
        gauges["answers"].set(said["answers"])
        for student, of in said["students"].items():
            gauges["progress"].labels(student).set(of["share"])
            gauges["swaps"].labels(student).set(of["swaps"])
            for outcome in ("kept", "dropped"):
                gauges["rounds"].labels(student, outcome).set(of[outcome])
            for when in ("before", "after"):
                if of[when] is not None:
                    gauges["agreement"].labels(student, when).set(of[when])

    @property
    def drifting(self) -> set[str]:
        """Drafters that agree less than they used to."""
        return {labels[0] for labels, drift in self._drifts.items() if drift.alarm}

    def started(self, drafters: int) -> None:
        """The router has started with so many tiers ready below the full one, of at least one that is configured."""
        self._drafts(None if drafters else "no_replica")

    def needs(self, replicas: int) -> None:
        """So many replicas of the full tier should always run."""
        self._full_min_replicas.set(replicas)

    def tier(self, name: str, replicas: int, state: Mapping[str, Any] | None) -> None:
        """A tier has so many replicas, and one of them says this of itself."""
        self._replicas.labels(name).set(replicas)
        if name == self._full:
            self._full_replicas.set(replicas)
        for point in (state or {}).get("pass_cost", ()):
            self._pass.labels(name, point["tokens"]).set(point["seconds"])
        if state is not None and "context_s" in state:
            self._context.labels(name).set(state["context_s"])

    def routed(self, outcome: str) -> None:
        """A session met a full replica that knows its beginning, or not."""
        self._routes.labels(outcome).inc()

    def _drafts(self, why: Undrafted | None) -> None:
        """Note whether drafts reach the full tier, and log it when that changes."""
        active = why is None
        self._active.set(active)
        if not active and self._drafted is not False:
            log.warning("Speculation is configured but inactive (%s): answers are those of the full tier alone", why)
        elif active and self._drafted is False:
            log.info("Speculation is active again")
        self._drafted = active


def spec_decode(drafted: Edge) -> str:
    """What all drafters did for the full tier under vLLM's names, in Prometheus' text form: `vllm bench serve` reads these.

    Written out, for it adds up every line that begins so, also the times of creation that Prometheus' library would add.
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


def judged(edge: Edge) -> tuple[int, int]:
    """How many tokens of a drafter were right and wrong, however many of them were scored.

    Of drafters inside tiers, whose other tokens nobody counts, the first ones after a text.
    """
    if edge.agreed or edge.corrected:
        return edge.agreed, edge.corrected
    proposed, right = (sum(counts[:1]) for counts in (edge.proposed_by_position, edge.accepted_by_position))
    return right, proposed - right
