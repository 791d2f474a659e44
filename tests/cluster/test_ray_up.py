"""The files of cluster/ray-up: what Ray makes of them, for nobody can run them here."""

from pathlib import Path
from typing import Any

import pytest
import yaml
from ray.autoscaler._private.util import prepare_config, validate_config
from ray.scripts.scripts import cli as ray_command

from cascade.settings.config import CascadeConfig
from tests.cluster.demand import assert_apart, demands, nodes_for
from tests.nodes.nodes import KEEPALIVE

CLUSTER = Path(__file__).parents[2] / "cluster"
FILES = sorted((CLUSTER / "ray-up").glob("*.yaml"))
CLOUDS = {"aws": "H100", "gcp": "A100-80G"}  # and the accelerator of the full tier there
PAGE = (CLUSTER.parent / "docs" / "howto" / "bare-machines.md").read_text()
AWS = {"m7i.2xlarge": {"CPU": 8}, "g6.2xlarge": {"CPU": 8, "GPU": 1, "accelerator_type:L4": 1}}  # what AWS says of them
AWS["p5.4xlarge"] = {"CPU": 16, "GPU": 1, "accelerator_type:H100": 1}


def read(name: str) -> dict[str, Any]:
    values: dict[str, Any] = yaml.safe_load((CLUSTER / "ray-up" / f"{name}.yaml").read_text())
    return values


def qwen3(accelerator: str) -> CascadeConfig:
    """The application, with another accelerator for its full tier as the page says."""
    text = (
        (CLUSTER / "serve" / "qwen3-scaled.yaml")
        .read_text()
        .replace("accelerator_type: H100", f"accelerator_type: {accelerator}")
    )
    return CascadeConfig.parse(yaml.safe_load(text)["applications"][0]["args"])


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_ray_takes_the_file(path: Path) -> None:
    """Guards `ray up` against keys and shapes that it refuses, with the defaults that it fills in itself."""
    prepared = prepare_config(read(path.stem))
    validate_config(prepared)
    assert prepared["head_node_type"] in prepared["available_node_types"]


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_the_package_is_installed_as_a_whole(path: Path) -> None:
    """Guards nodes without the package, whose proxies do not start, without extras, and with packages of another week."""
    values = read(path.stem)
    assert values["file_mounts"] == {"~/cascade-serve": "."}
    constraint, package = "$HOME/cascade-serve/cluster/constraints.txt", "$HOME/cascade-serve[quantization]"
    assert any(f'pip install --quiet --constraint "{constraint}" "{package}"' in line for line in values["setup_commands"])
    assert {".git", ".venv"} <= set(values["rsync_exclude"])


@pytest.mark.parametrize("name", CLOUDS)
def test_every_replica_gets_a_machine(name: str) -> None:
    """Guards tiers that wait for ever: types whose resources nobody knows, too few machines, a small tier on the large GPU."""
    values = read(name)
    types = values["available_node_types"]
    if name == "aws":
        types = {
            kind: {**said, "resources": AWS[said["node_config"]["InstanceType"]] | said["resources"]}
            for kind, said in types.items()
        }
    config = qwen3(CLOUDS[name])
    for bound, workers in (("min_replicas", "min_workers"), ("max_replicas", "max_workers")):
        started, without = nodes_for(types, values["head_node_type"], demands(config, bound))
        assert without == []
        assert started.pop(values["head_node_type"]) == 1, "with the first router"
        assert started == {kind: said[workers] for kind, said in types.items() if said.get(workers)}
    assert sum(said.get("max_workers", 0) for said in types.values()) <= values["max_workers"]
    assert_apart(types, config)


def test_nodes_notice_broken_connections() -> None:
    """Guards drafting across nodes that did not hear each other for a while: by Ray's own settings it comes back after minutes.

    They must be the same on all nodes: a server refuses pings that come more often than it would ask itself.
    """
    said = [f"{name}={value}" for name, value in KEEPALIVE.items()]
    for name in CLOUDS:
        assert {f"-e {setting}" for setting in said} <= set(read(name)["docker"]["run_options"])
    starts = [line for when in ("head", "worker") for line in read("local")[f"{when}_start_ray_commands"] if " start " in line]
    for line in (*starts, PAGE):
        assert " ".join(said) in line


def test_machines_at_hand_all_join() -> None:
    """Guards local.yaml: each of its machines is a worker, and Ray is started by commands that Ray knows."""
    values = read("local")
    prepared = prepare_config(values)
    [kind] = prepared["available_node_types"].values()
    assert kind["min_workers"] == kind["max_workers"] == len(values["provider"]["worker_ips"]) == 3
    for line in (*values["head_start_ray_commands"], *values["worker_start_ray_commands"]):
        program, *words = line.rpartition(";")[2].split()
        assert program == "~/.cascade/bin/ray"
        ray_command.commands[words[0]].make_context(words[0], [word.replace("$RAY_HEAD_IP", "10.0.0.1") for word in words[1:]])
