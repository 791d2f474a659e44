"""One server for the tests that need no other configuration."""

from collections.abc import Iterator

import pytest

from tests.doors import House, house


@pytest.fixture(scope="package")
def served() -> Iterator[House]:
    with house(pass_s=0.003) as built:
        yield built
        built.settle()
