"""Which cases of a law are tried by default, and which by `make test-all` alone."""

from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import settings


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


def examples(share: float) -> int:
    """So many times as many examples as the profile tries: few by default, many by `make test-all`."""
    return max(1, round(share * settings().max_examples))
