"""Which drafters a tier has, as configurations and programs name them."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from cascade.errors import ConfigError
from cascade.scorer import Drafter

AUTO = "auto"  # what nobody has to think about
KINDS = ("lookup", "suffix", "recycling", "corpus")
HEADS = (
    "head",
    "medusa",
    "eagle",
    "eagle3",
    "mtp",
    "dflash",
    "dspark",
)  # read the model: of the first the files say which it is
WITHIN = ("mtp",)  # of these: lie in the model's own checkpoint unless a source is named
Encode = Callable[[str], Sequence[int]]  # token ids of a text


@dataclass(frozen=True, slots=True)
class DrafterSpec:
    """One drafter. Raises `ConfigError`."""

    kind: str
    source: str = ""  # of a corpus a file of plain text, of a head a path or hub id

    def __post_init__(self) -> None:
        if self.kind not in (*KINDS, *HEADS):
            raise ConfigError(f"drafter.kind is {self.kind!r}: it must be one of {', '.join((AUTO, *KINDS, *HEADS))}")
        if self.kind == "corpus" and not self.source:
            raise ConfigError("drafter of kind 'corpus' needs a source: the path of a text file")
        if self.reads and not self.source and self.kind not in WITHIN:
            raise ConfigError(f"drafter of kind {self.kind!r} needs a source: the path or hub id of its weights")
        if self.source and not self.reads and self.kind != "corpus":
            raise ConfigError(f"drafter.source is {self.source!r}, but {self.kind!r} reads no file: remove it")

    @property
    def reads(self) -> bool:
        """Whether it reads the model: it is made for one, and lives in its passes."""
        return self.kind in HEADS

    @property
    def within(self) -> bool:
        """Whether it lies in its model's own checkpoint."""
        return self.kind in WITHIN and not self.source


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


def source_and_kind(chosen: Iterable[DrafterSpec]) -> tuple[str | None, str]:
    """Of the one that reads the model, for `cascade.engine.model.Model.drafting`: "auto" where its files say the kind."""
    head = head_of(chosen)
    return (None, AUTO) if head is None else (head.source, AUTO if head.kind == HEADS[0] else head.kind)


def head_of(chosen: Iterable[DrafterSpec]) -> DrafterSpec | None:
    """The one that reads the model."""
    return next((one for one in chosen if one.reads), None)


def check_drafters(kinds: Iterable[str], tiers: Sequence[str]) -> None:
    """Raise `ConfigError` if one is named like a tier."""
    if common := {*kinds} & {*tiers}:
        raise ConfigError(f"a tier is named {common.pop()!r}, as one of its drafters is: give it another name")


def make(chosen: Sequence[DrafterSpec], kinds: Sequence[str], encode: Encode | None) -> list[Drafter]:
    """The drafters of a tier; ``kinds`` are those of all tiers, in the order of levels. Raises `ConfigError`."""
    from cascade.drafters.in_pass import InPass
    from cascade.drafters.matching import Corpus, Lookup, Suffix  # compiles kernels, which who only names drafters needs not
    from cascade.drafters.recycling import Recycling

    made: list[Drafter] = []
    for spec in chosen:
        level = kinds.index(spec.kind)
        match spec.kind:
            case "lookup":
                made.append(Lookup(level))
            case "suffix":
                made.append(Suffix(level))
            case "recycling":
                made.append(Recycling(level))
            case "corpus":
                made.append(Corpus(level, _read(spec.source, encode)))
            case head:
                made.append(InPass(head, level))
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
