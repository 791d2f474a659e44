"""Traces: one request is one trace from the client's own span down to the lowest tier, whatever dies; off, there is nothing."""

import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import grpc
import pytest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode, format_span_id, format_trace_id

from cascade.client.exchange import encode_request
from cascade.client.rpc import stub_of
from cascade.errors import ConfigError
from cascade.messages import Open, Routing
from cascade.params import SamplingParams, Speculation
from deployments.ops import tracing as export
from deployments.ops.tracing import (
    UNTRACED,
    SessionSpans,
    Trace,
    Tracing,
    answer_span,
    exporters,
    parent_of_headers,
    request_span,
    tracing,
)
from tests.http.test_http import PROMPT, ask
from tests.in_process import House, house
from tests.links.net import Node
from tests.tier.test_tier import NAMES, CountingModel, opening

TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
GIVEN = f"00-{TRACE}-{PARENT}-01"
ALL = Speculation(tiers=NAMES[:-1])
LONG = SamplingParams(max_tokens=60, temperature=0.7, seed=4, ignore_eos=True)


@dataclass
class Traces:
    """Processes whose spans all come here."""

    exporter: InMemorySpanExporter = field(default_factory=InMemorySpanExporter)

    def __post_init__(self) -> None:
        self._provider = TracerProvider()
        self._provider.add_span_processor(SimpleSpanProcessor(self.exporter))

    def of(self, component: str, model: str = "") -> Tracing:
        return Tracing(self._provider.get_tracer("test"), f"{component}#1", model)

    def taken(self) -> list[ReadableSpan]:
        """All that has ended since the last call."""
        spans = list(self.exporter.get_finished_spans())
        self.exporter.clear()
        return spans


@pytest.fixture(scope="module")
def traces() -> Traces:
    return Traces()


@pytest.fixture(scope="module")
def served(traces: Traces) -> Iterator[House]:
    with house(tracing=traces.of) as built:
        yield built


def generate(
    served: House,
    params: SamplingParams = LONG,
    speculation: Speculation = ALL,
    then: Callable[[], object] | None = None,
    traceparent: str = GIVEN,
) -> int:
    """Tokens of an answer over gRPC, in the middle of which something happens; all its spans have ended."""
    num_tokens = 0
    with grpc.insecure_channel(served.grpc) as channel:
        request = encode_request(PROMPT, params, speculation)
        for piece in stub_of(channel).Generate(request, metadata=(("traceparent", traceparent),)):
            num_tokens += len(piece.tokens)
            if num_tokens >= 4 and then is not None:
                then()
                then = None
    served.settle()
    return num_tokens


def tree(spans: Sequence[ReadableSpan]) -> dict[str, ReadableSpan]:
    """By name; each has its own."""
    assert len({span.name for span in spans}) == len(spans), [span.name for span in spans]
    return {span.name: span for span in spans}


def parent(span: ReadableSpan) -> int | None:
    return None if span.parent is None else span.parent.span_id


def id_of(span: ReadableSpan) -> int:
    return int(span.context.span_id)


def trace_ids(spans: Sequence[ReadableSpan]) -> set[str]:
    return {format_trace_id(span.context.trace_id) for span in spans if span.context is not None}


LINKS = {  # whose child each span is
    "cascade.answer": "cascade.request",
    "cascade.open full": "cascade.answer",
    "cascade.session full": "cascade.open full",
    "cascade.open medium": "cascade.session full",
    "cascade.session medium": "cascade.open medium",
    "cascade.open tiny": "cascade.session medium",
    "cascade.session tiny": "cascade.open tiny",
}


def test_one_trace_over_all_processes(served: House, traces: Traces) -> None:
    """Guards the parents of spans, and what they say of the work that each tier did."""
    traces.taken()
    num_tokens = generate(served)
    spans = tree(traces.taken())
    assert trace_ids(list(spans.values())) == {TRACE}
    assert spans.keys() == LINKS.keys() | {"cascade.request"}
    root = spans["cascade.request"]
    assert format_span_id(root.parent.span_id) == PARENT
    for name, above_it in LINKS.items():
        assert parent(spans[name]) == id_of(spans[above_it]), name
    for span in spans.values():
        assert span.status.status_code is not StatusCode.ERROR
    for name in NAMES:
        session, attributes = spans[f"cascade.session {name}"], spans[f"cascade.session {name}"].attributes or {}
        assert (session.kind, attributes["cascade.tier"], attributes["cascade.replica"]) == (SpanKind.SERVER, name, f"{name}#1")
        assert [event.name for event in spans[f"cascade.open {name}"].events] == ["leased", "answered"]
    answer = spans["cascade.answer"].attributes or {}
    assert num_tokens == answer["cascade.tokens"] == 60
    assert answer["cascade.outcome"] == "length"
    usual = {"request.model": served.model, "request.max_tokens": 60, "request.temperature": 0.7}
    usual |= {"usage.input_tokens": answer["cascade.prompt_tokens"], "usage.output_tokens": 60}
    assert {f"gen_ai.{name}": value for name, value in usual.items()}.items() <= answer.items()
    events = [*root.events, *spans["cascade.answer"].events]
    assert [event.name for event in events] == ["admitted", "turn", "first_token"]
    assert [event.timestamp for event in events] == sorted(event.timestamp for event in events)


def test_http_and_the_states_of_others(served: House, traces: Traces) -> None:
    """Guards HTTP's headers, and `tracestate`, which belongs to others and goes through; each answer has its own sessions."""
    body = {"prompt": PROMPT, "max_tokens": 5, "seed": 1, "n": 2, "speculation": {"mode": "off"}}
    assert ask(served, "/v1/completions", body, traceparent=GIVEN, tracestate="congo=t61rcWkgMzE,rojo=1")[0] == 200
    served.settle()
    spans = traces.taken()
    assert trace_ids(spans) == {TRACE}
    names = Counter(span.name for span in spans)
    assert names == {"cascade.request": 1} | dict.fromkeys(("cascade.answer", "cascade.open full", "cascade.session full"), 2)
    assert {span.context.trace_state.to_header() for span in spans} == {"congo=t61rcWkgMzE,rojo=1"}


def test_unsampled_requests_stay_so(served: House, traces: Traces) -> None:
    """Guards a client's choice not to record, on every tier."""
    generate(served, traceparent=GIVEN[:-2] + "00")
    assert traces.taken() == []


def test_contexts_as_w3c_has_them() -> None:
    """Guards against traces that join where W3C Trace Context says they must not; several parents are none."""
    for wrong in ("", GIVEN.upper(), GIVEN.replace(TRACE, "0" * 32), GIVEN + "-more"):
        assert not parent_of_headers([("traceparent", wrong), ("tracestate", "a=b")])
    assert parent_of_headers([("TraceParent", GIVEN)])
    assert not parent_of_headers([("traceparent", GIVEN), ("traceparent", GIVEN)])
    assert not parent_of_headers([("traceparent-bin", GIVEN.encode()), ("traceparent", GIVEN.encode())])
    [span] = parent_of_headers([("traceparent", GIVEN), ("tracestate", "a=1"), ("tracestate", "b=2")]).values()
    assert span.get_span_context().trace_state.to_header() == "a=1,b=2"


def test_refusals_and_leavers_end_their_spans(served: House, traces: Traces) -> None:
    """Guards against spans that are kept for ever: of requests that fail, and of clients that leave."""
    with grpc.insecure_channel(served.grpc) as channel:
        stub = stub_of(channel)
        call = stub.Generate(encode_request(PROMPT, replace(LONG, max_tokens=1500), ALL), metadata=(("traceparent", GIVEN),))
        next(iter(call))
        call.cancel()
    served.settle()
    spans = tree(traces.taken())
    assert trace_ids(list(spans.values())) == {TRACE}
    assert (spans["cascade.answer"].attributes or {})["cascade.outcome"] == "left"


def test_dead_replicas_show(traces: Traces) -> None:
    """Guards what a trace is for: who died is an error below the session that lost it, and the answer goes on in another."""
    with house(tracing=traces.of, pass_s=0.004) as served:
        traces.taken()

        async def replaced(name: str) -> None:
            old, lower = served.net.nodes[name], NAMES[: NAMES.index(name)]
            model = CountingModel(vocab_size=old.model.vocab_size, agreement=old.model.agreement, pass_s=old.model.pass_s)
            lessors = {below: served.net.lessor(below) for below in lower}
            node = served.net.nodes[name] = Node(len(lower), model, lessors, tracing=traces.of(f"{name}2"))
            await node.start()
            await old.stop()

        longer = replace(LONG, max_tokens=120)
        assert generate(served, longer, then=lambda: served.call(replaced("medium"))) == 120
        spans = traces.taken()
        lost = [span for span in spans if span.name == "cascade.open medium" and span.status.status_code is StatusCode.ERROR]
        [above_it] = [span for span in spans if span.name == "cascade.session full"]
        assert [parent(span) for span in lost] == [id_of(above_it)] * len(lost) != []

        assert generate(served, longer, then=lambda: served.call(replaced("full"))) == 120
        spans = traces.taken()
        [answer] = [span for span in spans if span.name == "cascade.answer"]
        *failed_ones, last = sorted((s for s in spans if s.name == "cascade.open full"), key=lambda span: span.start_time or 0)
        assert [span.status.status_code for span in failed_ones] == [StatusCode.ERROR] * len(failed_ones) != []
        assert last.status.status_code is not StatusCode.ERROR
        assert {parent(span) for span in (*failed_ones, last)} == {id_of(answer)}
        replicas = {(s.attributes or {})["cascade.replica"] for s in spans if s.name == "cascade.session full"}
        assert replicas == {"full#1", "full2#1"}
        assert trace_ids(spans) == {TRACE}


def test_off_there_is_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards servers that nobody traces: no spans, no context on the wire, nothing kept, whatever clients say."""
    for name in (*export.ENDPOINTS, "OTEL_TRACES_EXPORTER"):
        monkeypatch.delenv(name, raising=False)
    assert tracing("router").tracer is None
    context = Trace.of(answer_span(UNTRACED, request_span(UNTRACED, [("traceparent", GIVEN)], 0.0), opening().spec, 0))
    spans = SessionSpans(UNTRACED)
    assert spans.opened(Open("s", opening().spec, Routing("", *context))) == context == ("", "")
    assert not spans._spans


@pytest.mark.parametrize(
    ("environment", "names"),
    [
        ({}, ()),
        ({"OTEL_TRACES_EXPORTER": "none", "OTEL_EXPORTER_OTLP_ENDPOINT": "http://collector:4318"}, ()),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://collector:4318"}, ("otlp_proto_http",)),
        ({"OTEL_TRACES_EXPORTER": "otlp", "OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"}, ("otlp_proto_grpc",)),
        ({"OTEL_TRACES_EXPORTER": "console, otlp"}, ("console", "otlp_proto_http")),
        ({"OTEL_TRACES_EXPORTER": "console", "OTEL_SDK_DISABLED": "true"}, ()),
    ],
)
def test_the_environment_says_where_spans_go(
    environment: dict[str, str], names: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards OpenTelemetry's own variables, and that nothing is exported unless they ask for it."""
    for name in (*export.ENDPOINTS, *export.PROTOCOLS, "OTEL_TRACES_EXPORTER", "OTEL_SDK_DISABLED"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert exporters() == names


@pytest.mark.parametrize(
    ("variable", "value", "words"),
    [("OTEL_TRACES_EXPORTER", "pigeon", "pip install"), ("OTEL_EXPORTER_OTLP_PROTOCOL", "http/json", "http/protobuf, grpc")],
)
def test_exporters_that_are_not_there_are_refused(
    variable: str, value: str, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards against servers that start and send their spans nowhere."""
    monkeypatch.setenv("OTEL_TRACES_EXPORTER", "otlp")
    monkeypatch.setenv(variable, value)
    with pytest.raises(ConfigError, match=words):
        tracing("router")


def test_spans_go_where_the_environment_says() -> None:
    """Guards a process of its own, as a replica is: provider, exporter and the names that processes have in traces."""
    code = """
from deployments.ops.tracing import flush, tracing
made = tracing("router")
assert made.tracer is not None and made is not tracing("router")
made.tracer.start_span("cascade.request").end()
flush()
"""
    environment = os.environ | {"OTEL_TRACES_EXPORTER": "console", "OTEL_SERVICE_NAME": "mine"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    span = json.loads(done.stdout)
    assert span["name"] == "cascade.request"
    assert span["resource"]["attributes"]["service.name"] == "mine"
