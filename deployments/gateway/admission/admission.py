"""Admission of all requests, whatever their protocol: keys, limits, places, counters, and the form of errors."""

import asyncio
import contextlib
import logging
import math
import re
import time
from collections.abc import AsyncIterator, Collection, Iterator, Sequence
from dataclasses import dataclass, field

from opentelemetry.trace import INVALID_SPAN, Span

from cascade.answer import Chunk
from cascade.client.connection import RETRY_AFTER
from cascade.errors import CascadeError, InvalidRequest, Overloaded, Unauthenticated, Unavailable
from cascade.messages import Routing, SessionSpec, mint
from cascade.settings.config import CascadeConfig
from cascade.tier.scheduler import PRIORITY_S
from deployments.gateway.admission.access import Access, Account
from deployments.gateway.admission.metrics import LEFT, RouterMetrics
from deployments.gateway.admission.places import LEAVING, Lifetime, Places, Ticket
from deployments.ops.tracing import Trace, Tracing, answer_span, end_answer, request_span, tracing

log = logging.getLogger(__name__)
access = logging.getLogger("deployments.access")

LOG_S = 1.0  # seconds between two refusals in the log
SESSION = "x-session-id"  # header or metadata: requests with the same value go to the same full replica
REQUEST_ID = re.compile(r"[A-Za-z0-9_.:-]{1,128}")
# limit of a sentence, since gRPC sends it in a header of limited size, with three bytes for each byte that is not ASCII
MAX_CHARS = 500
UNKNOWN_FAILURE = "The server failed; its log says why"


def fits(id: str) -> bool:
    """Whether a request's id may stand in headers and logs."""
    return REQUEST_ID.fullmatch(id) is not None


@dataclass(frozen=True, slots=True)
class Caller:
    """The sender of a request, and the values of its HTTP headers or gRPC metadata."""

    account: Account
    request_id: str | None  # the client's own, by which it can abort the request, if it gave one
    since: float  # when the request arrived, on the clock of `time.monotonic`
    headers: Collection[tuple[str, object]]
    timeout_s: float | None  # seconds until the request's deadline, if it has one


@dataclass(eq=False, slots=True)
class ActiveRequest:
    """A request in service; it may have several answers."""

    id: str
    account: Account
    lifetime: Lifetime
    since: float  # when it arrived
    affinity: str = ""  # the client's session id
    train: bool = True  # drafters may learn from its answers
    outcomes: list[str] = field(default_factory=list)  # one for each answer that has ended
    num_read: int = 0  # tokens of prompts
    num_written: int = 0
    span: Span = INVALID_SPAN

    @property
    def summary(self) -> dict[str, object]:
        """Fields for the log, without any text of prompt or answer."""
        return {
            "request_id": self.id,
            "key": self.account.name,
            "outcomes": ",".join(sorted(set(self.outcomes))) or "none",
            "answers": len(self.outcomes),
            "prompt_tokens": self.num_read,
            "output_tokens": self.num_written,
            "seconds": round(time.monotonic() - self.since, 3),
        }


class Admission:
    """Admits requests, counts and charges their answers, and aborts requests."""

    def __init__(self, config: CascadeConfig) -> None:
        self.limits = config.router.limits
        self.access = Access(config.router.access)
        self.places = Places(config.router.max_running, config.router.max_waiting)
        self.metrics = RouterMetrics(self.places, config.names, config.drafters)
        self.tracing = tracing("router", config.model_names[0])
        self._active: set[ActiveRequest] = set()
        self._log_after = 0.0  # on the clock of `time.monotonic`
        self._num_unlogged = 0  # refused requests since the last one in the log

    @contextlib.contextmanager
    def admitted(self, caller: Caller, specs: Sequence[SessionSpec], *, train: bool) -> Iterator[ActiveRequest]:
        """Hold places for the answers to ``specs`` of a request.

        Raises `PermissionDenied`, `InvalidRequest`, `Overloaded`, `Unavailable` or `DeadlineExceeded` at once.
        """
        account, num_answers = caller.account, len(specs)
        for priority in {spec.priority for spec in specs}:
            account.check_priority(priority)
        affinity = next((str(value) for name, value in caller.headers if name == SESSION), "")
        lifetime = Lifetime() if caller.timeout_s is None else Lifetime(time.monotonic() + caller.timeout_s)
        id = mint() if caller.request_id is None else caller.request_id
        if not fits(id):
            raise InvalidRequest("The request id is not 1 to 128 letters, digits, dots, colons, dashes or underscores")
        request = ActiveRequest(id, account, lifetime, caller.since, affinity, train)
        lifetime.check()
        with account.admitted(num_answers), self.places.admitted(num_answers):
            self._active.add(request)
            request.span = request_span(self.tracing, caller.headers, caller.since)
            try:
                yield request
            finally:
                self._active.discard(request)
                summary = request.summary
                names = {"cascade.request_id": "request_id", "cascade.outcome": "outcomes"}
                request.span.set_attributes({name: str(summary[key]) for name, key in names.items()})
                request.span.end()
                access.info(" ".join(f"{name}={value}" for name, value in summary.items()), extra=summary)

    def refused(self, error: CascadeError, id: str | None, account: Account | None) -> None:
        """Count a request that gets an error, and log at most one a second, since faults come in bursts."""
        self.metrics.counters["refused"].labels(error.code).inc()
        self._num_unlogged += 1
        if (now := time.monotonic()) < self._log_after:
            return
        fields = {
            "code": error.code,
            "param": getattr(error, "param", None) or "none",
            "key": "unknown" if account is None else account.name,
            "request_id": id if id is not None and fits(id) else "none",
            "since_last": self._num_unlogged,
        }
        self._log_after, self._num_unlogged = now + LOG_S, 0
        log.info("Refused a request: %s", " ".join(f"{name}={value}" for name, value in fields.items()), extra=fields)

    def abort(self, key: str, id: str) -> int:
        """Abort the requests with this id of the key ``key``; returns how many there were."""
        requests = [request for request in self._active if request.id == id and request.account.name == key]
        for request in requests:
            request.lifetime.abort()
        return len(requests)

    def abort_all(self) -> None:
        """Abort all requests, because the server shuts down."""
        for request in list(self._active):
            request.lifetime.abort(leaving=True)

    @contextlib.asynccontextmanager
    async def answering(self, spec: SessionSpec, request: ActiveRequest, index: int) -> AsyncIterator["AnswerRecord"]:
        """Wait for the turn of an answer, and hold it; count, charge, log and trace the answer."""
        record = AnswerRecord(spec, request, index, self.metrics, self.tracing)
        account, read = request.account, len(spec.tokens)
        account.charge(read)
        num_delivered = read - spec.prompt_len  # tokens of the answer that the client already has
        if num_delivered:
            self.metrics.counters["resumed_answers"].inc()
        most, rank = spec.params.max_tokens - num_delivered, request.since + PRIORITY_S * spec.priority  # as at tiers
        try:
            turn = self.places.turn(request.lifetime, account.name, account.limits.weight, read, most, rank)
            async with turn as record.ticket:
                self.metrics.observe("request_queue_time_seconds", time.monotonic() - request.since)
                record.span.add_event("turn")
                yield record
        except (GeneratorExit, asyncio.CancelledError):  # a client that leaves after the last piece has the whole answer
            record.outcome = LEFT if record.outcome == "failed" else record.outcome
            raise
        except CascadeError as error:
            record.outcome = error.code
            if isinstance(error, Unavailable) and self.places.closed:  # the whole server may shut down, with the full tier
                raise Unavailable(LEAVING) from None
            raise
        finally:
            self.metrics.ended(record.outcome, spec.prompt_len, len(record.tokens))
            request.outcomes.append(record.outcome)
            request.num_read += spec.prompt_len
            request.num_written += len(record.tokens)
            end_answer(record.span, record.outcome, len(record.tokens))


class AnswerRecord:
    """Counts of one answer while it is written; ``routing`` is for its sessions at the full tier."""

    ticket: Ticket

    def __init__(self, spec: SessionSpec, request: ActiveRequest, index: int, metrics: RouterMetrics, tracing: Tracing) -> None:
        self.span = answer_span(tracing, request.span, spec, index)
        self.routing = Routing("", *Trace.of(self.span), request.affinity, request.train)
        self.tokens: list[int] = []  # tokens that were sent
        self.outcome = "failed"
        self._request = request
        self._metrics = metrics
        self._last = request.since  # when the last piece had been sent

    def piece(self, chunk: Chunk) -> None:
        """The next piece is about to be sent."""
        now, since_last = time.monotonic(), "inter_token_latency_seconds"
        if not self.tokens:
            self.span.add_event("first_token")
            since_last = "time_to_first_token_seconds"
        self._metrics.observe(since_last, now - self._last)
        self.tokens += chunk.token_ids
        self.ticket.written = len(self.tokens)
        self._request.account.charge(len(chunk.token_ids))
        if chunk.completion is not None:
            self.outcome = chunk.completion.finish_reason
            self._metrics.completed(chunk.completion, now - self._request.since)

    def sent(self, chunk: Chunk) -> None:
        """The client's stream has taken the piece."""
        if chunk.token_ids:
            self._last = time.monotonic()


# errors


def refusal(error: Exception) -> CascadeError:
    """The error that a client gets for ``error``, with one sentence at most. Faults of the server go to the log."""
    if not isinstance(error, CascadeError):
        log.error("A request failed", exc_info=error)
        return CascadeError(UNKNOWN_FAILURE)
    if len(str(error)) > MAX_CHARS:
        error.args = (f"{str(error)[:MAX_CHARS]}...",)
    return error


def metadata(error: CascadeError) -> tuple[tuple[str, str], ...]:
    """HTTP headers, or gRPC trailing metadata, of an error."""
    if isinstance(error, Overloaded):
        return ((RETRY_AFTER, str(math.ceil(error.retry_after_s))),)
    return (("www-authenticate", "Bearer"),) if isinstance(error, Unauthenticated) else ()
