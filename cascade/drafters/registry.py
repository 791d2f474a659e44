"""All kinds of drafters, by the names that configurations give them: a new one is a file and a line here."""

from importlib import import_module
from typing import Any, NamedTuple

AUTO = "auto"  # what nobody has to think about
ANY_HEAD = "head"  # of which kind its files say
EXIT = "exit"  # runs some of the model's own layers


class Kind(NamedTuple):
    """Where the class of a drafter is, which is loaded when one is made, and what it asks for."""

    module: str
    name: str
    source: str = ""  # what its source is, if it has one
    within: bool = False  # lies in the model's own checkpoint unless a source is named
    at_once: bool = False  # makes all its guesses in one step
    reads: bool = True  # the model's hidden states, in its passes


WEIGHTS = "the path or hub id of its weights"
TEXT = {
    "lookup": Kind("cascade.drafters.matching", "Lookup", reads=False),
    "suffix": Kind("cascade.drafters.matching", "Suffix", reads=False),
    "corpus": Kind("cascade.drafters.matching", "Corpus", "the path of a text file", reads=False),
}
HEADS = {
    "medusa": Kind("cascade.engine.heads.medusa", "Medusa", WEIGHTS),
    "eagle": Kind("cascade.engine.heads.eagle", "Eagle", WEIGHTS),
    "eagle3": Kind("cascade.engine.heads.eagle", "Eagle3", WEIGHTS),
    "peagle": Kind("cascade.engine.heads.peagle", "Peagle", WEIGHTS, at_once=True),
    "dflash": Kind("cascade.engine.heads.dflash", "DFlash", WEIGHTS, at_once=True),
    "dspark": Kind("cascade.engine.heads.dspark", "DSpark", WEIGHTS, at_once=True),
    "mtp": Kind("cascade.engine.heads.mtp", "Mtp", WEIGHTS, within=True),
}
KINDS = TEXT | {ANY_HEAD: Kind("cascade.engine.heads.head", "Head", WEIGHTS)} | HEADS
KINDS |= {EXIT: Kind("cascade.engine.heads.exit", "Exit")}


def load(kind: str) -> Any:
    """The class of a kind of drafters."""
    return getattr(import_module(KINDS[kind].module), KINDS[kind].name)
