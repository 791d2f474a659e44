"""The base of all sections of a configuration, types of their fields, and validation errors as one sentence."""

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, ValidationError

Count = Annotated[int, Field(ge=1)]
Seconds = Annotated[float, Field(gt=0)]
Text = Annotated[str, Field(min_length=1)]
Variable = Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")]  # of an environment
Port = Annotated[int, Field(ge=1, le=65535)]
Live = Field(json_schema_extra={"live": True})  # marks a field that changes while routers run, see `cascade.settings.live`

UNION_PARTS = ("constrained-", "literal[")  # begin the names that pydantic adds to the place of a value of several types


class Section(BaseModel):
    """Refuses unknown keys, and never changes."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


def sentence(error: ValidationError) -> str:
    """The first problem: the field, its value, and what is wrong with it."""
    first = error.errors()[0]
    where = ".".join(str(part) for part in first["loc"] if not str(part).startswith(UNION_PARTS))
    if first["type"] == "extra_forbidden":
        return f"{where} is not a known key; remove it or mend its spelling"
    if first["type"] == "missing":
        return f"{where} is missing; add it"
    value, message = first["input"], first["msg"].removeprefix("Value error, ")
    shown = f" is {value!r}" if isinstance(value, str | int | float | bool | None) else ""
    more = f" (and {error.error_count() - 1} more)" if error.error_count() > 1 else ""
    return f"{where}{shown}: {message[0].lower()}{message[1:]}{more}".removeprefix(": ")
