"""Spans of sessions, at both ends of a link: what the upper end waits for, and what the lower end does.

They begin and end with sessions; passes have none. What a session did its proposals tell, whose totals the last one has.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from opentelemetry.trace import Span, SpanKind, Status, StatusCode

from cascade.messages import Edge, Message, Open, Proposal
from deployments.ops.tracing.export import Live, Tracing, above, under


class AskedSessions:
    """Sessions that this process opens at tiers below; without ``tracing`` nothing is kept, nor of requests without a trace."""

    def __init__(self, tracing: Tracing | None) -> None:
        self._tracing = tracing
        self._spans: dict[str, tuple[Span, str]] = {}

    def opened(self, opening: Open) -> Open:
        """A session is to be opened; the message to send, as part of its span."""
        if self._tracing is None or not opening.traceparent:
            return opening
        span = self._tracing.tracer.start_span(f"cascade.open {opening.tier}", above(opening), SpanKind.CLIENT)
        span.set_attributes({"cascade.tier": opening.tier, "cascade.session": opening.session})
        self._spans[opening.session] = span, opening.tier
        return under(opening, span)

    def leased(self, session: str, address: str) -> None:
        """It has a replica."""
        if session in self._spans:
            self._spans[session][0].add_event("leased", {"server.address": address})

    def answered(self, session: str) -> None:
        """The replica has said something."""
        if session in self._spans:
            self._spans[session][0].add_event("answered")

    def failed(self, session: str, reason: str) -> None:
        """It is over before its time: whoever opened it goes on otherwise."""
        if self._tracing is None or session not in self._spans:
            return
        span, tier = self._spans[session]
        span.set_status(Status(StatusCode.ERROR, reason))
        parent = getattr(span, "parent", None)  # of spans that are recorded
        if parent is not None and (live := self._tracing.live.get(parent.span_id)) is not None:
            live.failover(tier, reason)
        self.ended(session)

    def ended(self, session: str) -> None:
        """It is over."""
        if session in self._spans:
            self._spans.pop(session)[0].end()


@dataclass(slots=True)
class _Served:
    live: Live
    said: Proposal | None = None  # the newest


class ServedSessions:
    """Sessions of the tier ``tier`` in this process; without ``tracing`` nothing is kept, nor of requests without a trace."""

    def __init__(self, tracing: Tracing | None, tier: str) -> None:
        self._tracing = tracing
        self._tier = tier
        self._served: dict[str, _Served] = {}

    def began(self, opening: Open) -> Open:
        """A session begins; the message for its tier, whose sessions below are parts of its span."""
        if self._tracing is None or not opening.traceparent:
            return opening
        span = self._tracing.tracer.start_span(f"cascade.session {self._tier}", above(opening), SpanKind.SERVER)
        span.set_attributes(
            {
                "cascade.tier": self._tier,
                "cascade.replica": self._tracing.replica,
                "cascade.session": opening.session,
                "cascade.prompt_tokens": opening.prompt_len,
                "cascade.known_tokens": len(opening.tokens) - opening.prompt_len,
            }
        )
        live = self._tracing.live[span.get_span_context().span_id] = Live(span)
        self._served[opening.session] = _Served(live)
        return under(opening, span)

    def said(self, messages: Sequence[Message]) -> None:
        """The tier says this to the one above."""
        if not self._served:
            return
        for message in messages:
            if isinstance(message, Proposal) and (served := self._served.get(message.session)) is not None:
                served.said = message

    def ended(self, session: str, reason: str = "") -> None:
        """It is over, with a reason if before its time."""
        served = self._served.pop(session, None)
        if served is None or self._tracing is None:
            return
        span = served.live.span
        del self._tracing.live[span.get_span_context().span_id]
        if served.said is not None:
            span.set_attributes(_totals(served.said.edges, self._tier))
        if reason:
            span.set_status(Status(StatusCode.ERROR, reason))
        span.end()


def _totals(edges: Sequence[Edge], tier: str) -> dict[str, int | float | list[str]]:
    """What the tier did itself."""
    own = [edge for edge in edges if edge.verifier == tier]
    return {
        "cascade.drafters": [edge.drafter for edge in own if edge.drafter],
        "cascade.tokens": sum(edge.emitted for edge in own),
        "cascade.passes": sum(edge.passes for edge in own),
        "cascade.proposed": sum(edge.proposed for edge in own),
        "cascade.accepted": sum(edge.accepted for edge in own),
        "cascade.waited_s": sum(edge.waited_s for edge in own),
    }
