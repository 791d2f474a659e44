"""The files of cluster/ for Kubernetes and for virtual machines: what they mean, for nobody can run them here."""

import json
import re
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import ray
import yaml

from cascade.settings.config import CascadeConfig, TierConfig
from deployments.app import tier_options

CLUSTER = Path(__file__).parents[2] / "cluster"
KUBERAY = CLUSTER / "kuberay" / "rayservice.yaml"
SPEC_FIELDS = {"serveConfigV2", "rayClusterConfig", "rayClusterDeletionDelaySeconds"}  # of ray.io/v1 that we use
GPU = "nvidia.com/gpu"


def documents() -> dict[str, Any]:
    """Of the Kubernetes file, by kind."""
    return {document["kind"]: document for document in yaml.safe_load_all(KUBERAY.read_text())}


@pytest.fixture
def spec() -> Any:
    return documents()["RayService"]["spec"]


@pytest.fixture
def config(spec: Any) -> CascadeConfig:
    [application] = yaml.safe_load(spec["serveConfigV2"])["applications"]
    return CascadeConfig.parse(application["args"])


def groups(spec: Any) -> list[Any]:
    """The head's, then those of workers."""
    return [spec["rayClusterConfig"]["headGroupSpec"], *spec["rayClusterConfig"]["workerGroupSpecs"]]


def pods(spec: Any) -> list[Any]:
    return [group["template"]["spec"] for group in groups(spec)]


def num_gpus(tier: TierConfig, bound: str) -> int:
    """That the tier takes with its fewest or most replicas."""
    deployment = tier.deployment_config
    scaled = (deployment.autoscaling_config or {}).get(bound, deployment.num_replicas or 1)
    return int(scaled * tier_options(tier)["ray_actor_options"].get("num_gpus", 0))


def test_kuberay_serves_the_qwen3_file(spec: Any) -> None:
    """Guards the RayService: its application is that of cluster/serve, and its ports are those of the service."""
    assert set(spec) == SPEC_FIELDS  # others are ignored, such as thresholds that KubeRay had once
    served = yaml.safe_load(spec["serveConfigV2"])
    assert served == yaml.safe_load((CLUSTER / "serve" / "qwen3.yaml").read_text())
    for pod in pods(spec):
        [container] = pod["containers"]
        ports = {port["name"]: port["containerPort"] for port in container["ports"]}
        assert ports["serve"] == served["http_options"]["port"]
        assert ports["serve-grpc"] == served["grpc_options"]["port"]
    assert "KubeRay 1.6 or later" in KUBERAY.read_text()  # the first that makes a port of serve-grpc
    assert spec["rayClusterConfig"]["rayVersion"] == ray.__version__


@pytest.mark.parametrize(("bound", "replicas"), [("min_replicas", "minReplicas"), ("max_replicas", "maxReplicas")])
def test_every_replica_gets_a_node(spec: Any, config: CascadeConfig, bound: str, replicas: str) -> None:
    """Guards tiers that are scaled: without an autoscaler, or with too few nodes, a replica waits for ever."""
    assert any(tier.deployment_config.autoscaling_config for tier in config.tiers)
    assert spec["rayClusterConfig"]["enableInTreeAutoscaling"]
    there = sum(
        group[replicas] * int(group["template"]["spec"]["containers"][0]["resources"]["limits"][GPU])
        for group in spec["rayClusterConfig"]["workerGroupSpecs"]
    )
    assert there == sum(num_gpus(tier, bound) for tier in config.tiers)
    for tier in config.tiers:
        if tier.accelerator_type is not None:
            fit = [
                group
                for group in groups(spec)[1:]
                if tier.accelerator_type in str(group["template"]["spec"].get("nodeSelector"))
            ]
            assert sum(group[replicas] for group in fit) >= num_gpus(tier, bound)


def test_answers_end_before_pods_do(spec: Any, config: CascadeConfig) -> None:
    """Guards what is being written: a pod that goes, and a cluster that is replaced, wait as long as a router that goes."""
    wait_s = config.router.deployment_config.graceful_shutdown_timeout_s
    for pod in pods(spec):
        command, seconds = pod["containers"][0]["lifecycle"]["preStop"]["exec"]["command"]
        assert command == "sleep"
        assert wait_s <= int(seconds) < pod["terminationGracePeriodSeconds"]
    assert spec["rayClusterDeletionDelaySeconds"] >= wait_s


def test_routers_are_two_and_have_keys(spec: Any, config: CascadeConfig) -> None:
    """Guards against a single router, and against ports that are open to all: without the secret no pod starts."""
    assert config.router.deployment_config.num_replicas == 2
    for pod in pods(spec):
        variables = {variable["name"]: variable for variable in pod["containers"][0]["env"]}
        secret = variables[config.router.access.keys_env]["valueFrom"]["secretKeyRef"]
        assert not secret.get("optional")
        assert f"create secret generic {secret['name']} --from-literal={secret['key']}=" in (CLUSTER / "README.md").read_text()


@pytest.mark.parametrize("name", ["llama3", "qwen3", "twin"])
def test_clusters_have_two_routers(name: str) -> None:
    """Guards answers against a router that dies: a client goes on at the other one at once, not when a new one has started."""
    [application] = yaml.safe_load((CLUSTER / "serve" / f"{name}.yaml").read_text())["applications"]
    assert CascadeConfig.parse(application["args"]).router.deployment_config.num_replicas == 2


def test_models_are_on_a_volume(spec: Any) -> None:
    """Guards starts: without a volume every pod downloads all weights again."""
    claim = documents()["PersistentVolumeClaim"]
    assert claim["spec"]["accessModes"] == ["ReadWriteMany"]
    for pod in pods(spec):
        [container], [volume] = pod["containers"], pod["volumes"]
        assert volume["persistentVolumeClaim"]["claimName"] == claim["metadata"]["name"]
        [mount] = container["volumeMounts"]
        assert mount["name"] == volume["name"]
        assert {"name": "HF_HOME", "value": mount["mountPath"]} in container["env"]


def test_images_can_be_pulled_and_have_our_python(spec: Any) -> None:
    """Guards nodes: one image from a registry, built on that of this Ray with a Python that we run on."""
    [image] = {pod["containers"][0]["image"] for pod in pods(spec)}
    assert re.fullmatch(r"[a-z0-9.]+\.[a-z]+/cascade-serve:0\.1\.0", image)
    dockerfile = (CLUSTER / "kuberay" / "Dockerfile").read_text()
    assert f"FROM rayproject/ray:{ray.__version__}-py311-gpu" in dockerfile
    assert image in dockerfile
    assert f"-t {image} ." in (CLUSTER / "README.md").read_text()


def test_virtual_machines_have_our_python() -> None:
    """Guards `ray up`: keys that Ray knows, and no image of Ray's choice, too old for Python 3.11 and these GPUs."""
    schema = json.loads((Path(ray.__file__).parent / "autoscaler" / "ray-schema.json").read_text())
    values = yaml.safe_load((CLUSTER / "ray-up" / "aws.yaml").read_text())
    jsonschema.validate(values, schema)
    kinds = values["available_node_types"]
    assert values["head_node_type"] in kinds
    for image in ("image", "head_image"):
        assert values["docker"][image].startswith(f"rayproject/ray:{ray.__version__}-py311-")
    assert all(kind["node_config"]["ImageId"] == "ami-REPLACE" for kind in kinds.values())
    assert "s/ami-REPLACE/" in (CLUSTER / "README.md").read_text()
    assert sum(kind.get("max_workers", 0) for kind in kinds.values()) <= values["max_workers"]
