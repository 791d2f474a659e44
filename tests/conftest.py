"""How tests share a machine, and how many cases they try."""

import pytest
from hypothesis import settings

CLUSTERS = {"test_cli", "test_proxy", "test_ranks", "test_serve", "test_server", "test_tls"}  # that start Ray

settings.register_profile("quick", deadline=None, derandomize=True, max_examples=30)
settings.register_profile("thorough", deadline=None, derandomize=True, max_examples=200)
settings.load_profile("quick")  # before pytest heeds --hypothesis-profile


@pytest.hookimpl(tryfirst=True)  # before xdist reads the groups
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """A file's tests stay together, for they share what it sets up. One Ray at a time begins: it takes longest."""
    items.sort(key=lambda item: item.path.stem not in CLUSTERS)
    for item in items:
        file = item.path.stem
        item.add_marker(pytest.mark.xdist_group("ray" if file in CLUSTERS else file))
