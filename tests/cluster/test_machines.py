"""Machines without Kubernetes: the release's packages, the units of systemd, and what Ray makes of the files of `ray up`."""

import configparser
import shlex
import shutil
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from ray.autoscaler._private.util import prepare_config, validate_config
from ray.scripts.scripts import cli as ray_command

from cascade.errors import Unauthenticated
from cascade.settings.config import CascadeConfig
from cascade.settings.router import AccessConfig
from deployments.gateway.admission.access import REQUIRED, Access
from deployments.replica import PACKAGES
from tests.cluster.demand import assert_apart, demands, nodes_for
from tests.nodes.nodes import KEEPALIVE

ROOT = Path(__file__).parents[2]
CLUSTER, SYSTEMD = ROOT / "cluster", ROOT / "cluster" / "systemd"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
PAGE = (ROOT / "docs" / "howto" / "bare-machines.md").read_text()
RAY_UP = sorted(path.stem for path in (CLUSTER / "ray-up").glob("*.yaml"))
CLOUDS = {"aws": "H100", "gcp": "A100-80G"}  # and the accelerator of the full tier there
AWS = {"m7i.2xlarge": {"CPU": 8}, "g6.2xlarge": {"CPU": 8, "GPU": 1, "accelerator_type:L4": 1}}  # what AWS says of them
AWS["p5.4xlarge"] = {"CPU": 16, "GPU": 1, "accelerator_type:H100": 1}


def test_constraints_pin_what_the_package_needs() -> None:
    """Guards nodes that are installed a week apart: all that is needed is named, once, in a version that the package takes."""
    lines = [line for line in (CLUSTER / "constraints.txt").read_text().splitlines() if not line.startswith("#")]
    pins = {requirement.name: str(requirement.specifier).removeprefix("==") for requirement in map(Requirement, lines)}
    assert len(pins) == len(lines)
    extras = [need for extra in ("quantization", "vllm") for need in PROJECT["optional-dependencies"][extra]]
    for need in map(Requirement, (*PROJECT["dependencies"], *extras)):
        assert need.specifier.contains(pins[canonicalize_name(need.name)]), need
    assert set(PACKAGES) - {PROJECT["name"]} <= pins.keys()  # which nodes compare


def taken(command: str) -> dict[str, Any]:
    """The options of a command of Ray; raises if it does not know them."""
    name, *words = shlex.split(command)
    return ray_command.commands[name].make_context(name, words).params


@pytest.mark.parametrize("name", ["head", "worker"])
def test_units_start_ray(name: str) -> None:
    """Guards units whose commands Ray does not know, or whose settings systemd ignores with a word in its journal."""
    file = SYSTEMD / f"cascade-{name}.service"
    unit = configparser.ConfigParser(interpolation=None)
    unit.optionxform = str  # as systemd, which tells small letters from large ones
    unit.read(file)
    program, _, command = unit["Service"]["ExecStart"].partition(" ")
    options = taken(command.replace("${HEAD}", "10.0.0.4"))
    assert options["block"]  # else systemd takes it for dead
    assert options["head"] == (name == "head")
    ports = [int(options[key]) for key in ("node_manager_port", "object_manager_port", "runtime_env_agent_port")]
    assert ports == [6380, 6381, 6382]
    assert int(unit["Service"]["TimeoutStopSec"]) > 120
    assert unit["Install"]["WantedBy"] == "multi-user.target"
    if shutil.which("systemd-analyze") is not None:
        verified = subprocess.run(["systemd-analyze", "verify", str(file)], capture_output=True, text=True, check=False)
        lines = verified.stderr.splitlines()
        assert [line for line in lines if f"{program} is not executable" not in line] == []  # the program alone is not here


def test_the_environment_keeps_strangers_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards clusters that are open because one line is wrong: Ray wants its token, routers a key; the key is one."""
    lines = (line.partition("=") for line in (SYSTEMD / "ray.env").read_text().splitlines() if not line.startswith("#"))
    variables = {name: value for name, _, value in lines}
    assert {"RAY_AUTH_MODE": "token", REQUIRED: "1", **KEEPALIVE}.items() <= variables.items()
    monkeypatch.setenv("CASCADE_API_KEYS", variables["CASCADE_API_KEYS"])
    with pytest.raises(Unauthenticated):
        Access(AccessConfig()).account(None)


# ray up


def read(name: str) -> dict[str, Any]:
    values: dict[str, Any] = yaml.safe_load((CLUSTER / "ray-up" / f"{name}.yaml").read_text())
    return values


@pytest.mark.parametrize("name", RAY_UP)
def test_ray_takes_the_file(name: str) -> None:
    """Guards `ray up` against keys that it refuses, and nodes without the package or with packages of another week."""
    values = read(name)
    assert values["file_mounts"] == {"~/cascade-serve": "."}
    constraint, package = "$HOME/cascade-serve/cluster/constraints.txt", "$HOME/cascade-serve[quantization]"
    assert any(f'pip install --quiet --constraint "{constraint}" "{package}"' in line for line in values["setup_commands"])
    assert {".git", ".venv"} <= set(values["rsync_exclude"])
    prepared = prepare_config(values)
    validate_config(prepared)
    assert prepared["head_node_type"] in prepared["available_node_types"]


@pytest.mark.parametrize("name", CLOUDS)
def test_every_replica_gets_a_machine(name: str) -> None:
    """Guards tiers that wait for ever: types whose resources nobody knows, too few machines, a small tier on the large GPU."""
    values, application = read(name), (CLUSTER / "serve" / "qwen3-scaled.yaml").read_text()
    types = values["available_node_types"]
    for kind in types.values() if name == "aws" else ():
        kind["resources"] = AWS[kind["node_config"]["InstanceType"]] | kind["resources"]
    there = application.replace("accelerator_type: H100", f"accelerator_type: {CLOUDS[name]}")  # as the page says
    config = CascadeConfig.parse(yaml.safe_load(there)["applications"][0]["args"])
    for bound, workers in (("min_replicas", "min_workers"), ("max_replicas", "max_workers")):
        started, without = nodes_for(types, values["head_node_type"], demands(config, bound))
        assert without == []
        assert started.pop(values["head_node_type"]) == 1, "with the first router"
        assert started == {kind: node_type[workers] for kind, node_type in types.items() if node_type.get(workers)}
    assert sum(node_type.get("max_workers", 0) for node_type in types.values()) <= values["max_workers"]
    assert_apart(types, config)


def test_machines_at_hand_all_join_and_nodes_notice_broken_connections() -> None:
    """Guards local.yaml against commands that Ray does not know, and drafting across nodes that did not hear each other."""
    values, settings = read("local"), [f"{name}={value}" for name, value in KEEPALIVE.items()]
    [kind] = prepare_config(read("local"))["available_node_types"].values()
    assert kind["min_workers"] == kind["max_workers"] == len(values["provider"]["worker_ips"]) == 3
    assert " ".join(settings) in PAGE
    for line in (*values["head_start_ray_commands"], *values["worker_start_ray_commands"]):
        program, _, command = line.rpartition(";")[2].strip().partition(" ")
        assert program == "~/.cascade/bin/ray"
        taken(command.replace("$RAY_HEAD_IP", "10.0.0.1"))
        assert " start " not in line or " ".join(settings) in line
    for name in CLOUDS:
        assert {f"-e {setting}" for setting in settings} <= set(read(name)["docker"]["run_options"])
