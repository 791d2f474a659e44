"""What the router counts, as Prometheus reads it at GET /metrics, and through Ray."""

import logging
from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations
from typing import Any, get_args

from cascade.answer import Completion, FinishReason, Undrafted
from cascade.errors import KINDS
from cascade.messages import Edge
from deployments.gateway.admission.places import Places
from deployments.ops.metrics.page import Page
from deployments.replica import replica_name

log = logging.getLogger(__name__)

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

NOBODY = "none"  # the drafter of passes without guesses
LEFT = "left"  # the outcome of an answer whose client has gone

COUNTERS = ("answers", "resumed_answers", "refused", "undrafted_answers", "prompt_tokens", "generation_tokens")
OF_PASSES = {  # counters, and the fields of `Edge` that they add up
    "passes": "passes",
    "undrafted_passes": "undrafted_passes",
    "waited_seconds": "waited_s",
    "proposed_tokens": "proposed",
    "accepted_tokens": "accepted",
}
OF_DRAFTERS = {  # the same, of edges that have a drafter
    "agreed_tokens": "agreed",
    "corrections": "corrected",
}
BY_POSITION = ("proposed_by_position", "accepted_by_position")  # as the fields are called
HISTOGRAMS = (
    "e2e_request_latency_seconds",
    "request_queue_time_seconds",
    "time_to_first_token_seconds",
    "inter_token_latency_seconds",
    "request_time_per_output_token_seconds",
    "request_prompt_tokens",
    "request_generation_tokens",
)
GAUGES = ("speculation_active", "replicas", "full_replicas", "full_min_replicas")
OF_LEARNING = ("answers", "rounds", "agreement", "progress", "swaps")


class RouterMetrics(Page):
    """What one router counts; ``names`` are the tiers, and ``drafters`` those inside of tiers, each bottom to top."""

    def __init__(self, places: Places, names: Sequence[str], drafters: Sequence[str] = ()) -> None:
        super().__init__(replica_name())
        self._full = names[-1]
        self.counters = {name: self.counter(name) for name in (*COUNTERS, *OF_PASSES, *OF_DRAFTERS, *BY_POSITION)}
        self.observe = {name: self.histogram(name) for name in HISTOGRAMS}
        self.gauges = {name: self.gauge(name) for name in GAUGES}
        self.gauges["speculation_active"].set(1)  # until answers say otherwise
        self._learning = {name: self.gauge(f"alignment_{name}") for name in OF_LEARNING}
        self._drafted: bool | None = None  # as the log says; nothing yet
        self._guesses = Edge("", self._full)  # all answers' guesses
        self.gauge("num_requests_running").set_function(lambda: places.num_running)
        self.gauge("num_requests_waiting").set_function(lambda: places.num_waiting)
        self.gauge("tiers").set(len(names))
        for name, *labels in _expected(names, drafters):
            self.counters[name].labels(*labels)  # 0, so that a rate sees the first that is counted

    def text(self) -> bytes:
        """In Prometheus' text form."""
        return super().text() + spec_decode(self._guesses).encode()

    def refused(self, code: str) -> None:
        """A request got an error."""
        self.counters["refused"].labels(code).inc()

    def ended(self, outcome: str, prompt_tokens: int, output_tokens: int) -> None:
        """An answer is over, complete or not."""
        self.counters["answers"].labels(outcome).inc()
        self.counters["prompt_tokens"].inc(prompt_tokens)
        self.counters["generation_tokens"].inc(output_tokens)

    def completed(self, completion: Completion, seconds: float) -> None:
        """An answer is complete, so long after its request: what it took, and what happened on every edge."""
        stats, observe = completion.stats, self.observe
        observe["e2e_request_latency_seconds"](seconds)
        observe["request_prompt_tokens"](stats.prompt_tokens)
        observe["request_generation_tokens"](stats.completion_tokens)
        if stats.first_token_s is not None and stats.completion_tokens > 1:
            written_s = max(0.0, seconds - stats.first_token_s)
            observe["request_time_per_output_token_seconds"](written_s / (stats.completion_tokens - 1))
        self._guesses += stats.drafted
        for edge in stats.edges:
            self._count(edge)
        if stats.undrafted is not None:
            self.counters["undrafted_answers"].labels(stats.undrafted).inc()
        if stats.undrafted not in ("disabled", "short"):  # else the answer says nothing of the tiers below
            self._drafts(stats.undrafted)

    def _count(self, edge: Edge) -> None:
        labels = (edge.drafter or NOBODY, edge.verifier)
        for name, field in (OF_PASSES | (OF_DRAFTERS if edge.drafter else {})).items():
            self.counters[name].labels(*labels).inc(getattr(edge, field))
        for name in BY_POSITION if edge.drafter else ():
            for number, count in enumerate(getattr(edge, name)):
                self.counters[name].labels(*labels, str(number)).inc(count)

    def learning(self, progress: Mapping[str, Any]) -> None:
        """The learner tells its progress, see `deployments.ops.learner.Learner.progress`."""
        gauges = self._learning
        gauges["answers"].set(progress["answers"])
        for name, student in progress["students"].items():
            gauges["progress"].labels(name).set(student["share"])
            gauges["swaps"].labels(name).set(student["swaps"])
            for outcome in ("kept", "dropped"):
                gauges["rounds"].labels(name, outcome).set(student[outcome])
            for when in ("before", "after"):
                if student[when] is not None:
                    gauges["agreement"].labels(name, when).set(student[when])

    def replicas(self, tier: str, count: int) -> None:
        """A tier has so many replicas."""
        self.gauges["replicas"].labels(tier).set(count)
        if tier == self._full:
            self.gauges["full_replicas"].set(count)

    def _drafts(self, why: Undrafted | None) -> None:
        """Note whether drafts reach the full tier, and log it when that changes."""
        active = why is None
        self.gauges["speculation_active"].set(active)
        if not active and self._drafted is not False:
            level = logging.WARNING if why == "no_replica" else logging.INFO  # else it is a choice: drafts do not pay
            log.log(level, "Speculation is configured but inactive (%s): answers are those of the full tier alone", why)
        elif active and self._drafted is False:
            log.info("Speculation is active again")
        self._drafted = active


def _expected(names: Sequence[str], drafters: Sequence[str]) -> Iterator[tuple[str, ...]]:
    """Counters with labels that may come, as far as the configuration tells; of positions the first."""
    codes = sorted({kind.code for kind in KINDS})
    yield from (("refused", code) for code in codes)
    yield from (("answers", outcome) for outcome in (*get_args(FinishReason), LEFT, *codes))
    yield from (("undrafted_answers", why) for why in get_args(Undrafted))
    edges = [edge for edge in combinations((*drafters, *names), 2) if edge[1] in names]
    yield from ((name, *edge) for edge in edges for name in (*OF_PASSES, *OF_DRAFTERS))
    yield from ((name, *edge, "0") for edge in edges for name in BY_POSITION)
    yield from ((name, NOBODY, verifier) for verifier in names for name in OF_PASSES)


def spec_decode(drafted: Edge) -> str:
    """What all drafters did for the full tier under vLLM's names, in Prometheus' text form: `vllm bench serve` reads these.

    It adds up every line with such a name, so Prometheus' library, which adds times of creation, cannot write them.
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
