"""The fields of KubeRay 1.6, Kubernetes and its gateways that we use: what they do not know, they drop without a word."""

from collections.abc import Iterator
from typing import Any

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
