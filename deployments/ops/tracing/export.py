"""Where spans go and where they belong.

They go where OpenTelemetry's environment variables say, or Ray Serve's tracing; else nowhere. They belong where W3C Trace
Context says, in `traceparent` and `tracestate`.
"""

import functools
import os
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from importlib.metadata import entry_points, version

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.trace import Span, Tracer, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from ray import serve
from ray.serve.exceptions import RayServeException

from cascade.errors import ConfigError
from cascade.messages import Open

PARENT, STATE = "traceparent", "tracestate"
PROPAGATOR = TraceContextTextMapPropagator()
ENDPOINTS = ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")
PROTOCOLS = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
OTLP = {"http/protobuf": "otlp_proto_http", "grpc": "otlp_proto_grpc"}  # names of exporters as packages announce them


@dataclass(eq=False, slots=True)
class Live:
    """A span of this process below which sessions are opened."""

    span: Span
    failovers: int = 0

    def failover(self, tier: str, reason: str) -> None:
        """A session below it is over before its time."""
        self.failovers += 1
        self.span.add_event("failover", {"cascade.tier": tier, "cascade.reason": reason})
        self.span.set_attribute("cascade.failovers", self.failovers)


@dataclass(frozen=True, slots=True)
class Tracing:
    """How a process makes spans; ``replica`` is its name in them."""

    tracer: Tracer
    replica: str
    live: dict[int, Live] = field(default_factory=dict)  # by the id of the span


def tracing(component: str) -> Tracing | None:
    """How the process of ``component``, a router or a tier's replica, makes spans; ``None`` if nobody asks for them.

    Raises `ConfigError` if the environment names an exporter that is not there.
    """
    names = exporters()
    if names:
        _provide(component, names)
    elif not _provided():
        return None
    try:
        replica = str(serve.get_replica_context().replica_tag)
    except RayServeException:
        replica = str(os.getpid())
    return Tracing(trace.get_tracer("cascade", version("cascade-serve")), replica)


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
