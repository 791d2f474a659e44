"""Drafters without a model: they hold a `Session`, and answer what its text is with what it may go on like."""

from collections.abc import Callable, Mapping

from cascade.chain.local_links import Drafter
from cascade.drafters.lookup import Lookup

KINDS: Mapping[str, Callable[[str, int], Drafter]] = {"lookup": Lookup}  # by the name of a configuration; of name and level

__all__ = ["KINDS", "Lookup"]
