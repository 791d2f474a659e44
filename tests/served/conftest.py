"""The small models, served: behind doors of its own, and behind Ray Serve's proxies."""

from collections.abc import Iterator

import pytest

from cascade import Cascade
from cascade.settings.config import CascadeConfig
from deployments.ops.launch import Server
from tests import small
from tests.conftest import Cluster
from tests.links.certificates import Authority

MOST_RUNNING = 20  # answers that everybody together may have at once


@pytest.fixture(scope="package")
def server(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Three tiers joined by TLS, of whose full one there are two replicas, after two routers that share their ports."""
    values = small.config().model_dump(mode="json")
    values["link_tls"] = Authority(tmp_path_factory.mktemp("tls") / "ours").sign("process").model_dump()
    values["tiers"][-1]["deployment_config"]["num_replicas"] = 2
    values["router"]["deployment_config"]["num_replicas"] = 2
    values["router"]["access"]["default_limits"]["max_running"] = MOST_RUNNING
    values["router"]["held_lease_s"] = 1.0  # after every test is waited until nothing is held
    with Server.start(CascadeConfig.parse(values), port=0) as server:
        yield server


@pytest.fixture(scope="package")
def reference() -> Iterator[Cascade]:
    """The full model alone, in this process."""
    with small.cascade() as cascade:
        yield cascade
