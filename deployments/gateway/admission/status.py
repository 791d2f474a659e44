"""How errors look to clients; statuses and codes of each class are in `cascade.errors`."""

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from cascade.client.connection import RETRY_AFTER
from cascade.errors import CascadeError, InvalidRequest, Overloaded

log = logging.getLogger(__name__)

MAX_CHARS = 500  # of a sentence: gRPC sends it in a header of limited size, with three bytes for one that is not ASCII
PLAIN_KINDS = ("str", "int", "float", "bool")  # as pydantic names them
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


def _likeliest(errors: Sequence[Any]) -> Any:
    """The error to tell: of a value of several kinds, which has an error for each, that of the kind that was meant."""
    same_field = [error for error in errors if error["loc"][:2] == errors[0]["loc"][:2]]
    return next((error for error in same_field if not error["type"].endswith("_type")), errors[0])


def mistake(errors: Sequence[Any], whole: str = "The body") -> tuple[str | None, str]:
    """The first mistake in a body, of pydantic's ``errors``: the field, and one sentence that never repeats a long value.

    ``whole`` is what the body is called where no field of it is to blame.
    """
    first = _likeliest(errors)
    if first["type"] == "json_invalid":
        return None, "The body is not JSON"
    if first["type"] == "model_attributes_type" and len(first["loc"]) == 1:
        return None, "The body is no JSON object: send one, with the header Content-Type: application/json"
    message = first["msg"].removeprefix("Value error, ")
    kind, *path = first["loc"]
    if kind == "header":
        where = "-".join(part.capitalize() for part in str(path[0]).split("-"))
    else:  # pydantic's path also names the members of unions
        where = ".".join(
            str(part) for part in path if isinstance(part, int) or (part.isidentifier() and part not in PLAIN_KINDS)
        )
        where = where[:60] or whole
    if first["type"] == "extra_forbidden":
        return where, f"{where} is not a known field: leave it out or mend its spelling"
    if first["type"] == "missing":
        return where if path else None, f"{where} is missing: add it"
    blamed = first.get("ctx", {}).get("error")
    if isinstance(blamed, InvalidRequest) and blamed.param is not None:  # a rule about several fields
        return ".".join([where, blamed.param] if where != whole else [blamed.param]), f"{where}: {message}"
    shown = f" is {first['input']!r:.60}" if isinstance(first["input"], str | int | float | bool | None) else ""
    return where, f"{where}{shown}: {message[0].lower()}{message[1:]}"
