"""Every error that a user of cascade can meet; docs/reference/errors.md shows how each looks to gRPC and HTTP clients.

Each class has what clients get: the gRPC status, the HTTP status, and `error.type` and `error.code` of OpenAI's body.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import ClassVar


def reason(error: BaseException) -> str:
    """The first line of an error's message, for errors of other libraries."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


class CascadeError(Exception):
    """Base of all errors of this package; its text is one sentence meant for the user."""

    grpc: ClassVar[str] = "INTERNAL"
    http: ClassVar[int] = 500
    type: ClassVar[str] = "server_error"
    code: ClassVar[str] = "internal"


class ConfigError(CascadeError, ValueError):
    """The configuration is wrong."""

    code = "config_error"


class ModelError(CascadeError):
    """A model cannot be loaded or served."""

    grpc, code = "FAILED_PRECONDITION", "model_error"


class InvalidRequest(CascadeError, ValueError):
    """The request asks for something that cannot be honoured; ``param`` names the field at fault, if there is one."""

    grpc, http, type, code = "INVALID_ARGUMENT", 400, "invalid_request_error", "invalid_request"

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class ContextLengthExceeded(InvalidRequest):
    """The prompt leaves the models no room for the answer."""

    code = "context_length_exceeded"


class UnsupportedMedia(InvalidRequest):
    """The body has an encoding or a format that the server does not read."""

    http, code = 415, "unsupported_media_type"


class TooLarge(InvalidRequest):
    """The request has more bytes or characters than the server reads."""

    http, code = 413, "too_large"


class NotFound(InvalidRequest):
    """The request names something that does not exist."""

    grpc, http, code = "NOT_FOUND", 404, "not_found"


class Unauthenticated(CascadeError):
    """The request has no API key that the server knows."""

    grpc, http, type, code = "UNAUTHENTICATED", 401, "authentication_error", "invalid_api_key"


class PermissionDenied(CascadeError):
    """The request's API key does not allow what it asks for; another key may."""

    grpc, http, type, code = "PERMISSION_DENIED", 403, "permission_error", "permission_denied"


class Overloaded(CascadeError):
    """The server takes no more requests now; another try may succeed after ``retry_after_s`` seconds."""

    grpc, http, type, code = "RESOURCE_EXHAUSTED", 429, "rate_limit_error", "overloaded"

    def __init__(self, message: str, retry_after_s: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class Unavailable(CascadeError):
    """No replica could finish the request."""

    grpc, http, code = "UNAVAILABLE", 503, "unavailable"


class Aborted(CascadeError):
    """The request was aborted by a client with the same API key."""

    grpc, http, type, code = "ABORTED", 499, "aborted_error", "aborted"


class DeadlineExceeded(CascadeError, TimeoutError):
    """The request's deadline passed before its text was complete."""

    grpc, http, type, code = "DEADLINE_EXCEEDED", 504, "timeout_error", "deadline_exceeded"


KINDS = tuple(kind for kind in tuple(vars().values()) if isinstance(kind, type) and issubclass(kind, CascadeError))


@contextmanager
def model_errors(problem: str) -> Iterator[None]:
    """Turn errors of any library into a `ModelError` that begins with ``problem``; a `ModelError` stays as it is."""
    try:
        yield
    except ModelError:
        raise
    except Exception as error:
        raise ModelError(f"{problem}: {reason(error)}") from error
