"""How tests share a machine and a cluster, and how many cases they try."""

import os
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from hypothesis import settings

# which begin after Ray's: what takes long and comes last has one process wait for the other
LONGEST = (
    *("test_page", "test_cli", "test_local", "test_gguf", "test_alignment", "test_layers", "test_loading", "test_pass"),
    *("test_tools", "test_thoughts", "test_chat", "test_gpu_programme", "test_heads"),
)
FAKE_GPUS = 4  # that Ray is told of, for emulated devices

# a shell lets what it starts with `&` ignore Ctrl-C, and so do the processes that tests start
signal.signal(signal.SIGINT, signal.default_int_handler)

settings.register_profile("quick", deadline=None, derandomize=True, max_examples=30)
settings.register_profile("thorough", deadline=None, derandomize=True, max_examples=60)
settings.load_profile("quick")  # before pytest heeds --hypothesis-profile


@pytest.hookimpl(tryfirst=True)  # before xdist reads the groups
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """A file's tests stay together, for they share what it sets up; so do all that need Ray. The longest begin."""
    for item in items:
        if "cluster" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.xdist_group("ray"))
        elif item.get_closest_marker("xdist_group") is None:
            item.add_marker(pytest.mark.xdist_group(item.path.stem))
    items.sort(key=_turn)


def pytest_collection_finish(session: pytest.Session) -> None:
    """Guards the groups: without them two processes start a Ray each, and every fixture of a file is made twice."""
    grouped = session.config.getoption("loadgroup", False)
    if grouped and not all("@" in item.nodeid for item in session.items):
        raise pytest.UsageError(
            "this pytest-xdist cannot keep tests together with this pytest: take the versions of pyproject.toml"
        )


def _turn(item: pytest.Item) -> int:
    marker = item.get_closest_marker("xdist_group")
    group = "" if marker is None else marker.args[0]
    order = ("ray", *LONGEST)
    return order.index(group) if group in order else len(order)


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """Products in one thread: of so little work several would only wait for each other."""
    import torch  # not every process of tests needs it

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def small_demo(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small models in place of the demonstration family, in this process."""
    from cascade import family  # not every process of tests needs them
    from tests import small

    monkeypatch.setattr(family, "WEIGHTS", Path(small.head()).parent)
    monkeypatch.setenv(family.VARIABLE, small.paths()[-1])


@pytest.fixture
def always_draft(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiers of this process draft whether that pays or not: of small models on a busy machine it does not."""
    from cascade.planner.chains import Planner  # not every process of tests needs it

    monkeypatch.setattr(Planner, "chain", lambda self, allowed, *load, **kind: allowed)


@dataclass(frozen=True)
class Cluster:
    """A Ray with a Serve: addresses of its gRPC and its HTTP proxy."""

    grpc: str
    url: str


@pytest.fixture(scope="session")
def cluster() -> Iterator[Cluster]:
    """One Ray for all tests of served systems, started by the first of them; `Server.start` joins it."""
    import ray  # not every process of tests needs it
    from ray import serve
    from ray.serve.config import HTTPOptions, ProxyLocation, gRPCOptions

    from deployments.gateway.grpc.ingress import SERVICER
    from deployments.ops.launch import LOOPBACK, _start_ray, free_port

    grpc_port, http_port = free_port(), free_port()
    os.environ.setdefault("RAY_metrics_report_interval_ms", "2000")  # tests of metrics wait for several reports
    _start_ray(FAKE_GPUS)
    try:
        serve.start(
            proxy_location=ProxyLocation.EveryNode,
            http_options=HTTPOptions(host=LOOPBACK, port=http_port),
            grpc_options=gRPCOptions(port=grpc_port, grpc_servicer_functions=[SERVICER]),
            logging_config={"enable_access_log": False, "log_level": "WARNING"},
        )
        yield Cluster(f"{LOOPBACK}:{grpc_port}", f"http://{LOOPBACK}:{http_port}")
    finally:
        serve.shutdown()
        ray.shutdown()
