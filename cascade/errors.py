"""Every error that a user of cascade can meet; docs/reference/errors.md tells how each looks to gRPC and HTTP clients.

CascadeError
├── ConfigError      the configuration is wrong; raised at start, names the field, the value and the fix
├── ModelError       a model cannot be loaded or cannot be served
├── InvalidRequest   a request asks for something that cannot be honoured
│   ├── TooLarge     it has more bytes or characters than the server reads
│   └── NotFound     it names a model or a path that is not there
├── Unauthenticated  a request has no API key that the server knows
├── PermissionDenied a request asks for what its API key does not allow
├── Overloaded       the server is full, or has enough requests of this API key; try again later
├── Unavailable      no replica could finish the request
├── Aborted          somebody with the request's API key ended it
└── DeadlineExceeded the request's own deadline passed
"""


def reason(error: BaseException) -> str:
    """The first line of what another library says."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


class CascadeError(Exception):
    """Base of all errors of this package; its text is one sentence meant for the user."""


class ConfigError(CascadeError, ValueError):
    """The configuration is wrong."""


class ModelError(CascadeError):
    """A model cannot be loaded or served."""


class InvalidRequest(CascadeError, ValueError):
    """The request asks for something that cannot be honoured."""


class TooLarge(InvalidRequest):
    """The request has more bytes or characters than the server reads."""


class NotFound(InvalidRequest):
    """The request names something that is not there."""


class Unauthenticated(CascadeError):
    """The request has no API key that the server knows."""


class PermissionDenied(CascadeError):
    """The request asks for what its API key does not allow; another key may."""


class Overloaded(CascadeError):
    """The server takes no more requests at present; another try may succeed after ``retry_after_s`` seconds."""

    def __init__(self, message: str, retry_after_s: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class Unavailable(CascadeError):
    """No replica could finish the request."""


class Aborted(CascadeError):
    """Somebody with the request's API key ended it."""


class DeadlineExceeded(CascadeError, TimeoutError):
    """The request's deadline passed before its text was complete."""
