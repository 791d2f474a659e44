"""Workers that are forks: what they inherit, when they are not, and that the server ends with its owner."""

import json
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from cascade.settings.config import CascadeConfig
from deployments.app import forked
from deployments.launch.fork_server import ForkServer
from tests import small

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="forks are for Linux")

WORKER = """
import json, os, sys
print(json.dumps([sys.argv[1:], os.environ.get("OURS"), os.environ.get("THEIRS"), os.getcwd(), os.getpid(), os.getppid(),
    "torch" in sys.modules, "ray" in sys.modules, __name__, os.getpgid(0), os.getsid(0)]))
"""
OWNER = """
import os
from deployments.launch.fork_server import ForkServer
server = ForkServer({})
print(server._process.pid, server._folder, flush=True)
os._exit(1)  # as if killed
"""


@pytest.fixture
def server() -> Iterator[ForkServer]:
    server = ForkServer({"OURS": "fork server"})
    yield server
    server.close()


def worker(server: ForkServer, folder: Path) -> list[object]:
    """What a worker says that Ray starts as it does: by a shell, in an environment of its own."""
    script = folder / "worker.py"
    script.write_text(WORKER)
    command = f"exec {server.py_executable} {shlex.join([str(script), 'a b', '--c=d'])}"
    bash, environment = ["/bin/bash", "-c", command], {"THEIRS": "raylet", "PATH": ""}
    said = subprocess.run(bash, env=environment, cwd=folder, capture_output=True, check=True, timeout=120)
    found: list[object] = json.loads(said.stdout)
    return found


def test_forks_are_workers_that_have_imported(server: ForkServer, tmp_path: Path) -> None:
    """Guards the start of servers, four imports of PyTorch long; Ray, which hangs where it was imported before a fork; other
    replicas, for Ray ends the process group of one that has died; and first tokens, which waited 100 ms while tiers in
    sessions of their own filled the processors, see `autogroup` in sched(7)."""
    arguments, ours, theirs, folder, pid, parent, torch, ray, name, group, session = worker(server, tmp_path)
    assert (arguments, ours, theirs, folder, name) == (["a b", "--c=d"], None, "raylet", str(tmp_path), "__main__")
    assert (parent, torch, ray) == (server._process.pid, True, False)
    assert group == pid
    assert session == os.getsid(0)
    assert worker(server, tmp_path)[4] != pid


def test_workers_start_without_the_server(server: ForkServer, tmp_path: Path) -> None:
    """Guards replicas that Serve starts anew when the fork server has died: they waited for it."""
    server._process.kill()
    server._process.wait()
    arguments, *_, torch, _, name, _, _ = worker(server, tmp_path)
    assert (arguments, torch, name) == (["a b", "--c=d"], False, "__main__")


def test_the_server_ends_with_its_owner() -> None:
    """Guards a machine against what a killed `cascade serve` leaves behind: a process and its socket."""
    said = subprocess.run([sys.executable, "-c", OWNER], capture_output=True, text=True, check=False, timeout=60).stdout
    pid, folder = said.split()
    deadline = time.monotonic() + 120
    while psutil.pid_exists(int(pid)) or Path(folder).exists():
        assert time.monotonic() < deadline
        time.sleep(0.1)


def test_forks_are_for_cpus() -> None:
    """Guards replicas on GPUs, where CUDA must not be touched before a fork, and a `runtime_env` that forks would ignore."""
    values = small.config().model_dump(mode="json")
    values["tiers"][0]["deployment_config"]["ray_actor_options"] = {"num_gpus": 0.5}
    values["tiers"][1]["deployment_config"]["ray_actor_options"] = {"runtime_env": {"env_vars": {"A": "b"}}}
    config = forked(CascadeConfig.parse(values), "fork")
    options = [owner.deployment_config.ray_actor_options for owner in (*config.tiers, config.router)]
    assert options == [
        {"num_gpus": 0.5},
        {"runtime_env": {"env_vars": {"A": "b"}}},
        {**small.config().tiers[2].deployment_config.ray_actor_options, "runtime_env": {"py_executable": "fork"}},
        {"runtime_env": {"py_executable": "fork"}},
    ]


def test_emulated_devices_are_no_gpus() -> None:
    """Guards starts of emulated clusters: GPUs that are not there are no reason to import everything eight times."""
    values = small.config().model_dump(mode="json")
    for tier in values["tiers"]:
        tier["engine_kwargs"]["emulated"] = {"pass_ms": {1: 1.0}}
        tier["deployment_config"]["ray_actor_options"] = {"num_gpus": 1}
    config = forked(CascadeConfig.parse(values), "fork")
    options = [tier.deployment_config.ray_actor_options for tier in config.tiers]
    assert options == [{"num_gpus": 1, "runtime_env": {"py_executable": "fork"}}] * 3
