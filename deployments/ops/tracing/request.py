"""Spans of a router: a request, its admission, its answers, and how long each waits for its turn and its first piece."""

import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from opentelemetry.trace import Span, SpanKind, Status, StatusCode, set_span_in_context

from cascade.messages import Open
from deployments.ops.tracing.export import Live, Tracing, told, under

FINE = {"stop", "length", "left"}  # outcomes of answers that are no errors


@dataclass(frozen=True, slots=True)
class RequestTrace:
    """The span of a request; none if nobody traces it."""

    tracing: Tracing | None = None
    span: Span | None = None

    def answer(self, opening: Open, index: int) -> "AnswerTrace":
        """An answer begins to wait for its turn."""
        return AnswerTrace(self, opening, index)

    def end(self, summary: Mapping[str, object]) -> None:
        if self.span is None:
            return
        outcomes = str(summary["outcomes"])
        self.span.set_attributes({"cascade.request_id": str(summary["request_id"]), "cascade.outcome": outcomes})
        self.span.end()


class AnswerTrace:
    """The span of an answer, and below it those of its two waits: for its turn, then for its first piece."""

    def __init__(self, request: RequestTrace, opening: Open, index: int) -> None:
        self.opening = opening  # what the full tier is to be asked, as part of the trace
        if request.tracing is None or request.span is None:
            self._tracing = None
            return
        self._tracing = request.tracing
        self._span = self._begin("cascade.answer", request.span)
        self._span.set_attributes({"cascade.index": index, "cascade.prompt_tokens": opening.prompt_len})
        self._wait = self._begin("cascade.queue", self._span)
        self._tracing.live[self._span.get_span_context().span_id] = Live(self._span)
        self.opening = under(opening, self._span)

    def turn(self) -> None:
        """It is written from now on."""
        if self._tracing is not None:
            self._wait.end()
            self._wait = self._begin("cascade.first_token", self._span)

    def first_piece(self) -> None:
        if self._tracing is not None:
            self._wait.end()

    def end(self, outcome: str, output_tokens: int) -> None:
        if self._tracing is None:
            return
        span = self._span
        del self._tracing.live[span.get_span_context().span_id]
        span.set_attributes({"cascade.outcome": outcome, "cascade.tokens": output_tokens})
        if outcome not in FINE:
            span.set_status(Status(StatusCode.ERROR, outcome))
        if self._wait.is_recording():  # it ended before it had a first piece
            self._wait.end()
        span.end()

    def _begin(self, name: str, parent: Span) -> Span:
        assert self._tracing is not None
        return self._tracing.tracer.start_span(name, set_span_in_context(parent))


def request_trace(tracing: Tracing | None, headers: Iterable[tuple[str, object]], since: float) -> RequestTrace:
    """Of a request that came at ``since``, by `time.monotonic`, and is admitted now; ``headers`` may say where it belongs."""
    if tracing is None:
        return RequestTrace()
    now = time.time_ns()
    came = now - int((time.monotonic() - since) * 1e9)
    above = told(headers) or None  # else that which Ray Serve's own tracing is in, if it is on
    span = tracing.tracer.start_span("cascade.request", above, SpanKind.SERVER, start_time=came)
    span.set_attribute("cascade.replica", tracing.replica)
    tracing.tracer.start_span("cascade.admission", set_span_in_context(span), start_time=came).end(now)
    return RequestTrace(tracing, span)
