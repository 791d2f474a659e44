"""Ray nodes on hosts of their own."""

import pytest

from tests.nodes.network import obstacle


@pytest.fixture(scope="session")
def needs_network() -> None:
    """Skip where hosts cannot be had: who may make namespaces is root, and not in every container."""
    if why := obstacle():
        pytest.skip(f"needs root, CAP_NET_ADMIN and `ip`: {why}")
