"""Every error that a user of cascade can meet; docs/reference/errors.md tells how each looks to gRPC and HTTP clients.

Each class says what clients are told: the name of gRPC's status, HTTP's status, `error.type` and `error.code` of OpenAI's body.
"""

from typing import ClassVar


def reason(error: BaseException) -> str:
    """The first line of what another library says."""
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
    """The request asks for something that cannot be honoured; ``param`` is the field to blame, if there is one."""

    grpc, http, type, code = "INVALID_ARGUMENT", 400, "invalid_request_error", "invalid_request"

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class ContextLengthExceeded(InvalidRequest):
    """The prompt leaves the models no room for the answer."""

    code = "context_length_exceeded"


class UnsupportedMedia(InvalidRequest):
    """The body is in a form that the server does not read."""

    http, code = 415, "unsupported_media_type"


class TooLarge(InvalidRequest):
    """The request has more bytes or characters than the server reads."""

    http, code = 413, "too_large"


class NotFound(InvalidRequest):
    """The request names something that is not there."""

    grpc, http, code = "NOT_FOUND", 404, "not_found"


class Unauthenticated(CascadeError):
    """The request has no API key that the server knows."""

    grpc, http, type, code = "UNAUTHENTICATED", 401, "authentication_error", "invalid_api_key"


class PermissionDenied(CascadeError):
    """The request asks for what its API key does not allow; another key may."""

    grpc, http, type, code = "PERMISSION_DENIED", 403, "permission_error", "permission_denied"


class Overloaded(CascadeError):
    """The server takes no more requests at present; another try may succeed after ``retry_after_s`` seconds."""

    grpc, http, type, code = "RESOURCE_EXHAUSTED", 429, "rate_limit_error", "overloaded"

    def __init__(self, message: str, retry_after_s: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class Unavailable(CascadeError):
    """No replica could finish the request."""

    grpc, http, code = "UNAVAILABLE", 503, "unavailable"


class Aborted(CascadeError):
    """Somebody with the request's API key ended it."""

    grpc, http, type, code = "ABORTED", 499, "aborted_error", "aborted"


class DeadlineExceeded(CascadeError, TimeoutError):
    """The request's deadline passed before its text was complete."""

    grpc, http, type, code = "DEADLINE_EXCEEDED", 504, "timeout_error", "deadline_exceeded"


KINDS = tuple(kind for kind in tuple(vars().values()) if isinstance(kind, type) and issubclass(kind, CascadeError))
