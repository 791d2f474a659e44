"""The small models, served: behind servers of its own, and behind Ray Serve's proxies."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from cascade import Cascade
from cascade.settings.config import CascadeConfig
from deployments.ops.launch import Server
from tests import small
from tests.conftest import Cluster
from tests.links.certificates import Authority

LEAST_LEARNT = 72  # answers before a round of training, which begins when a test asks for it


@pytest.fixture(scope="package")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where new weights of the tiny tier are, and answers that it learns from."""
    return tmp_path_factory.mktemp("alignment")


@pytest.fixture(scope="package")
def server(cluster: Cluster, folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Three tiers joined by TLS, of whose full one there are two replicas, after two routers that share their ports.

    Its tiny tier can learn.
    """
    values = small.config().model_dump(mode="json")
    values["link_tls"] = Authority(tmp_path_factory.mktemp("tls") / "ours").sign("process").model_dump()
    values["tiers"][-1]["deployment_config"]["num_replicas"] = 2
    values["router"]["deployment_config"]["num_replicas"] = 2
    values["router"]["held_lease_s"] = 1.0  # after every test is waited until nothing is held
    learning = {"students": ["tiny"], "min_rows": LEAST_LEARNT, "every_s": 1e6, "round_s": 1.0, "canary_s": 0.0}
    values["alignment"] = {"folder": str(folder), "on_disk": True, **learning}
    values["alignment"] |= {"ray_actor_options": {"num_cpus": 0.5}}
    with Server.start(CascadeConfig.parse(values), port=0) as server:
        yield server


@pytest.fixture(scope="package")
def reference() -> Iterator[Cascade]:
    with small.cascade() as cascade:
        yield cascade
