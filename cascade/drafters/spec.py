"""Which drafters a tier has, as configurations and programs name them."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from cascade.drafters.registry import ANY_HEAD, AUTO, EXIT, KINDS, load
from cascade.errors import ConfigError
from cascade.scorer import Drafter

Encode = Callable[[str], Sequence[int]]  # token ids of a text


@dataclass(frozen=True, slots=True)
class DrafterSpec:
    """One drafter. Raises `ConfigError`."""

    kind: str
    source: str = ""  # of a corpus a file of plain text, of a head a path or hub id
    layers: int | None = None  # of "exit", which runs the first so many of its model

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ConfigError(f"drafter.kind is {self.kind!r}: it must be one of {', '.join((AUTO, *KINDS))}")
        kind = KINDS[self.kind]
        if kind.source and not self.source and not kind.within:
            raise ConfigError(f"drafter of kind {self.kind!r} needs a source: {kind.source}")
        if self.source and not kind.source:
            raise ConfigError(f"drafter.source is {self.source!r}, but {self.kind!r} reads no file: remove it")
        if self.layers is not None and self.kind != EXIT:
            raise ConfigError(f"drafter.layers is {self.layers}, but {self.kind!r} runs no layers of its model: remove it")
        if self.kind == EXIT and (self.layers or 0) < 1:
            raise ConfigError(f"drafter.layers is {self.layers}: name how many of the first layers 'exit' runs, 1 or more")

    @property
    def reads(self) -> bool:
        """Whether it reads the model: it is made for one, and lives in its passes."""
        return KINDS[self.kind].reads

    @property
    def within(self) -> bool:
        return KINDS[self.kind].within and not self.source


DEFAULT = (DrafterSpec("suffix"),)


def specs(chosen: "str | DrafterSpec | Iterable[str | DrafterSpec] | None") -> tuple[DrafterSpec, ...]:
    """Drafters by their kinds, ``"auto"`` for `DEFAULT`, or none; raises `ConfigError`."""
    if chosen is None:
        return ()
    if isinstance(chosen, str | DrafterSpec):
        chosen = (chosen,)
    found: list[DrafterSpec] = []
    for one in chosen:
        found += DEFAULT if one == AUTO else [one if isinstance(one, DrafterSpec) else DrafterSpec(one)]
    kinds = [one.kind for one in found]
    if twice := next((kind for kind in kinds if kinds.count(kind) > 1), None):
        raise ConfigError(f"drafter names {twice!r} twice: once is enough")
    if len(heads := [one.kind for one in found if one.reads]) > 1:
        raise ConfigError(f"drafter names {' and '.join(heads)}: a model has one drafter that reads it")
    return tuple(found)


def source_and_kind(chosen: Iterable[DrafterSpec]) -> tuple[str | None, str, int | None]:
    """Of the one that reads the model, and the layers that it runs; "auto" where its files say the kind."""
    head = head_of(chosen)
    if head is None:
        return None, AUTO, None
    return head.source, AUTO if head.kind == ANY_HEAD else head.kind, head.layers


def head_of(chosen: Iterable[DrafterSpec]) -> DrafterSpec | None:
    """The one that reads the model."""
    return next((one for one in chosen if one.reads), None)


def check_drafters(kinds: Iterable[str], tiers: Sequence[str]) -> None:
    """Raise `ConfigError` if one is named like a tier."""
    if common := {*kinds} & {*tiers}:
        raise ConfigError(f"a tier is named {common.pop()!r}, as one of its drafters is: give it another name")


def make(chosen: Sequence[DrafterSpec], kinds: Sequence[str], encode: Encode | None, guess_cost: float = 0.0) -> list[Drafter]:
    """The drafters of a tier; ``kinds`` are those of all tiers, in the order of levels. Raises `ConfigError`.

    ``guess_cost`` is that of the one that reads the model, see `cascade.drafters.in_pass.InPass`.
    """
    from cascade.drafters.in_pass import InPass

    made: list[Drafter] = []
    for spec in chosen:
        level = kinds.index(spec.kind)
        if spec.reads:
            made.append(InPass(spec.kind, level, cost=guess_cost))
        else:
            made.append(load(spec.kind)(level, *([_read(spec.source, encode)] if spec.source else [])))
    return made


def _read(source: str, encode: Encode | None) -> Sequence[int]:
    if encode is None:
        raise ConfigError("drafter of kind 'corpus' needs the tokenizer of its tier, which cannot be loaded")
    try:
        text = Path(source).read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"drafter.source is {source!r}, which cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"drafter.source is {source!r}, which is no text in UTF-8") from None
    tokens = encode(text)
    if not tokens:
        raise ConfigError(f"drafter.source is {source!r}, which is empty")
    return tokens
