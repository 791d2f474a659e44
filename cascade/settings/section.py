"""The base class of all sections of a configuration, types of fields, and validation errors as one sentence."""

import re
from collections.abc import Iterable, Iterator, Sequence
from difflib import get_close_matches
from typing import Annotated, Any, get_args

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError


def _no_switch(value: Any) -> Any:
    """Refuse what YAML reads from ``yes`` and pydantic takes as 1."""
    if isinstance(value, bool):
        raise ValueError("input should be a number, not a boolean")
    return value


NUMERIC = BeforeValidator(_no_switch)  # of all fields with numbers; the last in `Annotated`, so that schemas have limits
Whole = Annotated[int, NUMERIC]
Number = Annotated[float, NUMERIC]
Count = Annotated[int, Field(ge=1), NUMERIC]
Seconds = Annotated[float, Field(gt=0), NUMERIC]
Text = Annotated[str, Field(min_length=1)]
Variable = Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")]  # an environment variable's name
Port = Annotated[int, Field(ge=1, le=65535), NUMERIC]

# prefixes of the parts that pydantic adds to the place of a value of a union
UNION_PARTS = ("constrained-", "function-", "literal[")
# pydantic's words, and those of YAML
WORDS = {" or instance of \\w+": "", "[Tt]uple": "list", "dictionary": "mapping", " after validation": ""}


class Section(BaseModel):
    """A section of a configuration: refuses unknown keys, and is immutable."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


def did_you_mean(name: str, names: Iterable[str]) -> str:
    """A phrase that suggests the nearest of ``names`` for an unknown name; "" if none is near."""
    near = get_close_matches(name, sorted(names), n=1, cutoff=0.75)
    return f"; did you mean {near[0]!r}?" if near else ""


def sentence(error: ValidationError, section: type[BaseModel] | None = None) -> str:
    """The first problem as a sentence: field, value, and what is wrong. Unknown keys are compared with those of ``section``."""
    first = error.errors()[0]
    places = [tuple(str(part) for part in each["loc"] if not str(part).startswith(UNION_PARTS)) for each in error.errors()]
    where = ".".join(places[0])
    if first["type"] in ("extra_forbidden", "invalid_key"):
        near = did_you_mean(str(first["loc"][-1]), _keys(section, first["loc"][:-1]))
        return f"{where} is not a known key{near or '; remove it or correct its spelling'}"
    if first["type"] == "missing":
        return f"{where} is missing; add it"
    value, message = first["input"], first["msg"].removeprefix("Value error, ")
    for pattern, word in WORDS.items():
        message = re.sub(pattern, word, message)
    shown = f" is {value!r}" if isinstance(value, str | int | float | bool | None) else ""
    others = {place for place in places if place != places[0][: len(place)]}  # a list of wrong items counts as too short, too
    more = f" (and {len(others)} more)" if others else ""
    return f"{where}{shown}: {message[0].lower()}{message[1:]}{more}".removeprefix(": ")


def _keys(section: type[BaseModel] | None, path: Sequence[int | str]) -> Iterable[str]:
    inner = section
    for part in path:
        if inner is not None and part in inner.model_fields:
            inner = next(_sections(inner.model_fields[str(part)].annotation), None)
    return () if inner is None else inner.model_fields


def _sections(kind: Any) -> Iterator[type[BaseModel]]:
    """The sections in the type of a field, such as a list of them."""
    if isinstance(kind, type) and issubclass(kind, BaseModel):
        yield kind
    for part in get_args(kind):
        yield from _sections(part)
