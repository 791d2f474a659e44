"""How errors look to clients; statuses and codes of each class are in `cascade.errors`."""

import logging
import math
from dataclasses import dataclass
from typing import Any

from cascade.client.connection import RETRY_AFTER
from cascade.errors import CascadeError, InvalidRequest, Overloaded

log = logging.getLogger(__name__)

# the limit of a sentence: gRPC sends it in a header of limited size, with three bytes for one that is not ASCII
MAX_CHARS = 500
UNKNOWN_FAILURE = "The server failed; its log says why"


@dataclass(frozen=True, slots=True)
class Refusal:
    """An error as a client gets it."""

    kind: type[CascadeError]
    message: str
    retry_after_s: int | None = None
    param: str | None = None

    @property
    def body(self) -> dict[str, Any]:
        """The error as OpenAI's API has it."""
        return {"error": {"message": self.message, "type": self.kind.type, "param": self.param, "code": self.kind.code}}

    @property
    def metadata(self) -> tuple[tuple[str, str], ...]:
        """HTTP headers, and gRPC trailing metadata."""
        headers = () if self.retry_after_s is None else ((RETRY_AFTER, str(self.retry_after_s)),)
        return (*headers, ("www-authenticate", "Bearer")) if self.kind.http == 401 else headers


def refusal(error: Exception) -> Refusal:
    """What to tell a client of ``error``: one sentence at most. A fault of the server goes to the log."""
    if not isinstance(error, CascadeError):
        log.error("A request failed", exc_info=error)
        return Refusal(CascadeError, UNKNOWN_FAILURE)
    retry_after_s = math.ceil(error.retry_after_s) if isinstance(error, Overloaded) else None
    sentence, param = str(error), error.param if isinstance(error, InvalidRequest) else None
    return Refusal(type(error), sentence if len(sentence) <= MAX_CHARS else f"{sentence[:MAX_CHARS]}...", retry_after_s, param)
