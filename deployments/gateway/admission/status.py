"""The form of errors for clients; statuses and codes of each class are in `cascade.errors`."""

import logging
import math

from cascade.client.connection import RETRY_AFTER
from cascade.errors import CascadeError, Overloaded, Unauthenticated

log = logging.getLogger(__name__)

# limit of a sentence, since gRPC sends it in a header of limited size, with three bytes for each byte that is not ASCII
MAX_CHARS = 500
UNKNOWN_FAILURE = "The server failed; its log says why"


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
