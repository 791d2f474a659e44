"""The files of cluster/kubernetes: what they mean, for nobody can run them here."""

import re
import shlex
import shutil
import subprocess
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import pytest
import ray
import yaml
from ray.autoscaler._private.kuberay.autoscaling_config import _derive_autoscaling_config_from_ray_cr
from ray.scripts.scripts import cli as ray_command
from ray.serve.scripts import cli as serve_command

from cascade.cli.main import main as cascade_command
from cascade.settings.config import CascadeConfig
from tests.cluster.demand import assert_apart, demands, nodes_for
from tests.nodes.nodes import KEEPALIVE

CLUSTER = Path(__file__).parents[2] / "cluster"
FOLDER = CLUSTER / "kubernetes"
PAGE = (CLUSTER.parent / "docs" / "howto" / "kubernetes.md").read_text()
GPU = "nvidia.com/gpu"


def documents() -> dict[str, Any]:
    """What kustomize renders, by kind: the resources, with the image that kustomization.yaml names."""
    base = yaml.safe_load((FOLDER / "kustomization.yaml").read_text())
    kinds = {each["kind"]: each for path in base["resources"] for each in yaml.safe_load_all((FOLDER / path).read_text())}
    images = {image["name"]: f"{image['newName']}:{image['newTag']}" for image in base["images"]}
    for group in groups(kinds["RayService"]["spec"]):
        for container in group["template"]["spec"]["containers"]:
            container["image"] = images[container["image"].partition(":")[0]]
    return kinds


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


def test_the_base_is_whole_and_every_field_is_known() -> None:
    """Guards resources that are never applied, and fields that KubeRay does not know: it drops them without a word."""
    base = yaml.safe_load((FOLDER / "kustomization.yaml").read_text())
    assert {*base["resources"], "kustomization.yaml"} == {path.name for path in FOLDER.iterdir()}
    kinds = documents()
    if shutil.which("kubectl") is not None:
        built = subprocess.run(["kubectl", "kustomize", str(FOLDER)], capture_output=True, text=True, check=True)
        assert {document["kind"]: document for document in yaml.safe_load_all(built.stdout)} == kinds
    assert list(unknown(list(kinds.values()))) == []
    head = kinds["RayService"]["spec"]["rayClusterConfig"]["headGroupSpec"]
    head |= {"replica": 1, "rayStartParams": {"num-cpus": 0}}
    where = ".spec.rayClusterConfig.headGroupSpec"
    assert {*unknown(kinds["RayService"])} == {f"{where}.replica", f"{where}.rayStartParams.num-cpus must be text"}


def test_kuberay_serves_the_scaled_file(spec: Any) -> None:
    """Guards the RayService: its application is that of cluster/serve, and its ports are those of the service."""
    served = yaml.safe_load(spec["serveConfigV2"])
    assert served == yaml.safe_load((CLUSTER / "serve" / "qwen3-scaled.yaml").read_text())
    for pod in pods(spec):
        [container] = pod["containers"]
        ports = {port["name"]: port["containerPort"] for port in container["ports"]}
        assert ports["serve"] == served["http_options"]["port"]
        assert ports["serve-grpc"] == served["grpc_options"]["port"]
    [port] = spec["serveService"]["spec"]["ports"]
    assert (port["name"], port["port"]) == ("serve-grpc", served["grpc_options"]["port"])
    assert port["appProtocol"] == "kubernetes.io/h2c"
    assert "KubeRay 1.6 or later" in (FOLDER / "rayservice.yaml").read_text()  # the first that makes a port of serve-grpc


@pytest.mark.parametrize(("bound", "replicas"), [("min_replicas", "minReplicas"), ("max_replicas", "maxReplicas")])
def test_every_replica_gets_a_node(spec: Any, config: CascadeConfig, bound: str, replicas: str) -> None:
    """Guards tiers that wait for ever: no node is started for them, or a small one has taken the only GPU that they fit on."""
    assert spec["rayClusterConfig"]["enableInTreeAutoscaling"]
    types = node_types(spec)
    started, without = nodes_for(types, "headgroup", demands(config, bound))
    assert without == []
    assert_apart(types, config)
    routers, *tiers = workers = spec["rayClusterConfig"]["workerGroupSpecs"]
    assert started == {group["groupName"]: group[replicas] for group in workers if group[replicas]}
    assert GPU not in routers["template"]["spec"]["containers"][0]["resources"]["requests"]
    assert config.router.deployment_config.max_replicas_per_node == 1
    del routers["resources"]
    for group in tiers:
        [kind] = [name.partition(":")[2] for name in group["resources"]]
        assert kind in group["template"]["spec"]["nodeSelector"]["nvidia.com/gpu.product"].split("-")
        resources = group["template"]["spec"]["containers"][0]["resources"]
        assert resources["requests"][GPU] == resources["limits"][GPU] == "1"  # a tier is one GPU
        del group["resources"]
    assert nodes_for(node_types(spec), "headgroup", demands(config, bound)) == ({}, demands(config, bound))


def test_answers_end_before_pods_do(spec: Any, config: CascadeConfig) -> None:
    """Guards what is being written: a pod that goes, and a cluster that is replaced, wait as long as a router that goes."""
    wait_s = config.router.deployment_config.graceful_shutdown_timeout_s
    for pod in pods(spec):
        command, seconds = pod["containers"][0]["lifecycle"]["preStop"]["exec"]["command"]
        assert command == "sleep"
        assert wait_s <= int(seconds) < pod["terminationGracePeriodSeconds"]
    assert spec["rayClusterDeletionDelaySeconds"] >= wait_s


def test_pods_are_closed_and_can_write(spec: Any, config: CascadeConfig) -> None:
    """Guards ports that are open to all, images that are read-only, and connections between nodes that break unnoticed."""
    assert spec["rayClusterConfig"]["authOptions"] == {"mode": "token"}
    [number] = re.findall(r"^USER (\d+):", (CLUSTER / "Dockerfile").read_text(), re.MULTILINE)
    for pod in pods(spec):
        [container] = pod["containers"]
        variables = {variable["name"]: variable for variable in container["env"]}
        secret = variables[config.router.access.keys_env]["valueFrom"]["secretKeyRef"]
        assert not secret.get("optional")
        assert f"create secret generic {secret['name']} --from-literal={secret['key']}=" in PAGE
        assert container["securityContext"]["readOnlyRootFilesystem"]
        assert pod["securityContext"]["runAsUser"] == int(number)
        values = {name: variable.get("value") for name, variable in variables.items()}
        assert {**KEEPALIVE, "HF_HOME": "/models"}.items() <= values.items()
        volumes = {volume["name"]: volume for volume in pod["volumes"]}
        places = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
        assert volumes.keys() == places.keys()
        assert {places[name] for name, volume in volumes.items() if "emptyDir" in volume} == {"/models", "/tmp"}
        assert volumes["link-tls"]["secret"]["optional"]


def test_images_can_be_pulled(spec: Any) -> None:
    """Guards nodes: one image from a registry, the one that the page builds, with the Ray that the cluster is said to have."""
    [image] = {pod["containers"][0]["image"] for pod in pods(spec)}
    release = tomllib.loads((CLUSTER.parent / "pyproject.toml").read_text())["project"]["version"]
    assert image == f"registry.example.com/cascade-serve:{release}"
    build = f"docker build -f cluster/Dockerfile -t {image} ."
    assert build in (CLUSTER / "Dockerfile").read_text()
    assert build in PAGE
    assert spec["rayClusterConfig"]["rayVersion"] == ray.__version__


def test_policies_and_routes_reach_the_pods(spec: Any) -> None:
    """Guards policies that match nothing, and routes without a listener, a host or a port of the service."""
    kinds, ours = documents(), {"matchLabels": {"app": "cascade"}}
    assert all(group["template"]["metadata"]["labels"] == ours["matchLabels"] for group in groups(spec))
    assert kinds["PodDisruptionBudget"]["spec"]["selector"] == kinds["NetworkPolicy"]["spec"]["podSelector"] == ours
    ports = {port["name"]: port["containerPort"] for pod in pods(spec) for port in pod["containers"][0]["ports"]}
    assert {"from": [{"podSelector": ours}]} in kinds["NetworkPolicy"]["spec"]["ingress"]
    opened = [port["port"] for rule in kinds["NetworkPolicy"]["spec"]["ingress"] for port in rule.get("ports", ())]
    assert {*opened} == {ports[name] for name in ("serve", "serve-grpc", "dashboard", "metrics")}
    gateway = kinds["Gateway"]
    hosts = {listener["name"]: listener["hostname"] for listener in gateway["spec"]["listeners"]}
    assert len(set(hosts.values())) == 2, "a gateway takes one kind of route for a host"
    for kind, name, port in (("HTTPRoute", "http", "serve"), ("GRPCRoute", "grpc", "serve-grpc")):
        route = kinds[kind]["spec"]
        assert route["parentRefs"] == [{"name": gateway["metadata"]["name"], "sectionName": name}]
        assert route["hostnames"] == [hosts[name]]
        service = f"{kinds['RayService']['metadata']['name']}-serve-svc"
        assert route["rules"][0]["backendRefs"] == [{"name": service, "port": ports[port]}]


# the fields of KubeRay 1.6, Kubernetes and its gateways that we use: what they do not know, they drop without a word


KINDS = ("RayService", "PodMonitor", "PodDisruptionBudget", "NetworkPolicy", "Gateway", "HTTPRoute", "GRPCRoute")
LISTED = """
allowPrivilegeEscalation apiVersion appProtocol authOptions autoscalerOptions backendRefs capabilities
certificateRefs clusterUpgradeOptions command containerPort containers drop effect emptyDir
enableInTreeAutoscaling env exec from fsGroup gatewayClassName gcsFaultToleranceOptions groupName headGroupSpec
hostname hostnames idleTimeoutSeconds image ingress interval intervalSeconds key kind labels lifecycle limits
listeners matchLabels matches maxReplicas maxSurgePercent maxUnavailable metadata method minReplicas mode
mountPath name namespaceSelector nodeSelector operator optional parentRefs podMetricsEndpoints podSelector
podTargetLabels policyTypes port ports preStop protocol rayClusterConfig rayClusterDeletionDelaySeconds
rayStartParams rayVersion readOnly readOnlyRootFilesystem redisAddress redisPassword replicas request requests
resources rules runAsNonRoot runAsUser seccompProfile secret secretKeyRef secretName sectionName securityContext
selector serveConfigV2 serveService service sizeLimit spec stepSizePercent template terminationGracePeriodSeconds
timeouts tls tolerations type upgradeStrategy value valueFrom volumeMounts volumes workerGroupSpecs
"""
FIELDS = frozenset(LISTED.split())
# mappings whose keys are named by whoever writes them, and whose values are text
NAMED = ("limits", "requests", "resources", "rayStartParams", "nodeSelector", "labels", "annotations", "matchLabels")


def unknown(document: Any, path: str = "") -> Iterator[str]:
    """Paths in a document that nobody knows, and numbers where text is wanted."""
    if isinstance(document, list):
        for item in document:
            yield from unknown(item, path)
    elif isinstance(document, dict) and path.rpartition(".")[2] in NAMED and not document.keys() <= FIELDS:
        yield from (f"{path}.{name} must be text" for name, value in document.items() if not isinstance(value, str))
    elif isinstance(document, dict):
        for name, value in document.items():
            yield from unknown(value, f"{path}.{name}") if name in FIELDS else (f"{path}.{name}",)


# the pages on clusters: their commands and configurations are those of the programs


ROOT = Path(__file__).parents[2]
PAGES = ("start/cluster", "howto/kubernetes", "howto/bare-machines", "howto/troubleshoot")
HOWTO = "\n".join((ROOT / "docs" / f"{name}.md").read_text() for name in PAGES)
PROGRAMS: dict[str, click.Group] = {"cascade": cascade_command, "ray": ray_command, "serve": serve_command}
FOREIGN = {"aws", "docker", "export", "gcloud", "kubectl", "sed", "pip", "python3.11", "."}


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", HOWTO, re.MULTILINE | re.DOTALL)


def commands(text: str) -> Iterator[list[str]]:
    """Words of each command, also of those that `ray exec` runs elsewhere and containers run inside."""
    for line in text.replace("\\\n", " ").splitlines():
        lexer = shlex.shlex(re.sub(r"\$\((.*?)\)", "", line), posix=True, punctuation_chars="&|;")
        lexer.whitespace_split = True
        command: list[str] = []
        for word in [*lexer, "&&"]:
            if not set(word) <= set("&|;"):
                command.append(word)
                continue
            while command and re.match(r"\w+=", command[0]):
                command = command[1:]
            if command:
                yield command
            if command[:2] == ["ray", "exec"]:
                yield from commands(command[-1])
            if command[:2] == ["docker", "run"] and "cascade" in command:
                yield command[command.index("cascade") :]
            command = []


def test_commands_are_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards readers against commands, options and files that do not exist."""
    monkeypatch.chdir(ROOT)
    mine = tmp_path / "my.yaml"
    mine.write_text("tiers: []")
    seen = set[str]()
    for program, *words in (command for block in blocks("sh") for command in commands(block)):
        group = PROGRAMS.get(program.rpartition("/")[2])
        if group is None:
            assert program in FOREIGN, program
        else:
            name, *arguments = [str(mine) if word == "/my.yaml" else word for word in words]
            group.commands[name].make_context(name, [word.replace("cascade-serve/", "", 1) for word in arguments])
            seen.add(f"{program} {name}")
        files = [word.removeprefix("cascade-serve/") for word in words if re.match(r"(cascade-serve/)?cluster/\S+$", word)]
        assert all((ROOT / file).exists() for file in files), files
    assert {"ray start", "ray up", "ray exec", "ray attach"} <= seen
    assert {"serve deploy", "serve status", "cascade generate", "cascade serve"} <= seen


def test_files_and_configurations_are_taken() -> None:
    """Guards the table of files against those that it lacks, and copied configurations against fields that nobody knows."""
    named = set(re.findall(r"`(cluster/[\w./-]+\w)`", HOWTO)) | {f"cluster/ray-up/{name}.yaml" for name in ("gcp", "local")}
    there = {str(path.relative_to(ROOT)) for path in (ROOT / "cluster").rglob("*") if path.is_file()}
    assert there - {"cluster/README.md"} == {name for name in named if (ROOT / name).is_file()}
    assert all((ROOT / name).exists() for name in named), named
    for values in map(yaml.safe_load, blocks("yaml")):
        if "spec" in values and values.get("kind", "RayService") in KINDS:
            assert list(unknown(values)) == []
