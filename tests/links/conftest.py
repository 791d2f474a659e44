"""A served cascade whose links and doors speak TLS."""

from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from cascade.client import Client
from cascade.settings.config import CascadeConfig
from deployments.ops.launch import Server
from tests import small
from tests.conftest import Cluster
from tests.links.certificates import Authority
from tests.links.net import empty, net, tidy  # noqa: F401  # fixtures of all files here


@dataclass(frozen=True)
class Secure:
    """A server, and the file of the authority that its clients trust."""

    server: Server
    authority: str

    def client(self) -> Client:
        return Client(self.server.address.replace("127.0.0.1", "localhost"), authority=self.authority)


@pytest.fixture(scope="package")
def secure(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Secure]:
    """Prompt lookup inside tiny and full."""
    ours = Authority(tmp_path_factory.mktemp("secure") / "ours")
    values = small.config().model_dump(mode="json")
    del values["tiers"][1]
    for tier in values["tiers"]:
        tier["engine_kwargs"]["drafter"] = "lookup"
    door = ours.sign("door", name="localhost")
    values["link_tls"] = ours.sign("process").model_dump()
    values["router"]["listen"] = {"tls": {"certificate": door.certificate, "key": door.key}}
    with Server.start(CascadeConfig.parse(values), port=0) as server:
        yield Secure(server, door.authority)
