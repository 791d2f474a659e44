"""Which cases of a law are tried by default, and which by `make test-all` alone."""

from collections.abc import Mapping
from typing import Any

import pytest


def crossed(rows: Mapping[str, Any], columns: Mapping[str, Any]) -> list[Any]:
    """Every row with every column; by default each row with one column, in turn, so that each of both is tried."""
    return [
        pytest.param(row, column, id=f"{name}-{other}", marks=() if at == turn % len(columns) else pytest.mark.slow)
        for turn, (name, row) in enumerate(rows.items())
        for at, (other, column) in enumerate(columns.items())
    ]


def rare(*values: Any, **options: Any) -> Any:
    """A case that is tried by `make test-all` alone."""
    return pytest.param(*values, marks=pytest.mark.slow, **options)
