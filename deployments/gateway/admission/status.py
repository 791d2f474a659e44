"""How errors look to clients: the one table behind docs/reference/errors.md."""

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import grpc

from cascade.client.connection import RETRY_AFTER
from cascade.errors import (
    Aborted,
    CascadeError,
    ConfigError,
    DeadlineExceeded,
    InvalidRequest,
    ModelError,
    NotFound,
    Overloaded,
    PermissionDenied,
    TooLarge,
    Unauthenticated,
    Unavailable,
)

log = logging.getLogger(__name__)

MAX_CHARS = 500  # of a sentence: gRPC sends it in a header of limited size, and each byte that is not ASCII as three
PLAIN_KINDS = ("str", "int", "float", "bool")  # as pydantic names them
UNKNOWN_FAILURE = "The server failed; its log says why"


@dataclass(frozen=True, slots=True)
class Status:
    """What clients are told of an error."""

    kind: type[Exception]
    grpc: grpc.StatusCode
    http: int
    type: str  # in OpenAI's body
    code: str  # in OpenAI's body


# an error has the first row whose kind it is
STATUSES = (
    Status(TooLarge, grpc.StatusCode.INVALID_ARGUMENT, 413, "invalid_request_error", "too_large"),
    Status(NotFound, grpc.StatusCode.NOT_FOUND, 404, "invalid_request_error", "not_found"),
    Status(InvalidRequest, grpc.StatusCode.INVALID_ARGUMENT, 400, "invalid_request_error", "invalid_request"),
    Status(Unauthenticated, grpc.StatusCode.UNAUTHENTICATED, 401, "authentication_error", "invalid_api_key"),
    Status(PermissionDenied, grpc.StatusCode.PERMISSION_DENIED, 403, "permission_error", "permission_denied"),
    Status(Overloaded, grpc.StatusCode.RESOURCE_EXHAUSTED, 429, "rate_limit_error", "overloaded"),
    Status(Unavailable, grpc.StatusCode.UNAVAILABLE, 503, "server_error", "unavailable"),
    Status(Aborted, grpc.StatusCode.ABORTED, 499, "aborted_error", "aborted"),
    Status(DeadlineExceeded, grpc.StatusCode.DEADLINE_EXCEEDED, 504, "timeout_error", "deadline_exceeded"),
    Status(ModelError, grpc.StatusCode.FAILED_PRECONDITION, 500, "server_error", "model_error"),
    Status(ConfigError, grpc.StatusCode.INTERNAL, 500, "server_error", "config_error"),
    Status(CascadeError, grpc.StatusCode.INTERNAL, 500, "server_error", "internal"),
    Status(Exception, grpc.StatusCode.INTERNAL, 500, "server_error", "internal"),
)


@dataclass(frozen=True, slots=True)
class Refusal:
    """An error as a client gets it."""

    status: Status
    message: str
    retry_after_s: int | None = None
    param: str | None = None

    @property
    def body(self) -> dict[str, Any]:
        """In the form of OpenAI's API."""
        error = {"message": self.message, "type": self.status.type, "param": self.param, "code": self.status.code}
        return {"error": error}

    @property
    def metadata(self) -> tuple[tuple[str, str], ...]:
        """HTTP headers, and gRPC trailing metadata."""
        headers = () if self.retry_after_s is None else ((RETRY_AFTER, str(self.retry_after_s)),)
        return (*headers, ("www-authenticate", "Bearer")) if self.status.http == 401 else headers


def status_of(error: Exception) -> Status:
    """Its row of the table."""
    return next(status for status in STATUSES if isinstance(error, status.kind))


def refusal(error: Exception) -> Refusal:
    """What to tell a client of ``error``: one sentence at most. What is the server's own fault goes to the log."""
    status = status_of(error)
    if status.kind is Exception:
        log.error("A request failed", exc_info=error)
        return Refusal(status, UNKNOWN_FAILURE)
    retry_after_s = math.ceil(error.retry_after_s) if isinstance(error, Overloaded) else None
    sentence = str(error)
    return Refusal(status, sentence if len(sentence) <= MAX_CHARS else f"{sentence[:MAX_CHARS]}...", retry_after_s)


def _likeliest(errors: Sequence[Any]) -> Any:
    """The error to tell. A value that may be of several kinds has one for each kind: tells that of the kind that was meant."""
    same = [error for error in errors if error["loc"][:2] == errors[0]["loc"][:2]]
    return next((error for error in same if not error["type"].endswith("_type")), errors[0])


def mistake(errors: Sequence[Any], whole: str = "The body") -> tuple[str | None, str]:
    """The first thing that is wrong with a body: its field, and one sentence that never repeats a long value.

    ``whole`` is what the body is called where no field of it is to blame.
    """
    first = _likeliest(errors)
    if first["type"] == "json_invalid":
        return None, "The body is not JSON"
    if first["type"] == "model_attributes_type" and len(first["loc"]) == 1:
        return None, "The body is no JSON object: send one, with the header Content-Type: application/json"
    said = first["msg"].removeprefix("Value error, ")
    kind, *path = first["loc"]
    if kind == "header":
        where = "-".join(part.capitalize() for part in str(path[0]).split("-"))
    else:  # kinds of values that a union takes stand in the path too
        where = ".".join(
            str(part) for part in path if isinstance(part, int) or (part.isidentifier() and part not in PLAIN_KINDS)
        )
        where = where[:60] or whole
    if first["type"] == "extra_forbidden":
        return where, f"{where} is not a known field: leave it out or mend its spelling"
    if first["type"] == "missing":
        return where if path else None, f"{where} is missing: add it"
    shown = f" is {first['input']!r:.60}" if isinstance(first["input"], str | int | float | bool | None) else ""
    return where, f"{where}{shown}: {said[0].lower()}{said[1:]}"
