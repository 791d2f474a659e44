"""Every error that a user of cascade can meet.

CascadeError
├── ConfigError      the configuration is wrong; raised at start, names the field, the value and the fix
├── ModelError       a model cannot be loaded or cannot be served
├── InvalidRequest   a request asks for something that cannot be honoured (gRPC INVALID_ARGUMENT)
├── Overloaded       the server is full; try again later (gRPC RESOURCE_EXHAUSTED)
├── Unavailable      no replica could finish the request (gRPC UNAVAILABLE)
└── DeadlineExceeded the request's own deadline passed (gRPC DEADLINE_EXCEEDED)
"""


class CascadeError(Exception):
    """Base of all errors of this package; its text is one sentence meant for the user."""


class ConfigError(CascadeError, ValueError):
    """The configuration is wrong."""


class ModelError(CascadeError):
    """A model cannot be loaded or served."""


class InvalidRequest(CascadeError, ValueError):
    """The request asks for something that cannot be honoured."""


class Overloaded(CascadeError):
    """The server takes no more requests at present."""


class Unavailable(CascadeError):
    """No replica could finish the request."""


class DeadlineExceeded(CascadeError, TimeoutError):
    """The request's deadline passed before its text was complete."""
