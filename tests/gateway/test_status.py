"""Every error has a status of its own, and the client knows every one."""

import pytest

from cascade.client.connection import ERRORS
from cascade.errors import KINDS, CascadeError, Overloaded
from deployments.gateway.admission.status import refusal


def test_every_error_has_its_own_code() -> None:
    """Guards against errors that are told as the class they derive from."""
    assert len({kind.code for kind in KINDS}) == len(KINDS)
    for kind in KINDS:
        assert refusal(kind("why")).body["error"]["code"] == kind.code


@pytest.mark.parametrize("kind", KINDS)
def test_client_raises_what_the_server_raised(kind: type[CascadeError]) -> None:
    """Guards the way there and back: the client's class is the server's, or the nearest that gRPC's statuses tell apart."""
    assert issubclass(kind, ERRORS.get(refusal(kind("why")).kind.grpc, CascadeError))


def test_bugs_are_not_told() -> None:
    """Guards against what an exception's text may hold: paths, prompts, code."""
    refused = refusal(RuntimeError("secret in /etc/passwd"))
    assert "secret" not in str(refused.body)
    assert refused.kind.http == 500


def test_overloaded_says_when() -> None:
    """Guards Retry-After: whole seconds, at least the time that is needed."""
    assert refusal(Overloaded("full", 1.2)).metadata == (("retry-after", "2"),)
