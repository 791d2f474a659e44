"""Bare machines: the packages of the release, and the units of systemd."""

import configparser
import shlex
import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from ray.scripts.scripts import cli as ray_command

from cascade.errors import Unauthenticated
from deployments.gateway.admission.access import REQUIRED, Access
from deployments.versions import PACKAGES
from tests.nodes.nodes import KEEPALIVE

ROOT = Path(__file__).parents[2]
SYSTEMD = ROOT / "cluster" / "systemd"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def test_constraints_pin_what_the_package_needs() -> None:
    """Guards nodes that are installed a week apart: all that is needed is named, once, in a version that the package takes."""
    lines = [line for line in (ROOT / "cluster" / "constraints.txt").read_text().splitlines() if not line.startswith("#")]
    pins = {one.name: str(one.specifier).removeprefix("==") for one in map(Requirement, lines)}
    assert len(pins) == len(lines)
    extras = [need for extra in ("quantization", "vllm") for need in PROJECT["optional-dependencies"][extra]]
    for need in map(Requirement, (*PROJECT["dependencies"], *extras)):
        assert need.specifier.contains(pins[canonicalize_name(need.name)]), need
    assert set(PACKAGES) - {PROJECT["name"]} <= pins.keys()  # which nodes compare


@pytest.mark.parametrize("name", ["head", "worker"])
def test_units_start_ray(name: str) -> None:
    """Guards units whose commands Ray does not know; each port that a firewall must name is said, once."""
    unit = configparser.ConfigParser(interpolation=None)
    unit.optionxform = str  # type: ignore[assignment]  # as systemd, which tells small letters from large ones
    unit.read(SYSTEMD / f"cascade-{name}.service")
    service = unit["Service"]
    program, start, *arguments = shlex.split(service["ExecStart"].replace("${HEAD}", "10.0.0.4"))
    assert (program, start) == ("/opt/cascade/bin/ray", "start")
    said = ray_command.commands[start].make_context(start, arguments).params
    assert said["block"]  # else systemd takes it for dead
    assert said["head"] == (name == "head")
    ports = [int(said[key]) for key in ("node_manager_port", "object_manager_port", "runtime_env_agent_port")]
    assert sorted(ports) == [6380, 6381, 6382]
    assert int(service["TimeoutStopSec"]) > 120
    assert unit["Install"]["WantedBy"] == "multi-user.target"


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd is not installed")
@pytest.mark.parametrize("name", ["head", "worker"])
def test_systemd_takes_the_units(name: str) -> None:
    """Guards units against settings that systemd ignores with a word in its journal; here lacks only the program."""
    unit = str(SYSTEMD / f"cascade-{name}.service")
    said = subprocess.run(["systemd-analyze", "verify", unit], capture_output=True, text=True, check=False)
    told = [line for line in said.stderr.splitlines() if "/opt/cascade/bin/ray is not executable" not in line]
    assert told == []


def test_the_environment_keeps_strangers_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards clusters that are open because one line is wrong: Ray wants its token, routers a key; the key is one."""
    lines = (line.partition("=") for line in (SYSTEMD / "ray.env").read_text().splitlines() if not line.startswith("#"))
    said = {name: value for name, _, value in lines}
    assert said["RAY_AUTH_MODE"] == "token"
    assert said[REQUIRED] == "1"
    assert KEEPALIVE.items() <= said.items()
    from cascade.settings.router import AccessConfig

    monkeypatch.setenv("CASCADE_API_KEYS", said["CASCADE_API_KEYS"])
    with pytest.raises(Unauthenticated):
        Access(AccessConfig()).account(None)
