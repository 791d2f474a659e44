"""What all parts of a configuration have in common, and what is wrong with one in one sentence."""

from pydantic import BaseModel, ConfigDict, ValidationError
from pydantic_core import ErrorDetails

KINDS_OF_VALUES = ("constrained-", "literal[")  # begin the names that pydantic adds to the places of values of several kinds


class Section(BaseModel):
    """Unknown keys are errors, and nothing changes later."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


def sentence(error: ValidationError) -> str:
    """The first problem: where, what it is, what it must be."""
    first = error.errors()[0]
    where = ".".join(str(part) for part in first["loc"] if not str(part).startswith(KINDS_OF_VALUES))
    if first["type"] == "extra_forbidden":
        return f"{where} is not a known key; remove it or mend its spelling"
    if first["type"] == "missing":
        return f"{where} is missing; add it"
    value = first["input"]
    shown = f" is {value!r}" if isinstance(value, str | int | float | bool | None) else ""
    more = f" (and {error.error_count() - 1} more)" if error.error_count() > 1 else ""
    return f"{where}{shown}: {_rule(first)}{more}" if where else _rule(first)


def _rule(error: ErrorDetails) -> str:
    """What a value must be, in the words of YAML."""
    kind, numbers = error["type"], error.get("ctx", {})
    if kind in ("model_type", "dict_type"):
        return "it must be a mapping"
    if kind == "tuple_type":
        return "it must be a list"
    if kind == "too_long":
        return f"it has {numbers['actual_length']} entries, but may have at most {numbers['max_length']}"
    if kind == "too_short":
        return f"it has {numbers['actual_length']} entries, but must have at least {numbers['min_length']}"
    message = error["msg"].removeprefix("Value error, ")
    return message[0].lower() + message[1:]
