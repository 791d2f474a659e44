"""What audits count, as Prometheus reads it; see `deployments.auditor`."""

from collections.abc import Mapping, Sequence
from typing import Any

from prometheus_client import Counter, Histogram

from cascade.messages import Divergence

MARGINS = (0.0, 1e-6, 1e-5, 1e-4, 1e-3, 0.01, 0.03, 0.0625, 0.125, 0.25, 0.5, 1.0, 2.0, 4.0)  # nats


class AuditMetrics:
    """Counters of one router's audits; ``made`` is how its metrics are made."""

    def __init__(self, made: Mapping[str, Any]) -> None:
        self._answers = Counter("audited_answers", "Answers that the full tier alone has scored again.", **made)
        self._tokens = Counter("audited_tokens", "Their tokens that it has judged.", **made)
        self._differing = Counter(
            "audit_differing_answers", "Audited answers in which it says another token somewhere.", **made
        )
        self._divergences = Counter(
            "audit_divergences", "Places where it does, by whether what was sent is its second choice.", ["second"], **made
        )
        self._margins = Histogram(
            "audit_margin_nats", "There, by how much its own token is ahead of its second choice.", buckets=MARGINS, **made
        )
        self._skipped = Counter("audits_skipped", "Answers that were chosen and not audited, by reason.", ["reason"], **made)

    def judged(self, num_tokens: int, divergences: Sequence[Divergence]) -> None:
        """An audit is complete."""
        self._answers.inc()
        self._tokens.inc(num_tokens)
        self._differing.inc(bool(divergences))
        for one in divergences:
            self._divergences.labels("true" if one.second else "false").inc()
            self._margins.observe(one.margin)

    def skipped(self, reason: str) -> None:
        """An answer that was chosen is not audited."""
        self._skipped.labels(reason).inc()
