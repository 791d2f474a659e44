"""The place of a span in its trace, as W3C Trace Context says it: `traceparent` and `tracestate`."""

from collections.abc import Iterable
from dataclasses import replace

from opentelemetry.context import Context
from opentelemetry.trace import Span, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from cascade.messages import Open

PARENT, STATE = "traceparent", "tracestate"
PROPAGATOR = TraceContextTextMapPropagator()


def told(headers: Iterable[tuple[str, object]]) -> Context:
    """Where HTTP headers or gRPC metadata say that a request belongs; empty if they do not, or not as W3C has it.

    Several `traceparent` are none, several `tracestate` are one list.
    """
    parents, states = list[str](), list[str]()
    for name, value in headers:
        if isinstance(value, str) and (kept := {PARENT: parents, STATE: states}.get(name.lower())) is not None:
            kept.append(value)
    return PROPAGATOR.extract({PARENT: parents, STATE: states}) if len(parents) == 1 else Context()


def above(opening: Open) -> Context:
    """Where the side that opened a session says that it belongs."""
    return PROPAGATOR.extract({PARENT: opening.traceparent, STATE: opening.tracestate})


def under(opening: Open, span: Span) -> Open:
    """``opening`` as part of ``span``."""
    carrier: dict[str, str] = {}
    PROPAGATOR.inject(carrier, set_span_in_context(span))
    return replace(opening, traceparent=carrier.get(PARENT, ""), tracestate=carrier.get(STATE, ""))
