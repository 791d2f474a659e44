"""Machines without Kubernetes: packages, units of systemd, what Ray makes of the files of `ray up`, and the image."""

import configparser
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tomllib
import venv
import zipfile
from pathlib import Path
from typing import Any

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name
from ray.autoscaler._private.util import prepare_config, validate_config
from ray.scripts.scripts import cli as ray_command

from cascade.cli.serve import serve
from cascade.errors import Unauthenticated
from cascade.settings.config import CascadeConfig
from cascade.settings.router import AccessConfig, ListenConfig
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


# the image of cluster/Dockerfile: what it copies, what is installed in it and by whom it runs; no daemon builds it here


ALONE = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}  # where Python does not find this checkout


def stages() -> dict[str, list[tuple[str, str]]]:
    """Instructions of each stage by its name, and what they are given: "" is the last stage, "ARG" what stands before all."""
    text = re.sub(r"^\s*#.*\n", "", (ROOT / "cluster" / "Dockerfile").read_text(), flags=re.MULTILINE).replace("\\\n", "")
    by_name: dict[str, list[tuple[str, str]]] = {"ARG": []}
    for line in filter(None, text.splitlines()):
        instruction, given = line.split(maxsplit=1)
        if instruction == "FROM":
            by_name[given.partition(" AS ")[2]] = []
        list(by_name.values())[-1].append((instruction, given))
    return by_name


def given(stage: str, instruction: str) -> list[str]:
    return [text for name, text in stages()[stage] if name == instruction]


def tracked() -> list[str]:
    if not (ROOT / ".git").exists():
        pytest.skip("not a checkout")
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True, text=True)
    return listed.stdout.strip("\0").split("\0")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the first stage makes of the files that it copies."""
    source, folder = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheels")
    for name in [name for text in given("wheel", "COPY") for name in text.split()[:-1]]:
        files = [file for file in tracked() if file == name or file.startswith(f"{name}/")]
        assert files, name
        for file in files:
            (source / file).parent.mkdir(parents=True, exist_ok=True)
            (source / file).write_bytes((ROOT / file).read_bytes())
    quick = {"--build-option": ["--compression=stored"]}  # to pack weights takes seconds
    build = f"import sys; from setuptools import build_meta; print(build_meta.build_wheel(sys.argv[1], {quick}))"
    subprocess.run([sys.executable, "-c", build, str(folder)], cwd=source, env=ALONE, capture_output=True, check=True)
    [made] = folder.iterdir()
    return made


def test_the_wheel_is_whole_and_runs_where_nothing_else_is(wheel: Path, tmp_path: Path) -> None:
    """Guards images against a package without its weights or its page, and against code that runs only beside its checkout."""
    venv.create(tmp_path / "venv")
    python = tmp_path / "venv" / "bin" / "python"
    [here] = (tmp_path / "venv" / "lib").glob("*/site-packages")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(here)
    ours = {file for file in tracked() if file.startswith(("cascade/", "deployments/"))}
    assert {file for file in ours if not (here / file).exists()} <= {"cascade/family/weights/README.md"}
    (here / "needed.pth").write_text(sysconfig.get_path("purelib"))  # the packages that it needs, but no checkout
    run = (
        "import sys; from importlib.metadata import entry_points as all; import cascade\n"
        "print(cascade.__file__)\n"
        "[command] = all(group='console_scripts', name='cascade')\n"
        "sys.argv[1:] = 'top --once --address 127.0.0.1:9'.split(); command.load()()"
    )
    result = subprocess.run([python, "-c", run], cwd=tmp_path, env=ALONE, capture_output=True, text=True, check=False)
    assert "No server answers" in result.stderr
    assert Path(result.stdout.splitlines()[0]).is_relative_to(here)


def test_packages_of_the_image_are_those_of_the_project(tmp_path: Path) -> None:
    """Guards the layer of dependencies, which is made without the package: it has all that the package asks for, and extras."""
    arguments = dict(text.split("=", 1) for text in given("dependencies", "ARG"))
    listing = next(text for text in given("dependencies", "RUN") if "requirements.txt" in text)
    (tmp_path / "pyproject.toml").write_bytes((ROOT / "pyproject.toml").read_bytes())
    path = {**ALONE, **arguments, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    subprocess.run(["sh", "-euc", listing], cwd=tmp_path, env=path, check=True)
    extras = [need for extra in arguments["EXTRAS"].split(",") for need in PROJECT["optional-dependencies"][extra]]
    assert (tmp_path / "requirements.txt").read_text().splitlines() == [*PROJECT["dependencies"], *extras]


def test_bases_are_named_and_nobody_is_root() -> None:
    """Guards images against a base that changes by itself or has an old Python, and containers against root."""
    version = re.fullmatch(r"PYTHON=(\d+\.\d+\.\d+)-slim-[a-z]+", *given("ARG", "ARG"))
    assert version
    assert SpecifierSet(PROJECT["requires-python"]).contains(version[1])
    assert given("", "USER") == ["1000:1000"]  # numbers, by which Kubernetes knows that it is not root
    assert not {"RUN", "COPY"} & {name for name, _ in stages()[""][stages()[""].index(("USER", "1000:1000")) :]}


def test_the_container_serves_at_its_doors() -> None:
    """Guards `docker run`: the container is reached from outside, answers nobody without a key, and writes in /models alone."""
    name, subcommand, *arguments = json.loads(*given("", "CMD"))
    assert (name, subcommand) == ("cascade", "serve")
    assert serve.make_context(subcommand, arguments).params["host"] == "0.0.0.0"
    listen = ListenConfig()
    assert given("", "EXPOSE") == [f"{listen.http_port} {listen.grpc_port}"]
    assert f"http://127.0.0.1:{listen.http_port}/health" in given("", "HEALTHCHECK")[0]
    variables = dict(pair.split("=", 1) for text in given("", "ENV") for pair in text.split())
    assert variables[REQUIRED] == "1"
    caches = [variables[name] for name in ("HF_HOME", "CASCADE_CACHE", "XDG_CACHE_HOME", "TRITON_CACHE_DIR")]
    assert all(f"{value}/".startswith("/models/") for value in caches)
