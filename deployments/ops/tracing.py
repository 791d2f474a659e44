"""Traces: one request is one trace over all processes, see docs/howto/observe.md. Off unless the environment asks for it.

Spans go where OpenTelemetry's environment variables say, or Ray Serve's tracing. They belong where W3C Trace Context says, in
`traceparent` and `tracestate`. They begin and end with requests, answers and sessions; passes have none.
"""

import functools
import os
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.metadata import entry_points, version

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.trace import INVALID_SPAN, Span, SpanKind, Status, StatusCode, Tracer, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from opentelemetry.util.types import Attributes

from cascade.errors import ConfigError
from cascade.messages import Edge, Message, Open, Proposal
from deployments.replica import replica_name

PARENT, STATE = "traceparent", "tracestate"
PROPAGATOR = TraceContextTextMapPropagator()
ENDPOINTS = ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")
PROTOCOLS = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
OTLP = {"http/protobuf": "otlp_proto_http", "grpc": "otlp_proto_grpc"}  # names of exporters as packages announce them
FINE = {"stop", "length", "left"}  # outcomes of answers that are no errors

# where spans go


@dataclass(frozen=True, slots=True)
class Tracing:
    """How a process makes spans; ``replica`` is its name in them, ``model`` what it serves. Without a tracer it makes none."""

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
        """A span that begins now, or has begun at ``since_ns``; with no parent, below whatever this task is in."""
        if self.tracer is None:
            return INVALID_SPAN
        context = set_span_in_context(parent) if isinstance(parent, Span) else parent
        return self.tracer.start_span(name, context, kind, attributes, start_time=since_ns)


UNTRACED = Tracing()


def tracing(component: str, model: str = "") -> Tracing:
    """How the process of ``component``, a router or a tier's replica, makes spans: not at all if nobody asks for them.

    Raises `ConfigError` if the environment names an exporter that is not there.
    """
    names = exporters()
    if names:
        _provide(component, names)
    elif not _provided():
        return UNTRACED
    return Tracing(trace.get_tracer("cascade", version("cascade-serve")), replica_name() or str(os.getpid()), model)


def exporters() -> tuple[str, ...]:
    """Names of the exporters that OpenTelemetry's environment variables ask for; none unless they name one, or an endpoint."""
    if os.environ.get("OTEL_SDK_DISABLED", "").strip().lower() == "true":
        return ()
    default = "otlp" if any(os.environ.get(name) for name in ENDPOINTS) else "none"
    names = (name.strip() for name in (os.environ.get("OTEL_TRACES_EXPORTER") or default).split(","))
    return tuple(_full_name(name) for name in names if name and name != "none")


def _full_name(name: str) -> str:
    if name != "otlp":
        return name
    protocol = next((value for variable in PROTOCOLS if (value := os.environ.get(variable))), "http/protobuf")
    if protocol not in OTLP:
        raise ConfigError(f"OTEL_EXPORTER_OTLP_PROTOCOL is {protocol!r}: it must be one of {', '.join(OTLP)}")
    return OTLP[protocol]


def _provided() -> bool:
    """Ray Serve, or whoever started this process, has set up tracing."""
    from opentelemetry.sdk.trace import TracerProvider

    return isinstance(trace.get_tracer_provider(), TracerProvider)


@functools.cache  # a process has one provider, whatever runs in it
def _provide(component: str, names: tuple[str, ...]) -> None:
    from opentelemetry.sdk.resources import SERVICE_NAME, OTELResourceDetector, Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    known = {entry.name: entry for entry in entry_points(group="opentelemetry_traces_exporter")}
    if unknown := next((name for name in names if name not in known), None):
        raise ConfigError(
            f"OTEL_TRACES_EXPORTER asks for {unknown!r}, which is not installed (there are {', '.join(sorted(known))}): "
            "pip install 'cascade-serve[tracing]' where routers and tiers run, or set it to none"
        )
    named = Resource.create().merge(Resource({SERVICE_NAME: f"cascade-{component}"})).merge(OTELResourceDetector().detect())
    provider = TracerProvider(resource=named)
    for name in names:
        provider.add_span_processor(BatchSpanProcessor(known[name].load()()))
    trace.set_tracer_provider(provider)


def flush() -> None:
    """Send what waits to be sent, within a few seconds: this process ends."""
    end = getattr(trace.get_tracer_provider(), "force_flush", None)
    if end is not None:
        end(2000)


# where they belong


def parent_of_headers(headers: Iterable[tuple[str, object]]) -> Context:
    """Where HTTP headers or gRPC metadata say that a request belongs; empty if they do not, or not as W3C has it.

    Several `traceparent` are none, several `tracestate` are one list.
    """
    parents, states = list[str](), list[str]()
    for name, value in headers:
        if isinstance(value, str) and (kept := {PARENT: parents, STATE: states}.get(name.lower())) is not None:
            kept.append(value)
    return PROPAGATOR.extract({PARENT: parents, STATE: states}) if len(parents) == 1 else Context()


def parent_of(opening: Open) -> Context:
    """Where the side that opened a session says that it belongs."""
    return PROPAGATOR.extract({PARENT: opening.traceparent, STATE: opening.tracestate})


def within(opening: Open, span: Span) -> Open:
    """``opening`` as part of ``span``."""
    carrier: dict[str, str] = {}
    PROPAGATOR.inject(carrier, set_span_in_context(span))
    return replace(opening, traceparent=carrier.get(PARENT, ""), tracestate=carrier.get(STATE, ""))


# a router's spans


@dataclass(frozen=True, slots=True)
class RequestTrace:
    """The span of a request."""

    tracing: Tracing = UNTRACED
    span: Span = INVALID_SPAN

    @classmethod
    def begin(cls, tracing: Tracing, headers: Iterable[tuple[str, object]], since: float) -> "RequestTrace":
        """Of a request that came at ``since``, of `time.monotonic`, and is admitted now; ``headers`` say where it belongs."""
        if tracing.tracer is None:
            return cls()
        now = time.time_ns()
        came = now - int((time.monotonic() - since) * 1e9)
        attributes = {"cascade.replica": tracing.replica}
        # without a word of the client's, it belongs where Ray Serve's own tracing has put this task
        span = tracing.span("cascade.request", parent_of_headers(headers) or None, SpanKind.SERVER, attributes, since_ns=came)
        tracing.span("cascade.admission", span, since_ns=came).end(now)
        return cls(tracing, span)

    def end(self, summary: Mapping[str, object]) -> None:
        """It is over; ``summary`` is what the log says of it."""
        said = {"cascade.request_id": summary["request_id"], "cascade.outcome": summary["outcomes"]}
        self.span.set_attributes({name: str(value) for name, value in said.items()})
        self.span.end()


class AnswerTrace:
    """The span of an answer, and below it those of its two waits: for its turn, then for its first piece."""

    def __init__(self, request: RequestTrace, opening: Open, index: int) -> None:
        self._tracing = tracing = request.tracing
        params = opening.params
        said: dict[str, str | int | float] = {
            "cascade.index": index,
            "cascade.prompt_tokens": opening.prompt_len,
            "gen_ai.operation.name": "text_completion",
            "gen_ai.provider.name": "cascade",
            "gen_ai.request.model": params.adapter or tracing.model,
            "gen_ai.request.max_tokens": params.max_tokens,
            "gen_ai.request.temperature": params.temperature,
            "gen_ai.request.top_p": params.top_p,
            "gen_ai.request.top_k": params.top_k,
            "gen_ai.usage.input_tokens": opening.prompt_len,
        }
        self._span = tracing.span("cascade.answer", request.span, attributes=said)
        self._wait = tracing.span("cascade.queue", self._span)
        self.opening = opening if tracing.tracer is None else within(opening, self._span)  # what to ask the full tier

    def turn(self) -> None:
        self._wait.end()
        self._wait = self._tracing.span("cascade.first_token", self._span)

    def first_piece(self) -> None:
        self._wait.end()

    def end(self, outcome: str, output_tokens: int) -> None:
        """The answer is over, with so many tokens."""
        self._span.set_attributes(
            {
                "cascade.outcome": outcome,
                "cascade.tokens": output_tokens,
                "gen_ai.usage.output_tokens": output_tokens,
                "gen_ai.response.finish_reasons": [outcome],
            }
        )
        if outcome not in FINE:
            self._span.set_status(Status(StatusCode.ERROR, outcome))
        if self._wait.is_recording():  # it ended before it had a first piece
            self._wait.end()
        self._span.end()


# spans of sessions, at both ends of a link


class SessionSpans:
    """Spans of the sessions that a process opens at tiers below, or serves for tiers above; of traced requests alone."""

    def __init__(self, tracing: Tracing) -> None:
        self._tracing = tracing
        self._spans: dict[str, tuple[Span, str]] = {}  # and the session's tier
        self._edges: dict[str, Sequence[Edge]] = {}  # totals that the newest proposal tells

    def asked(self, opening: Open) -> Open:
        """A session is to be opened below; the message to send, as part of its span."""
        return self._begin(opening, "open", SpanKind.CLIENT, {})

    def served(self, opening: Open) -> Open:
        """A session begins here; the message for its tier, whose sessions below are parts of its span."""
        said: dict[str, str | int] = {
            "cascade.replica": self._tracing.replica,
            "cascade.prompt_tokens": opening.prompt_len,
            "cascade.known_tokens": len(opening.tokens) - opening.prompt_len,
        }
        return self._begin(opening, "session", SpanKind.SERVER, said)

    def _begin(self, opening: Open, verb: str, kind: SpanKind, said: Mapping[str, str | int]) -> Open:
        if self._tracing.tracer is None or not opening.traceparent:
            return opening
        attributes = {"cascade.tier": opening.tier, "cascade.session": opening.session, **said}
        span = self._tracing.span(f"cascade.{verb} {opening.tier}", parent_of(opening), kind, attributes)
        self._spans[opening.session] = span, opening.tier
        return within(opening, span)

    def event(self, session: str, name: str, **attributes: str) -> None:
        """Something happens to it."""
        if session in self._spans:
            self._spans[session][0].add_event(name, {key.replace("_", "."): value for key, value in attributes.items()})

    def proposed(self, messages: Iterable[Message]) -> None:
        """The tier says this to the one above."""
        for message in messages if self._spans else ():
            if isinstance(message, Proposal) and message.session in self._spans:
                self._edges[message.session] = message.edges

    def end(self, session: str, reason: str = "") -> None:
        """It is over, with a reason if before its time."""
        if session not in self._spans:
            return
        span, tier = self._spans.pop(session)
        if (edges := self._edges.pop(session, None)) is not None:
            span.set_attributes(_totals(edges, tier))
        if reason:
            span.set_status(Status(StatusCode.ERROR, reason))
        span.end()


def _totals(edges: Sequence[Edge], tier: str) -> dict[str, int | float | list[str]]:
    own = [edge for edge in edges if edge.verifier == tier]
    return {
        "cascade.drafters": [edge.drafter for edge in own if edge.drafter],
        "cascade.tokens": sum(edge.emitted for edge in own),
        "cascade.passes": sum(edge.passes for edge in own),
        "cascade.proposed": sum(edge.proposed for edge in own),
        "cascade.accepted": sum(edge.accepted for edge in own),
        "cascade.waited_s": sum(edge.waited_s for edge in own),
    }
