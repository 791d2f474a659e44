"""Spans of a router: a request, its admission, its answers, and how long each waits for its turn and its first piece."""

import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from opentelemetry.trace import Span, SpanKind, Status, StatusCode, set_span_in_context

from cascade.messages import Open
from deployments.tracing.context import told, under
from deployments.tracing.export import Live, Tracing

FINE = {"stop", "length", "left"}  # outcomes of answers that are no errors


class RequestTrace(Protocol):
    """Hears what becomes of a request; its answers are named as their sessions are when they are admitted."""

    def answer(self, opening: Open, index: int) -> Open:
        """An answer begins to wait for its turn; what the full tier is to be asked, as part of the trace."""

    def turn(self, session: str) -> None: ...

    def first_piece(self, session: str) -> None: ...

    def ended(self, session: str, outcome: str, prompt_tokens: int, output_tokens: int) -> None: ...

    def end(self, summary: Mapping[str, object]) -> None: ...


class Untraced:
    """Of a request that nobody traces."""

    def answer(self, opening: Open, index: int) -> Open:
        return opening

    def turn(self, session: str) -> None:
        pass

    def first_piece(self, session: str) -> None:
        pass

    def ended(self, session: str, outcome: str, prompt_tokens: int, output_tokens: int) -> None:
        pass

    def end(self, summary: Mapping[str, object]) -> None:
        pass


UNTRACED = Untraced()


@dataclass(slots=True)
class _Answer:
    span: Span
    queue: Span
    first: Span | None = None


@dataclass(slots=True)
class Traced:
    """A request with a span of its own, and one for each answer below it."""

    _tracing: Tracing
    _span: Span
    _answers: dict[str, _Answer] = field(default_factory=dict)

    def answer(self, opening: Open, index: int) -> Open:
        span = self._begin("cascade.answer", self._span)
        span.set_attributes({"cascade.index": index, "cascade.prompt_tokens": opening.prompt_len})
        self._answers[opening.session] = _Answer(span, self._begin("cascade.queue", span))
        self._tracing.live[span.get_span_context().span_id] = Live(span)
        return under(opening, span)

    def turn(self, session: str) -> None:
        if (answer := self._answers.get(session)) is not None:
            answer.queue.end()
            answer.first = self._begin("cascade.first_token", answer.span)

    def first_piece(self, session: str) -> None:
        answer = self._answers.get(session)
        if answer is not None and answer.first is not None:
            answer.first.end()

    def ended(self, session: str, outcome: str, prompt_tokens: int, output_tokens: int) -> None:
        answer = self._answers.pop(session, None)
        if answer is None:  # the request has ended before
            return
        span = answer.span
        del self._tracing.live[span.get_span_context().span_id]
        span.set_attributes({"cascade.outcome": outcome, "cascade.tokens": output_tokens})
        if outcome not in FINE:
            span.set_status(Status(StatusCode.ERROR, outcome))
        for one in (answer.queue, answer.first, span):
            if one is not None and (one is span or one.is_recording()):  # it ended before the others did
                one.end()

    def end(self, summary: Mapping[str, object]) -> None:
        for session in list(self._answers):  # whose client has left before they began
            self.ended(session, "left", 0, 0)
        outcomes = str(summary["outcomes"])
        self._span.set_attributes({"cascade.request_id": str(summary["request_id"]), "cascade.outcome": outcomes})
        self._span.end()

    def _begin(self, name: str, parent: Span) -> Span:
        return self._tracing.tracer.start_span(name, set_span_in_context(parent))


def request_trace(tracing: Tracing | None, headers: Iterable[tuple[str, object]], since: float) -> RequestTrace:
    """Of a request that came at ``since``, by `time.monotonic`, and is admitted now; ``headers`` may say where it belongs."""
    if tracing is None:
        return UNTRACED
    now = time.time_ns()
    came = now - int((time.monotonic() - since) * 1e9)
    above = told(headers) or None  # else that which Ray Serve's own tracing is in, if it is on
    span = tracing.tracer.start_span("cascade.request", above, SpanKind.SERVER, start_time=came)
    span.set_attribute("cascade.replica", tracing.replica)
    tracing.tracer.start_span("cascade.admission", set_span_in_context(span), start_time=came).end(now)
    return Traced(tracing, span)
