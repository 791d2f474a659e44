"""How errors look to clients; statuses and codes of each class are in `cascade.errors`."""

import logging
import math

from cascade.client.connection import RETRY_AFTER
from cascade.errors import CascadeError, Overloaded, Unauthenticated

log = logging.getLogger(__name__)

# the limit of a sentence: gRPC sends it in a header of limited size, with three bytes for one that is not ASCII
MAX_CHARS = 500
UNKNOWN_FAILURE = "The server failed; its log says why"


def refusal(error: Exception) -> CascadeError:
    """What to tell a client of ``error``: one sentence at most. A fault of the server goes to the log."""
    if not isinstance(error, CascadeError):
        log.error("A request failed", exc_info=error)
        return CascadeError(UNKNOWN_FAILURE)
    if len(str(error)) > MAX_CHARS:
        error.args = (f"{str(error)[:MAX_CHARS]}...",)
    return error


def metadata(error: CascadeError) -> tuple[tuple[str, str], ...]:
    """HTTP headers, and gRPC trailing metadata."""
    if isinstance(error, Overloaded):
        return ((RETRY_AFTER, str(math.ceil(error.retry_after_s))),)
    return (("www-authenticate", "Bearer"),) if isinstance(error, Unauthenticated) else ()
