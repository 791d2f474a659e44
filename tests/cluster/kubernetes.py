"""What KubeRay 1.6, Kubernetes and its gateways know of the names that we use: what they do not know, they drop."""

from collections.abc import Iterator, Mapping
from typing import Any

BASE = "apiVersion kind metadata name namespace annotations labels spec "
KINDS = {  # names of fields, wherever they stand in a document of the kind
    "RayService": "rayClusterConfig rayClusterDeletionDelaySeconds serveConfigV2 serveService upgradeStrategy type"
    # of the service and of upgrades
    " clusterUpgradeOptions gatewayClassName intervalSeconds maxSurgePercent stepSizePercent ports port appProtocol"
    # of the cluster
    " authOptions mode autoscalerOptions idleTimeoutSeconds enableInTreeAutoscaling gcsFaultToleranceOptions redisAddress"
    " redisPassword rayVersion headGroupSpec workerGroupSpecs groupName minReplicas maxReplicas replicas rayStartParams"
    # of pods
    " template nodeSelector tolerations key operator effect value terminationGracePeriodSeconds securityContext fsGroup"
    " runAsUser runAsNonRoot seccompProfile volumes emptyDir sizeLimit secret secretName optional"
    # of containers
    " containers image command env valueFrom secretKeyRef containerPort lifecycle preStop exec resources requests limits"
    " allowPrivilegeEscalation capabilities drop readOnlyRootFilesystem volumeMounts mountPath readOnly",
    "PodMonitor": "interval matchLabels podMetricsEndpoints podTargetLabels port selector",
    "PodDisruptionBudget": "matchLabels maxUnavailable selector",
    "NetworkPolicy": "from ingress matchLabels namespaceSelector podSelector policyTypes port ports",
    "Gateway": "certificateRefs gatewayClassName hostname listeners mode port protocol tls",
    "HTTPRoute": "backendRefs hostnames parentRefs port request rules sectionName timeouts",
    "GRPCRoute": "backendRefs hostnames matches method parentRefs port rules sectionName service",
}
# mappings whose names are their writer's, and whose values are text
FREE = ("limits", "requests", "resources", "rayStartParams", "nodeSelector", "labels", "annotations", "matchLabels")


def unknown(document: Mapping[str, Any]) -> Iterator[str]:
    """Paths in a document, of a RayService unless it says another kind, that nobody knows; and numbers where text is wanted."""
    return _unknown(document, {*BASE.split(), *KINDS[document.get("kind", "RayService")].split()}, "")


def _unknown(value: Any, known: set[str], path: str) -> Iterator[str]:
    if isinstance(value, list):
        for item in value:
            yield from _unknown(item, known, path)
    elif isinstance(value, dict):
        free = path.rpartition(".")[2] in FREE and not value.keys() <= {"requests", "limits"}
        for name, said in value.items():
            if free and not isinstance(said, str):
                yield f"{path}.{name} must be text"
            elif not free and name not in known:
                yield f"{path}.{name}"
            elif not free:
                yield from _unknown(said, known, f"{path}.{name}")
