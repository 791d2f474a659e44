"""docs/errors.md is the code's own table, and the client knows every row of it."""

from pathlib import Path

import pytest

from cascade import errors
from cascade.client.connection import ERRORS
from cascade.errors import CascadeError, Overloaded
from deployments.gateway.admission.status import STATUSES, refusal

PAGE = Path(__file__).parents[2] / "docs" / "errors.md"
KINDS = {kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, CascadeError)}


def rows() -> list[list[str]]:
    """Cells of the table's rows, without the head."""
    lines = [line for line in PAGE.read_text().splitlines() if line.startswith("| `")]
    return [[cell.strip().strip("`") for cell in line.strip("|").split("|")] for line in lines]


def test_table_is_the_codes() -> None:
    """Guards readers of the table, and clients that rely on it."""
    written = [(name, grpc, int(http), kind, code) for name, _, grpc, http, kind, code in rows()]
    assert written == [(s.kind.__name__, s.grpc.name, s.http, s.type, s.code) for s in STATUSES]


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
