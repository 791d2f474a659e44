"""Guesses that need no tier below: drafters that live inside a tier and look at what texts have said."""

from cascade.drafters.spec import AUTO, DEFAULT, KINDS, DrafterSpec, check_drafters, make, specs

__all__ = ["AUTO", "DEFAULT", "KINDS", "DrafterSpec", "check_drafters", "make", "specs"]
