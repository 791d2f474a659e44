"""What audits count, as Prometheus reads it; see `deployments.auditor`."""

from collections.abc import Sequence
from dataclasses import dataclass

from deployments.metrics.page import Page


@dataclass(frozen=True, slots=True)
class Divergence:
    """A token of a text that was sent, in place of which the full tier alone says another."""

    position: int  # absolute
    margin: float  # by which the own token's perturbed logit is more than the next one's, nats; infinite if nobody knows
    second: bool  # what was sent is that next one


class AuditMetrics:
    """Counters of one router's audits, which ``page`` shows."""

    def __init__(self, page: Page) -> None:
        self._answers = page.counter("audited_answers")
        self._tokens = page.counter("audited_tokens")
        self._differing = page.counter("audit_differing_answers")
        self._divergences = page.counter("audit_divergences")
        self._margin = page.histogram("audit_margin_nats")
        self._skipped = page.counter("audits_skipped")

    def judged(self, num_tokens: int, divergences: Sequence[Divergence]) -> None:
        """An audit is complete."""
        self._answers.inc()
        self._tokens.inc(num_tokens)
        self._differing.inc(bool(divergences))
        for one in divergences:
            self._divergences.labels("true" if one.second else "false").inc()
            self._margin(one.margin)

    def skipped(self, reason: str) -> None:
        """An answer that was chosen is not audited."""
        self._skipped.labels(reason).inc()
