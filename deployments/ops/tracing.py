"""Tracing: a request is one trace over all processes, see docs/howto/observe.md. Off by default.

Spans are exported by OpenTelemetry's environment variables, or by Ray Serve's tracing. Parents travel in W3C's `traceparent`
and `tracestate`. There are spans of requests, answers and sessions, but not of passes.
"""

import functools
import os
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from importlib.metadata import entry_points, version
from typing import NamedTuple

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.sdk.resources import SERVICE_NAME, OTELResourceDetector, Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import INVALID_SPAN, Span, SpanKind, Status, StatusCode, Tracer, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from opentelemetry.util.types import Attributes

from cascade.errors import ConfigError
from cascade.messages import Open, Routing, SessionSpec
from deployments.replica import replica_name

PARENT, STATE = "traceparent", "tracestate"
PROPAGATOR = TraceContextTextMapPropagator()
ENDPOINTS = ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")
PROTOCOLS = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
OTLP = {"http/protobuf": "otlp_proto_http", "grpc": "otlp_proto_grpc"}  # entry points of exporters by protocol
FINE = {"stop", "length", "left"}  # outcomes of answers that are not errors


@dataclass(frozen=True, slots=True)
class Tracing:
    """Makes spans; ``replica`` is this process's name in them, ``model`` the served model. Without a tracer there are none."""

    tracer: Tracer | None = None
    replica: str = ""
    model: str = ""

    def span(
        self,
        name: str,
        parent: Context | Span | None,
        kind: SpanKind = SpanKind.INTERNAL,
        attributes: Attributes = None,
        *,
        since_ns: int | None = None,
    ) -> Span:
        """Start a span, now or at ``since_ns``; by default below the current span of this task."""
        if self.tracer is None:
            return INVALID_SPAN
        context = set_span_in_context(parent) if isinstance(parent, Span) else parent
        return self.tracer.start_span(name, context, kind, attributes, start_time=since_ns)


UNTRACED = Tracing()


def tracing(component: str, model: str = "") -> Tracing:
    """The tracing of this process, a router or a replica of the tier ``component``; `UNTRACED` if it is off.

    Raises `ConfigError` if the environment names an exporter that is not installed.
    """
    if names := exporters():
        _provide(component, names)
    elif not isinstance(trace.get_tracer_provider(), TracerProvider):  # neither Ray Serve nor the caller traces
        return UNTRACED
    return Tracing(trace.get_tracer("cascade", version("cascade-serve")), replica_name() or str(os.getpid()), model)


def exporters() -> tuple[str, ...]:
    """Exporters by OpenTelemetry's environment variables; none unless these name an exporter or an endpoint."""
    if os.environ.get("OTEL_SDK_DISABLED", "").strip().lower() == "true":
        return ()
    default = "otlp" if any(os.environ.get(name) for name in ENDPOINTS) else "none"
    names = [name.strip() for name in (os.environ.get("OTEL_TRACES_EXPORTER") or default).split(",")]
    protocol = next((value for variable in PROTOCOLS if (value := os.environ.get(variable))), "http/protobuf")
    if "otlp" in names and protocol not in OTLP:
        raise ConfigError(f"OTEL_EXPORTER_OTLP_PROTOCOL is {protocol!r}: it must be one of {', '.join(OTLP)}")
    return tuple(OTLP[protocol] if name == "otlp" else name for name in names if name and name != "none")


@functools.cache  # a process has only one provider
def _provide(component: str, names: tuple[str, ...]) -> None:
    installed = {entry.name: entry for entry in entry_points(group="opentelemetry_traces_exporter")}
    if unknown := next((name for name in names if name not in installed), None):
        raise ConfigError(
            f"OTEL_TRACES_EXPORTER asks for {unknown!r}, which is not installed (there are {', '.join(sorted(installed))}): "
            "pip install '.[tracing]' where routers and tiers run, or set it to none"
        )
    named = Resource.create().merge(Resource({SERVICE_NAME: f"cascade-{component}"})).merge(OTELResourceDetector().detect())
    provider = TracerProvider(resource=named)
    for name in names:
        provider.add_span_processor(BatchSpanProcessor(installed[name].load()()))
    trace.set_tracer_provider(provider)


def flush() -> None:
    """Export the remaining spans within a few seconds, before this process ends."""
    if isinstance(provider := trace.get_tracer_provider(), TracerProvider):
        provider.force_flush(2000)


def parent_of_headers(headers: Iterable[tuple[str, object]]) -> Context:
    """The parent in HTTP headers or gRPC metadata; empty if there is none, or if it violates W3C's format.

    Several `traceparent` headers count as none; several `tracestate` headers form one list.
    """
    named: dict[str, list[str]] = {PARENT: [], STATE: []}
    for name, value in headers:
        if isinstance(value, str) and name.lower() in named:
            named[name.lower()].append(value)
    return PROPAGATOR.extract(named) if len(named[PARENT]) == 1 else Context()


class Trace(NamedTuple):
    """A span in the form of a session's `Routing`."""

    traceparent: str = ""
    tracestate: str = ""

    @classmethod
    def of(cls, span: Span) -> "Trace":
        carrier: dict[str, str] = {}
        PROPAGATOR.inject(carrier, set_span_in_context(span))
        return cls(carrier.get(PARENT, ""), carrier.get(STATE, ""))


# a router's spans


def request_span(tracing: Tracing, headers: Iterable[tuple[str, object]], since: float) -> Span:
    """The span of a request that arrived at ``since`` (`time.monotonic`) and is admitted now; ``headers`` have the parent."""
    came = time.time_ns() - int((time.monotonic() - since) * 1e9)
    attributes = {"cascade.replica": tracing.replica}
    # without a parent from the client, the parent is Ray Serve's span of this task
    span = tracing.span("cascade.request", parent_of_headers(headers) or None, SpanKind.SERVER, attributes, since_ns=came)
    span.add_event("admitted")
    return span


def answer_span(tracing: Tracing, request: Span, spec: SessionSpec, index: int) -> Span:
    """The span of an answer, below that of its ``request``."""
    params = spec.params
    attributes: dict[str, str | int | float] = {
        "cascade.index": index,
        "cascade.prompt_tokens": spec.prompt_len,
        "gen_ai.operation.name": "text_completion",
        "gen_ai.provider.name": "cascade",
        "gen_ai.request.model": params.adapter or tracing.model,
        "gen_ai.request.max_tokens": params.max_tokens,
        "gen_ai.request.temperature": params.temperature,
        "gen_ai.request.top_p": params.top_p,
        "gen_ai.request.top_k": params.top_k,
        "gen_ai.usage.input_tokens": spec.prompt_len,
    }
    return tracing.span("cascade.answer", request, attributes=attributes)


def end_answer(span: Span, outcome: str, output_tokens: int) -> None:
    """End the span of an answer of ``output_tokens`` tokens."""
    span.set_attributes({"cascade.outcome": outcome, "cascade.tokens": output_tokens})
    span.set_attributes({"gen_ai.usage.output_tokens": output_tokens, "gen_ai.response.finish_reasons": [outcome]})
    if outcome not in FINE:
        span.set_status(Status(StatusCode.ERROR, outcome))
    span.end()


# spans of sessions, at both ends of a link


class SessionSpans:
    """Spans of sessions that a process opens at tiers below, or serves for tiers above; only for traced requests."""

    def __init__(self, tracing: Tracing) -> None:
        self._tracing = tracing
        self._spans: dict[str, Span] = {}

    def opened(self, opening: Open) -> Trace:
        """Start the span of a session that is opened below; returns it for that tier."""
        return self._begin(opening, "open", SpanKind.CLIENT, {})

    def served(self, opening: Open) -> Open:
        """Start the span of a session served here; returns the message with this span as parent of sessions below."""
        spec = opening.spec
        attributes: dict[str, str | int] = {
            "cascade.replica": self._tracing.replica,
            "cascade.prompt_tokens": spec.prompt_len,
            "cascade.known_tokens": len(spec.tokens) - spec.prompt_len,
        }
        return Open(opening.session, spec, Routing("", *self._begin(opening, "session", SpanKind.SERVER, attributes)))

    def _begin(self, opening: Open, verb: str, kind: SpanKind, more: Mapping[str, str | int]) -> Trace:
        above = Trace(opening.routing.traceparent, opening.routing.tracestate)
        if self._tracing.tracer is None or not above.traceparent:
            return above
        tier, parent = opening.spec.tier, PROPAGATOR.extract({PARENT: above.traceparent, STATE: above.tracestate})
        attributes = {"cascade.tier": tier, "cascade.session": opening.session, **more}
        span = self._spans[opening.session] = self._tracing.span(f"cascade.{verb} {tier}", parent, kind, attributes)
        return Trace.of(span)

    def event(self, session: str, name: str, **attributes: str) -> None:
        """Add an event to a session's span."""
        if session in self._spans:
            self._spans[session].add_event(name, {key.replace("_", "."): value for key, value in attributes.items()})

    def end(self, session: str, reason: str = "") -> None:
        """End a session's span, with a ``reason`` if it failed."""
        if (span := self._spans.pop(session, None)) is not None:
            if reason:
                span.set_status(Status(StatusCode.ERROR, reason))
            span.end()
