"""Guesses that need no tier below: drafters that live inside a tier and look at what texts have said."""

from cascade.drafters.registry import AUTO, EXIT, TEXT
from cascade.drafters.spec import DEFAULT, DrafterSpec, check_drafters, head_of, make, source_and_kind, specs

__all__ = ["AUTO", "DEFAULT", "EXIT", "TEXT", "DrafterSpec", "check_drafters", "head_of", "make", "source_and_kind", "specs"]
