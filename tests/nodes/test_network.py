"""The network that tests of several nodes stand on."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.nodes.network import BRIDGE, SUBNET, Network

SERVE = "import socket; s = socket.create_server(('0.0.0.0', 7000)); print('up', flush=True)\nwhile True: s.accept()"
KNOCK = """
import socket, sys
try:
    socket.create_connection((sys.argv[1], 7000), float(sys.argv[2])).close()
    print("through")
except TimeoutError:
    pass
"""
MAKE = """
from tests.nodes.network import Network
network = Network()
print(network.add("one", 1).pid, network.outside.pid, flush=True)
input()
"""


@pytest.fixture
def network(needs_network: None) -> Iterator[Network]:
    """Two hosts that listen."""
    with Network() as network:
        for number, name in enumerate(("one", "two"), 1):
            host = network.add(name, number)
            process = host.keep([sys.executable, "-c", SERVE])
            assert process.stdout is not None
            assert process.stdout.readline() == "up\n"
        yield network


def reaches(network: Network, one: str, other: str, timeout_s: float = 10.0) -> bool:
    """Whether a process on a host gets through to another."""
    said = network.hosts[one].run([sys.executable, "-c", KNOCK, network.hosts[other].address, str(timeout_s)])
    return said == "through\n"


def test_what_is_cut_hears_nothing_until_it_is_healed(network: Network) -> None:
    """Guards partitions that are none, or that are heard of: both ways, silently, and the others go on."""
    network.add("three", 3)
    assert reaches(network, "one", "two")
    network.cut("one", "two")
    assert not reaches(network, "one", "two", 0.5)
    assert not reaches(network, "two", "one", 0.5)
    assert reaches(network, "three", "two")
    network.heal("one", "two")
    assert reaches(network, "one", "two")
    assert reaches(network, "two", "one")


def test_a_killed_host_leaves_nothing(network: Network) -> None:
    """Guards this machine: processes of a host that is killed are gone, and another one has its name and address."""
    left = network.hosts["two"].processes()
    assert len(left) >= 2
    network.remove("two")
    assert not any(psutil.pid_exists(process.pid) for process in left)
    host = network.add("two", 2)
    assert (network.folder("two") / "mark").write_text("x")
    assert host.run(["cat", str(network.shared / "mark")]) == "x"
    seen = psutil.net_if_addrs()
    assert BRIDGE not in seen
    assert not any(end.address.startswith(f"{SUBNET}.") for ends in seen.values() for end in ends)


def test_hosts_end_with_whoever_made_them(needs_network: None, tmp_path: Path) -> None:
    """Guards this machine against hosts of tests that are killed."""
    maker = subprocess.Popen(
        [sys.executable, "-c", MAKE],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "TMPDIR": str(tmp_path)},
    )
    assert maker.stdin is not None
    assert maker.stdout is not None
    with maker.stdin, maker.stdout as told:
        firsts = [psutil.Process(int(pid)) for pid in told.readline().split()]
        maker.kill()
        maker.wait()
        _, alive = psutil.wait_procs(firsts, timeout=60)
    assert not alive
