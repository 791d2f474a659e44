"""Fixtures of all files here."""

from tests.links.net import empty, net, tidy  # noqa: F401
