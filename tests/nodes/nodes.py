"""A Ray cluster whose nodes have a host each, and the small models on it."""

import contextlib
import json
import os
import secrets
import socket
import subprocess
import sys
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from cascade.settings.config import CascadeConfig
from tests import small
from tests.nodes.deploy import OWN_GRPC, OWN_HTTP
from tests.nodes.network import SUBNET, Host, Network
from tests.waiting import LONG_S

Place = tuple[str, int]
ESTABLISHED = "01"
RAYS_PORTS = range(10_002, 20_000)  # of workers, unless it is told others

ROOT = Path(__file__).parents[2]
HEAD = "head"
GCS_PORT = 6379
# of Ray's agents, whose ports are given: a raylet waits 15 seconds for those that agents choose, and gives up
AGENTS = ("dashboard-agent-listen", "dashboard-agent-grpc", "metrics-export", "runtime-env-agent")
STORE_BYTES = 80 * 2**20
PASS_MS = {"tiny": 2.0, "medium": 6.0, "full": 20.0}  # at least: answers last on any machine, and leave it time
KEEPALIVE = {  # as in the files of cluster/: a connection that carries nothing is broken after some seconds, not five minutes
    "RAY_grpc_client_keepalive_time_ms": "10000",
    "RAY_grpc_client_keepalive_timeout_ms": "5000",
}
RAY = {
    **KEEPALIVE,
    "RAY_AUTH_MODE": "token",
    "RAY_worker_niceness": "0",
    "RAY_enable_worker_prestart": "0",
    "RAY_prestart_worker_first_driver": "0",
    "RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": "60",  # on a busy machine 5 seconds end before a proxy has begun
    # a node that does not answer is dead after some seconds, not a minute
    "RAY_health_check_period_ms": "1000",
    "RAY_health_check_timeout_ms": "2000",
    "RAY_health_check_failure_threshold": "3",
    "RAY_gcs_rpc_server_reconnect_timeout_s": "600",  # nodes outlive a head that is away; they would give up after 60 seconds
}
STATE = """
import json, ray
ray.init(address="auto", log_to_driver=False)
print(json.dumps({node["NodeManagerAddress"]: node["NodeID"] for node in ray.nodes() if node["Alive"]}))
"""


class Nodes:
    """Nodes by name, of which one is the `HEAD`; what a node is good for are its custom resources.

    The head keeps the cluster's state on a disk of its own (``RAY_gcs_storage``), so that it may be killed and started again.
    """

    def __init__(self, network: Network, resources: Mapping[str, Mapping[str, int]]) -> None:
        self.network = network
        self.resources = resources
        self._numbers = {name: number for number, name in enumerate(resources, 1)}
        self._python = {"PYTHONPATH": str(ROOT)}
        self._environment = {
            **RAY,
            **self._python,
            "TMPDIR": str(network.shared),  # what is left there goes with the network
            "RAY_AUTH_TOKEN": secrets.token_hex(32),
            "RAY_ADDRESS": f"{self.address(HEAD)}:{GCS_PORT}",
        }
        self.outside = Outside(network.outside, self._python)

    def address(self, name: str) -> str:
        """Of a node, whether it is there or not."""
        return f"{SUBNET}.{self._numbers[name]}"

    def router(self, name: str) -> str:
        """Where the router of a node listens for gRPC."""
        return f"{self.address(name)}:{OWN_GRPC}"

    @property
    def routers(self) -> list[str]:
        """Those of all nodes that are there and may have a router."""
        return [self.router(name) for name in self.network.hosts if "router" in self.resources[name]]

    def start(self, *names: str) -> None:
        """Start nodes, anew if they were there; the `HEAD` first, if it is one of them."""
        hosts = {name: self.network.add(name, self._numbers[name]) for name in names}
        if head := hosts.pop(HEAD, None):
            self._start_ray(head)
        with ThreadPoolExecutor() as threads:
            list(threads.map(self._start_ray, hosts.values()))

    def _start_ray(self, host: Host) -> None:
        name = host.name
        role, more = [f"--address={self.address(HEAD)}:{GCS_PORT}"], {}
        if name == HEAD:
            (self.network.folder(HEAD) / "gcs").mkdir(exist_ok=True)
            role = ["--head", f"--port={GCS_PORT}", "--include-dashboard=false", "--no-monitor"]
            more = {"RAY_gcs_storage": "rocksdb", "RAY_gcs_storage_path": str(self.network.shared / "gcs")}
        self._ray(
            host,
            "start",
            *role,
            *(f"--{owner}-port={port}" for port, owner in enumerate(AGENTS, 52365)),
            f"--node-ip-address={host.address}",
            f"--node-name={name}",
            f"--temp-dir={self.network.shared}/ray",
            f"--resources={json.dumps(self.resources[name])}",
            f"--object-store-memory={STORE_BYTES}",
            "--num-cpus=1",
            "--num-gpus=0",
            "--disable-usage-stats",
            "--include-log-monitor=false",
            **more,
        )

    def drain(self, name: str, deadline_s: int = 240) -> None:
        """Tell Ray that a node will go, at the latest when so much time is over."""
        head = self.network.hosts[HEAD]
        node_ids = json.loads(head.run([sys.executable, "-c", STATE], self._environment).splitlines()[-1])
        where = f"--address={self._environment['RAY_ADDRESS']}", f"--node-id={node_ids[self.address(name)]}"
        reason = "--reason=DRAIN_NODE_REASON_PREEMPTION", "--reason-message=a test"
        self._ray(head, "drain-node", *where, *reason, f"--deadline-remaining-seconds={deadline_s}")

    def _ray(self, host: Host, *words: str, **more: str) -> None:
        host.run([str(Path(sys.executable).parent / "ray"), *words], self._environment | more)

    def deploy(self, config: CascadeConfig) -> None:
        """Put a cascade on the cluster, also in place of the one that is there, and return when it serves."""
        process = self.network.hosts[HEAD].popen(
            [sys.executable, "-m", "tests.nodes.deploy"],
            self._environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        output, _ = process.communicate(config.model_dump_json(), timeout=LONG_S)
        assert process.returncode == 0, output

    def replicas(self, deployment: str) -> dict[int, str]:
        title = f"ServeReplica:cascade:{deployment}"  # after the actor's name, before what it does
        return {process.pid: name for name, host in self.network.hosts.items() for process in host.processes(title)}

    def joined(self, this: int, other: int) -> set[tuple[str, str]]:
        """Addresses of the connections between two processes, of both ends."""
        far = {(there, here) for here, there in _connections(other)}
        return {(here[0], there[0]) for here, there in _connections(this) if (here, there) in far}


class Outside:
    """A process with clients outside of the cluster, see `tests.nodes.crowd`."""

    def __init__(self, host: Host, environment: Mapping[str, str]) -> None:
        self._process = host.keep([sys.executable, "-m", "tests.nodes.crowd"], environment)

    def __call__(self, do: str, **arguments: Any) -> Any:
        """What a method of `tests.nodes.crowd.Servant` returns; raises `AssertionError` with what it raised."""
        self._process.stdin.write(json.dumps({"do": do, **arguments}) + "\n")
        self._process.stdin.flush()
        reply = json.loads(self._process.stdout.readline())
        assert "error" not in reply, reply["error"]
        return reply["answer"]


def family() -> CascadeConfig:
    """The small models, two full replicas and two routers, each where a node has its resource.

    Devices are emulated only for passes to be slow; the models are real.
    """
    values = small.config().model_dump(mode="json")
    for tier in values["tiers"]:
        slow = {"engine": "benchmarks.cluster.emulated:load", "emulated": {"pass_ms": {1: PASS_MS[tier["name"]]}}}
        tier["engine_kwargs"] |= slow
        tier["deployment_config"]["ray_actor_options"] = {"num_cpus": 0, "resources": {tier["name"]: 1}}
    values["tiers"][-1]["deployment_config"]["num_replicas"] = 2
    router = values["router"]
    router["listen"] = {"host": "0.0.0.0", "grpc_port": OWN_GRPC, "http_port": OWN_HTTP}
    router["deployment_config"] |= {"num_replicas": 2, "ray_actor_options": {"num_cpus": 0, "resources": {"router": 1}}}
    return CascadeConfig.parse(values)


def _connections(pid: int) -> list[tuple[Place, Place]]:
    """Both ends of each that a process has on its host, but for Ray's own; those of one that has ended are none."""
    ends, process = [], Path(f"/proc/{pid}")
    with contextlib.suppress(OSError):
        own = {os.readlink(file) for file in (process / "fd").iterdir()}
        for line in (process / "net/tcp6").read_text().splitlines()[1:]:  # gRPC's, with addresses of IPv4 in them
            _, here, there, state, *_, inode = line.split()[:10]
            if state == ESTABLISHED and f"socket:[{inode}]" in own:
                ends.append((_place(here), _place(there)))
    return [pair for pair in ends if not any(port in RAYS_PORTS for _, port in pair)]


def _place(hexadecimal: str) -> Place:
    """As the kernel writes it: an address of IPv4 in the last word, the lowest byte first."""
    address, _, port = hexadecimal.partition(":")
    return socket.inet_ntoa(bytes.fromhex(address[-8:])[::-1]), int(port, 16)
