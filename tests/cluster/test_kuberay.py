"""The files of cluster/kuberay: what they mean, for nobody can run them here."""

import re
from pathlib import Path
from typing import Any

import pytest
import ray
import yaml
from ray.autoscaler._private.kuberay.autoscaling_config import _derive_autoscaling_config_from_ray_cr

from cascade.settings.check import unpinned
from cascade.settings.config import CascadeConfig
from tests.cluster.demand import assert_apart, demands, nodes_for
from tests.cluster.kubernetes import unknown
from tests.nodes.nodes import KEEPALIVE

CLUSTER = Path(__file__).parents[2] / "cluster"
KUBERAY = CLUSTER / "kuberay" / "rayservice.yaml"
PAGE = (CLUSTER.parent / "docs" / "howto" / "kubernetes.md").read_text()
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


def node_types(spec: Any) -> dict[str, Any]:
    """As Ray's own autoscaler reads them from the groups."""
    cluster = {"metadata": {"name": "cascade", "namespace": "default"}, "spec": spec["rayClusterConfig"]}
    types: dict[str, Any] = _derive_autoscaling_config_from_ray_cr(cluster)["available_node_types"]
    return types


def test_every_field_is_known() -> None:
    """Guards against fields that nobody reads: KubeRay drops what it does not know, such as thresholds that it had once."""
    document = documents()["RayService"]
    assert list(unknown(document)) == []
    for path, wrong in (("spec", "serveConfig"), ("spec.rayClusterConfig.workerGroupSpecs", "replica")):
        part: Any = document
        for name in path.split("."):
            part = part[name]
        (part[0] if isinstance(part, list) else part)[wrong] = 1
        assert f".{path}.{wrong}" in unknown(document)
    document["spec"]["rayClusterConfig"]["headGroupSpec"]["rayStartParams"]["num-cpus"] = 0
    assert ".spec.rayClusterConfig.headGroupSpec.rayStartParams.num-cpus must be text" in unknown(document)


def test_kuberay_serves_the_qwen3_file(spec: Any) -> None:
    """Guards the RayService: its application is that of cluster/serve, and its ports are those of the service."""
    served = yaml.safe_load(spec["serveConfigV2"])
    assert served == yaml.safe_load((CLUSTER / "serve" / "qwen3.yaml").read_text())
    for pod in pods(spec):
        [container] = pod["containers"]
        ports = {port["name"]: port["containerPort"] for port in container["ports"]}
        assert ports["serve"] == served["http_options"]["port"]
        assert ports["serve-grpc"] == served["grpc_options"]["port"]
    [port] = spec["serveService"]["spec"]["ports"]
    assert (port["name"], port["port"]) == ("serve-grpc", served["grpc_options"]["port"])
    assert port["appProtocol"] == "kubernetes.io/h2c"
    assert "KubeRay 1.6 or later" in KUBERAY.read_text()  # the first that makes a port of serve-grpc


@pytest.mark.parametrize(("bound", "replicas"), [("min_replicas", "minReplicas"), ("max_replicas", "maxReplicas")])
def test_every_replica_gets_a_node(spec: Any, config: CascadeConfig, bound: str, replicas: str) -> None:
    """Guards tiers that are scaled: Ray's autoscaler starts a node for each replica, which it does not where a group does not
    say its accelerator_type; and no more groups are kept than replicas need."""
    assert spec["rayClusterConfig"]["enableInTreeAutoscaling"]
    types = node_types(spec)
    started, without = nodes_for(types, "headgroup", demands(config, bound))
    assert without == []
    assert started == {group["groupName"]: group[replicas] for group in spec["rayClusterConfig"]["workerGroupSpecs"]}
    for group in spec["rayClusterConfig"]["workerGroupSpecs"]:
        [kind] = [name.partition(":")[2] for name in group["resources"]]
        assert kind in group["template"]["spec"]["nodeSelector"]["nvidia.com/gpu.product"].split("-")
        resources = group["template"]["spec"]["containers"][0]["resources"]
        assert resources["requests"][GPU] == resources["limits"][GPU] == "1"  # a tier is one GPU
        del group["resources"]
    assert nodes_for(node_types(spec), "headgroup", demands(config, bound)) == ({}, demands(config, bound))


def test_tiers_do_not_take_each_others_gpus(spec: Any, config: CascadeConfig) -> None:
    """Guards the full tier, which waits for ever where a small one has taken the only GPU that it fits on."""
    assert_apart(node_types(spec), config)


@pytest.mark.parametrize("name", ["llama3", "qwen3", "twin"])
def test_a_tier_that_takes_any_gpu_is_told(name: str) -> None:
    """Guards configurations of machines that differ: `cascade check` finds what our own files once had wrong."""
    [application] = yaml.safe_load((CLUSTER / "serve" / f"{name}.yaml").read_text())["applications"]
    assert unpinned(CascadeConfig.parse(application["args"])) is None
    accelerator = application["args"]["tiers"][0].pop("accelerator_type")
    said = unpinned(CascadeConfig.parse(application["args"]))
    assert said is not None
    assert said.startswith(f"Tier tiny takes a GPU of any kind, also the {application['args']['tiers'][1]['accelerator_type']}")
    application["args"]["tiers"][0]["deployment_config"]["ray_actor_options"]["resources"] = {accelerator: 1}
    assert unpinned(CascadeConfig.parse(application["args"])) is None


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
        assert f"create secret generic {secret['name']} --from-literal={secret['key']}=" in PAGE


@pytest.mark.parametrize("name", ["llama3", "qwen3", "twin"])
def test_clusters_have_two_routers(name: str) -> None:
    """Guards answers against a router that dies: a client goes on at the other one at once, not when a new one has started."""
    [application] = yaml.safe_load((CLUSTER / "serve" / f"{name}.yaml").read_text())["applications"]
    assert CascadeConfig.parse(application["args"]).router.deployment_config.num_replicas == 2


def test_nodes_notice_broken_connections(spec: Any) -> None:
    """Guards drafting across nodes that did not hear each other for a while: by Ray's own settings it takes minutes."""
    for pod in pods(spec):
        assert KEEPALIVE.items() <= {one["name"]: one.get("value") for one in pod["containers"][0]["env"]}.items()


def test_models_are_on_a_volume(spec: Any) -> None:
    """Guards starts: without a volume every pod downloads all weights again."""
    claim = documents()["PersistentVolumeClaim"]
    assert claim["spec"]["accessModes"] == ["ReadWriteMany"]
    for pod in pods(spec):
        [container] = pod["containers"]
        [volume] = [volume for volume in pod["volumes"] if "persistentVolumeClaim" in volume]
        assert volume["persistentVolumeClaim"]["claimName"] == claim["metadata"]["name"]
        [mount] = [mount for mount in container["volumeMounts"] if mount["name"] == volume["name"]]
        assert {"name": "HF_HOME", "value": mount["mountPath"]} in container["env"]


def test_pods_are_not_root_and_read_what_is_mounted(spec: Any) -> None:
    """Guards volumes: the image's user is that of the pods, and certificates are where docs/howto/secure.md has them."""
    [number] = re.findall(r"^USER (\d+):", (CLUSTER / "Dockerfile").read_text(), re.MULTILINE)
    for pod in pods(spec):
        user = pod["securityContext"]
        assert (user["runAsNonRoot"], user["runAsUser"], user["fsGroup"]) == (True, int(number), int(number))
        [container] = pod["containers"]
        assert container["securityContext"]["allowPrivilegeEscalation"] is False
        volumes = {volume["name"]: volume for volume in pod["volumes"]}
        assert volumes.keys() == {mount["name"] for mount in container["volumeMounts"]}
        secret = volumes["link-tls"]["secret"]
        assert secret["optional"]
        [mount] = [mount for mount in container["volumeMounts"] if mount["name"] == "link-tls"]
        tls = (CLUSTER.parent / "docs" / "howto" / "secure.md").read_text()
        assert f"secretName: {secret['secretName']}" in tls
        assert f"certificate: {mount['mountPath']}/tls.crt" in tls


def test_images_can_be_pulled(spec: Any) -> None:
    """Guards nodes: one image from a registry, the one that the page builds, with the Ray that the cluster is said to have."""
    [image] = {pod["containers"][0]["image"] for pod in pods(spec)}
    assert re.fullmatch(r"[a-z0-9.]+\.[a-z]+/cascade-serve:0\.2\.0", image)
    build = f"docker build -f cluster/Dockerfile -t {image} ."
    assert build in (CLUSTER / "Dockerfile").read_text()
    assert build in PAGE
    assert spec["rayClusterConfig"]["rayVersion"] == ray.__version__
