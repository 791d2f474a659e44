"""Every error has a status of its own, and the client knows every one."""

import pytest

from cascade import errors
from cascade.client.connection import ERRORS
from cascade.errors import CascadeError, Overloaded
from deployments.gateway.admission.status import refusal

KINDS = {kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, CascadeError)}


def test_every_error_has_its_own_row() -> None:
    """Guards against errors that fall through to INTERNAL, or to a row above their own."""
    for kind in KINDS:
        assert refusal(kind("why")).status.kind is kind


@pytest.mark.parametrize("kind", sorted(KINDS, key=lambda kind: kind.__name__))
def test_client_raises_what_the_server_raised(kind: type[CascadeError]) -> None:
    """Guards the way there and back: the client's class is the server's, or the nearest that gRPC's statuses tell apart."""
    assert issubclass(kind, ERRORS.get(refusal(kind("why")).status.grpc, CascadeError))


def test_bugs_are_not_told() -> None:
    """Guards against what an exception's text may hold: paths, prompts, code."""
    refused = refusal(RuntimeError("secret in /etc/passwd"))
    assert "secret" not in str(refused.body)
    assert refused.status.http == 500


def test_overloaded_says_when() -> None:
    """Guards Retry-After: whole seconds, at least the time that is needed."""
    assert refusal(Overloaded("full", 1.2)).metadata == (("retry-after", "2"),)
