"""Guesses that need no tier below: drafters that live inside a tier and read its texts, or its model's hidden states.

This module makes the drafters of a tier from the names in configurations and programs.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from pkgutil import resolve_name

from cascade.drafters.in_pass import InPass
from cascade.errors import ConfigError
from cascade.scorer import Drafter

AUTO = "auto"  # stands for `DEFAULT`
CORPUS = "corpus"
TEXT = {  # drafters that read texts: their classes, imported when one is made
    "suffix": "cascade.drafters.matching:Suffix",
    CORPUS: "cascade.drafters.matching:Corpus",
    "lookahead": "cascade.drafters.lookahead:Lookahead",
}
WITHIN = "mtp"  # a head whose weights are among the model's
HEADS = ("eagle3", "eagle", "medusa", WITHIN)  # vLLM's names of heads, which read the model's hidden states in its passes
KINDS = (*TEXT, *HEADS)
SOURCES = {CORPUS: "the path of a text file"} | {kind: "the path or hub id of its weights" for kind in HEADS if kind != WITHIN}

Encode = Callable[[str], Sequence[int]]  # token ids of a text


@dataclass(frozen=True, slots=True)
class DrafterSpec:
    """One drafter. Raises `ConfigError`."""

    kind: str
    source: str = ""  # a corpus's file of plain text; the path or hub id of a head's weights

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ConfigError(f"drafter.kind is {self.kind!r}: it must be one of {', '.join((AUTO, *KINDS))}")
        if self.kind in SOURCES and not self.source:
            raise ConfigError(f"drafter of kind {self.kind!r} needs a source: {SOURCES[self.kind]}")
        if self.source and self.kind not in SOURCES:
            raise ConfigError(f"drafter.source is {self.source!r}, but {self.kind!r} needs none: remove it")

    @property
    def reads(self) -> bool:
        """Whether it is a head: it reads the hidden states of one model, inside that model's passes."""
        return self.kind not in TEXT


DEFAULT = (DrafterSpec("suffix"),)


def specs(chosen: "str | DrafterSpec | Iterable[str | DrafterSpec] | None") -> tuple[DrafterSpec, ...]:
    """Drafters by their kinds, ``"auto"`` for `DEFAULT`, or none; raises `ConfigError`."""
    if chosen is None:
        return ()
    if isinstance(chosen, str | DrafterSpec):
        chosen = (chosen,)
    listed: list[DrafterSpec] = []
    for drafter in chosen:
        listed += DEFAULT if drafter == AUTO else [drafter if isinstance(drafter, DrafterSpec) else DrafterSpec(drafter)]
    kinds = [drafter.kind for drafter in listed]
    if twice := next((kind for kind in kinds if kinds.count(kind) > 1), None):
        raise ConfigError(f"drafter names {twice!r} twice: once is enough")
    if len(heads := [drafter.kind for drafter in listed if drafter.reads]) > 1:
        raise ConfigError(f"drafter names {' and '.join(heads)}: a model has one drafter that reads it")
    return tuple(listed)


def head_of(chosen: Iterable[DrafterSpec]) -> DrafterSpec | None:
    """The head among the drafters, if there is one."""
    return next((drafter for drafter in chosen if drafter.reads), None)


def check_drafters(kinds: Iterable[str], tiers: Sequence[str]) -> None:
    """Raise `ConfigError` if a drafter and a tier have the same name."""
    if common := {*kinds} & {*tiers}:
        raise ConfigError(f"a tier is named {common.pop()!r}, as one of its drafters is: give it another name")


def make(chosen: Sequence[DrafterSpec], kinds: Sequence[str], encode: Encode | None) -> list[Drafter]:
    """Make the drafters of a tier; ``kinds`` are those of all tiers, in the order of levels. Raises `ConfigError`."""
    made: list[Drafter] = []
    for spec in chosen:
        level = kinds.index(spec.kind)
        if spec.reads:
            made.append(InPass(spec.kind, level))
        else:
            made.append(resolve_name(TEXT[spec.kind])(level, *([_read(spec.source, encode)] if spec.source else [])))
    return made


def _read(source: str, encode: Encode | None) -> Sequence[int]:
    if encode is None:
        raise ConfigError("drafter of kind 'corpus' needs the tokenizer of its tier, which cannot be loaded")
    try:
        text = Path(source).read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"drafter.source is {source!r}, which cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"drafter.source is {source!r}, which is not text in UTF-8") from None
    tokens = encode(text)
    if not tokens:
        raise ConfigError(f"drafter.source is {source!r}, which is empty")
    return tokens
